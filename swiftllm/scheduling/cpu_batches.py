"""CPU batches between iterations: CPU requests that are part of the way through their token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swiftllm.core.plan import CpuBatchMode, CpuBatchPlan, StepResult
from swiftllm.core.request import Request


@dataclass(eq=False)
class CpuBatch:
    """Requests that move together; ``stage`` is the one they run next (-1 is the embedding)."""

    cpu_batch_id: int
    members: list[Request]
    stage: int = -1

    def plan(self, mode: CpuBatchMode) -> CpuBatchPlan:
        return CpuBatchPlan(self.cpu_batch_id, tuple(self.members), mode)


class CpuBatches:
    """Those under way, and the requests that leave theirs: aborted, or recalled to the GPU.

    An attention task may still use the blocks of a request that leaves. Ids are never used twice, not even after a
    failure.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._by_id: dict[int, CpuBatch] = {}
        self.leaving: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def start(self, requests: list[Request]) -> CpuBatch:
        """A CPU batch that may take several iterations."""
        cpu_batch = CpuBatch(next(self._ids), requests)
        self._by_id[cpu_batch.cpu_batch_id] = cpu_batch
        for request in requests:
            request.cpu_batch_id = cpu_batch.cpu_batch_id
        return cpu_batch

    def batch(self, requests: Sequence[Request], mode: CpuBatchMode) -> CpuBatchPlan:
        """A CPU batch that the GPU batch waits for, so that it ends with the iteration."""
        return CpuBatchPlan(next(self._ids), tuple(requests), mode)

    def under_way(self) -> list[CpuBatch]:
        """Those with a member that stays, the most advanced first."""
        alive = [c for c in self._by_id.values() if any(r.request_id not in self.leaving for r in c.members)]
        return sorted(alive, key=lambda cpu_batch: -cpu_batch.stage)

    def stages(self) -> Mapping[int, int]:
        """The stage that each CPU batch runs next, by its id."""
        return {cpu_batch_id: cpu_batch.stage for cpu_batch_id, cpu_batch in self._by_id.items()}

    def detach(self, request: Request) -> None:
        """Let a request leave its CPU batch as soon as its blocks may be moved. The work on its token is lost: waiting
        for the CPU batch would take an iteration for each layer that remains."""
        self.leaving[request.request_id] = request

    def advance(self, result: StepResult) -> tuple[list[Request], list[Request]]:
        """Move on. Returns the members of CPU batches that have their token, and the requests that left, which are
        idle.

        Whoever is to leave is out before the CPU batch's next stage, so none of them is a member at the end.
        """
        # a set's order differs by process
        left = [self.leaving.pop(request_id) for request_id in sorted(result.detached)]
        done: list[Request] = []
        for cpu_batch_id, cpu_batch in list(self._by_id.items()):
            if result.detached:
                cpu_batch.members = [
                    request for request in cpu_batch.members if request.request_id not in result.detached
                ]
            if cpu_batch_id in result.stages:
                cpu_batch.stage = result.stages[cpu_batch_id]
                continue
            del self._by_id[cpu_batch_id]
            done += cpu_batch.members
        return done, left

    def dissolve(self) -> list[Request]:
        """End all CPU batches; each begins its token anew. Returns the requests that were leaving, which are idle."""
        left = list(self.leaving.values())
        for cpu_batch in self._by_id.values():
            for request in cpu_batch.members:
                request.cpu_batch_id = None
        self._by_id.clear()
        self.leaving.clear()
        return left
