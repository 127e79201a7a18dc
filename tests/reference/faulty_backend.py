"""A backend that raises where a test wants it to; everything else goes to the backend behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request
from swiftllm.engine.backend import AttentionFuture, Batch
from swiftllm.engine.engine import Engine

Fault = Callable[[str, frozenset[str]], None]
"""Called with an operation and the ids of the requests it is about, before it is carried out; raises to make it fail.
Operations: swap, open_gpu_batch, open_cpu_batch, stage, gpu_attention, submit, attention task, drop_rows."""


class FaultyFuture:
    def __init__(self, inner: AttentionFuture, check: Callable[[], None]) -> None:
        self.inner = inner
        self.check = check

    def ready(self) -> bool:
        return self.inner.ready()

    def wait(self) -> float:
        seconds = self.inner.wait()
        self.check()
        return seconds


class FaultyBackend:
    def __init__(self, engine: Engine, fault: Fault) -> None:
        """Stands between the engine's executor and its backend from now on."""
        self.inner = engine.executor.backend
        self.fault = fault
        self.ids: dict[int, tuple[Batch, frozenset[str]]] = {}
        engine.executor.backend = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _opened(self, batch: Batch, ids: frozenset[str]) -> Batch:
        self.ids[id(batch)] = (batch, ids)
        return batch

    def _of(self, *batches: Batch) -> frozenset[str]:
        return frozenset().union(*(self.ids[id(batch)][1] for batch in batches))

    def swap(self, swaps: Sequence[Swap]) -> None:
        if swaps:
            self.fault("swap", frozenset(swap.request.request_id for swap in swaps))
        self.inner.swap(swaps)

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> Batch:
        ids = frozenset(item.request.request_id for item in items)
        self.fault("open_gpu_batch", ids)
        return self._opened(self.inner.open_gpu_batch(items), ids)

    def open_cpu_batch(self, requests: Sequence[Request]) -> Batch:
        ids = frozenset(request.request_id for request in requests)
        self.fault("open_cpu_batch", ids)
        return self._opened(self.inner.open_cpu_batch(requests), ids)

    def drop_rows(self, cpu_batch: Batch, request_ids: frozenset[str]) -> Batch:
        self.fault("drop_rows", self._of(cpu_batch))
        return self._opened(self.inner.drop_rows(cpu_batch, request_ids), self._of(cpu_batch) - request_ids)

    def run_stage(self, layer: int, batches: Sequence[Batch]) -> Mapping[str, int]:
        self.fault("run_stage", self._of(*batches))
        return self.inner.run_stage(layer, batches)

    def gpu_attention(self, layer: int, gpu_batch: Batch) -> None:
        self.fault("gpu_attention", self._of(gpu_batch))
        self.inner.gpu_attention(layer, gpu_batch)

    def submit_cpu_attention(self, layer: int, cpu_batch: Batch) -> AttentionFuture:
        ids = self._of(cpu_batch)
        self.fault("submit", ids)
        return FaultyFuture(self.inner.submit_cpu_attention(layer, cpu_batch), lambda: self.fault("attention", ids))
