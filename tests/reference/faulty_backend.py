"""A backend that raises where a test wants it to; everything else goes to the backend behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swiftllm.core.plan import LaneItem, Swap
from swiftllm.core.request import Request
from swiftllm.engine.backend import Batch, Ticket
from swiftllm.engine.engine import Engine

Fault = Callable[[str, frozenset[str]], None]
"""Called with an operation and the ids of the requests it is about, before it is carried out; raises to make it fail.
Operations: swap, open_lane, open_cohort, boundary, gpu_attention, submit, ticket, drop_rows."""


class FaultyTicket:
    def __init__(self, inner: Ticket, check: Callable[[], None]) -> None:
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

    def open_lane(self, items: Sequence[LaneItem]) -> Batch:
        ids = frozenset(item.request.request_id for item in items)
        self.fault("open_lane", ids)
        return self._opened(self.inner.open_lane(items), ids)

    def open_cohort(self, requests: Sequence[Request]) -> Batch:
        ids = frozenset(request.request_id for request in requests)
        self.fault("open_cohort", ids)
        return self._opened(self.inner.open_cohort(requests), ids)

    def drop_rows(self, cohort: Batch, request_ids: frozenset[str]) -> Batch:
        self.fault("drop_rows", self._of(cohort))
        return self._opened(self.inner.drop_rows(cohort, request_ids), self._of(cohort) - request_ids)

    def boundary(self, layer: int, batches: Sequence[Batch]) -> Mapping[str, int]:
        self.fault("boundary", self._of(*batches))
        return self.inner.boundary(layer, batches)

    def gpu_attention(self, layer: int, lane: Batch) -> None:
        self.fault("gpu_attention", self._of(lane))
        self.inner.gpu_attention(layer, lane)

    def submit_cpu_attention(self, layer: int, cohort: Batch) -> Ticket:
        ids = self._of(cohort)
        self.fault("submit", ids)
        return FaultyTicket(self.inner.submit_cpu_attention(layer, cohort), lambda: self.fault("ticket", ids))
