"""Stands in for an engine's service: says what it is told to say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swiftllm.scheduling.admission import SchedulerLimits
from swiftllm.server.service.snapshot import Snapshot

DESCRIPTION = {
    "system": "apex", "model": "/models/tiny", "device": "a processor", "device_type": "cpu", "dtype": "float32",
    "num_gpu_blocks": 8, "num_cpu_blocks": 64, "block_size": 16, "kv_bytes_per_block": 1 << 20, "cpu_kernel": "native",
    "cpu_threads": 1, "cpu_kv_dtype": "int8", "cpu_kv_bytes_per_block": 1 << 18,
}  # fmt: skip
LIMITS = SchedulerLimits(512, 256, 2048)


class FakeService:
    """``state`` is the snapshot that everybody gets; :meth:`change` it."""

    def __init__(self) -> None:
        self.state = Snapshot(gpu_blocks_total=8, cpu_blocks_total=64)
        self.observers: list[Any] = []
        self.engine = SimpleNamespace(
            residents=SimpleNamespace(limits=LIMITS),
            kv=SimpleNamespace(names=None),
            policy=SimpleNamespace(slo=None),
            describe=lambda: dict(DESCRIPTION),
        )

    def add_observer(self, observer: object) -> None:
        self.observers.append(observer)

    def snapshot(self) -> Snapshot:
        return self.state

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)
