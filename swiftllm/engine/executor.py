"""Carries out plans that have only a lane: no cohorts, no overlap. The synchronous twin of the overlap executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request
from swiftllm.engine.backend import Backend


class Executor(Protocol):
    """Carries out a scheduler's plans on a backend, one iteration after the other."""

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out one plan: the lane is through all layers when this returns, cohorts may be under way."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way between iterations."""

    @property
    def cohorts(self) -> Sequence[Any]:
        """Those under way between iterations, as the executor keeps them; for reports."""

    def at_work(self) -> frozenset[str]:
        """Ids of the requests whose work :meth:`run` last turned to: where it raises or hangs, it is with these."""

    def abandon(self) -> None:
        """Drop what is under way between iterations; once this returns, nothing touches any block."""


class LaneExecutor:
    """Moves the lane through all layers, one after the other."""

    is_idle = True
    cohorts = ()

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._at_work: Callable[[], Iterable[Request]] = tuple

    def run(self, plan: IterationPlan) -> StepResult:
        if plan.cohorts:
            raise ValueError("a lane executor has no CPU worker for cohorts; use the overlap executor")
        backend = self.backend
        start_s = backend.now()
        self._at_work = plan.swapping
        backend.swap(plan.swaps)
        self._at_work = plan.in_lane
        tokens: Mapping[str, int] | None = {}
        if plan.lane:
            lane = backend.open_lane(plan.lane)
            tokens = backend.whole_iteration(lane)
            if tokens is None:
                last = backend.num_layers - 1
                for layer in range(-1, last):
                    backend.boundary(layer, [lane])
                    backend.gpu_attention(layer + 1, lane)
                tokens = backend.boundary(last, [lane])
        duration_s = backend.now() - start_s
        return StepResult(tokens, {}, frozenset(), duration_s, lane_busy_s=duration_s, cpu_busy_s=0.0)

    def at_work(self) -> frozenset[str]:
        return frozenset(request.request_id for request in self._at_work())

    def abandon(self) -> None:
        pass
