"""Stands in for an engine's client: says what it is told to say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftllm.core.request import ServiceClass, Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.scheduling.validation import RequestLimits
from swiftllm.server.engine_status import EngineHistograms, Snapshot
from swiftllm.server.messages import Ready, Report, ServiceLimits

DESCRIPTION = {
    "system": "apex", "model": "/models/tiny", "device": "a processor", "device_type": "cpu", "dtype": "float32",
    "num_gpu_blocks": 8, "num_cpu_blocks": 64, "block_size": 16, "kv_bytes_per_block": 1 << 20, "cpu_kernel": "native",
    "cpu_threads": 1, "cpu_kv_dtype": "int8", "cpu_kv_bytes_per_block": 1 << 18,
}  # fmt: skip


class FakeService:
    """``state`` is the snapshot that everybody gets; :meth:`change` it."""

    def __init__(self) -> None:
        self.state = Snapshot(gpu_blocks_total=8, cpu_blocks_total=64)
        self.observers: list[Any] = []
        self.tokenizer = None
        self.histograms = EngineHistograms(2048, None)
        self.timeline: dict[str, Any] | None = None
        tiers = {service_class: tuple(Tier) for service_class in ServiceClass}
        admission = RequestLimits(100, 2048, LayerGroups(16), {Tier.GPU: 8, Tier.CPU: 64}, tiers)
        self.ready = Ready(dict(DESCRIPTION), ServiceLimits(), admission, 256, [], None, False, None, True)

    @property
    def limits(self) -> ServiceLimits:
        return self.ready.limits

    async def connect(self) -> None:
        pass

    def close(self) -> None:
        pass

    async def snapshot(self) -> Snapshot:
        return self.state

    def report_now(self) -> Report:
        outcomes = [(*key, count) for key, count in self.histograms.slo_outcomes.items()]
        return Report(self.state, self.histograms.all, outcomes, self.timeline)

    async def report(self, wants_timeline: bool = False) -> Report:
        return self.report_now()

    def change(self, **values: Any) -> None:
        self.state = replace(self.state, **values)
