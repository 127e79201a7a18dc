"""Carries out plans that have only a lane: no cohorts, no overlap. The synchronous twin of the overlap executor."""

from __future__ import annotations

from typing import Protocol

from swiftllm.backend import Backend
from swiftllm.plan import IterationPlan, StepResult


class Executor(Protocol):
    def run(self, plan: IterationPlan) -> StepResult: ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way between iterations."""


class LaneExecutor:
    """Moves the lane through all layers, one after the other."""

    is_idle = True

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def run(self, plan: IterationPlan) -> StepResult:
        if plan.cohorts:
            raise ValueError("a lane executor has no CPU worker for cohorts; use the overlap executor")
        backend = self.backend
        start_s = backend.now()
        backend.swap(plan.swaps)
        tokens: dict[str, int] = {}
        if plan.lane:
            lane = backend.open_lane(plan.lane)
            last = backend.num_layers - 1
            for layer in range(-1, last):
                backend.boundary(layer, [lane])
                backend.gpu_attention(layer + 1, lane)
            tokens.update(backend.boundary(last, [lane]))
        duration_s = backend.now() - start_s
        return StepResult(tokens, {}, frozenset(), duration_s, lane_busy_s=duration_s, cpu_busy_s=0.0)
