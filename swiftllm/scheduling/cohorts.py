"""Cohorts between iterations: CPU requests that are part of the way through their token."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swiftllm.core.plan import CohortPlan, Rule, StepResult
from swiftllm.core.request import Request


@dataclass(eq=False)
class Cohort:
    """Requests that move together; ``boundary`` is the one they cross next (-1 is the embedding)."""

    cohort_id: int
    members: list[Request]
    boundary: int = -1

    def plan(self, rule: Rule) -> CohortPlan:
        return CohortPlan(self.cohort_id, tuple(self.members), rule)


class Cohorts:
    """Those under way, and the requests that leave theirs: aborted, or called back to the GPU.

    A ticket may still use the blocks of a request that leaves. Ids are never used twice, not even after a failure.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._by_id: dict[int, Cohort] = {}
        self.leaving: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def start(self, requests: list[Request]) -> Cohort:
        """A cohort that may take several iterations."""
        cohort = Cohort(next(self._ids), requests)
        self._by_id[cohort.cohort_id] = cohort
        for request in requests:
            request.cohort_id = cohort.cohort_id
        return cohort

    def batch(self, requests: Sequence[Request], rule: Rule) -> CohortPlan:
        """A cohort that the lane waits for, so that it ends with the iteration."""
        return CohortPlan(next(self._ids), tuple(requests), rule)

    def under_way(self) -> list[Cohort]:
        """Those with a member that stays, the most advanced first."""
        alive = [c for c in self._by_id.values() if any(r.request_id not in self.leaving for r in c.members)]
        return sorted(alive, key=lambda cohort: -cohort.boundary)

    def boundaries(self) -> Mapping[int, int]:
        """The boundary that each cohort crosses next, by its id."""
        return {cohort_id: cohort.boundary for cohort_id, cohort in self._by_id.items()}

    def call_out(self, request: Request) -> None:
        """Let a request leave its cohort as soon as its blocks may be moved. The work on its token is lost: waiting for
        the cohort would take an iteration for each layer that remains."""
        self.leaving[request.request_id] = request

    def advance(self, result: StepResult) -> tuple[list[Request], list[Request]]:
        """Move on. Returns the members of cohorts that have their token, and the requests that left, which rest.

        Whoever is to leave is out before the cohort's next boundary, so none of them is a member at the end.
        """
        left = [self.leaving.pop(request_id) for request_id in sorted(result.left)]  # a set's order differs by process
        done: list[Request] = []
        for cohort_id, cohort in list(self._by_id.items()):
            if result.left:
                cohort.members = [request for request in cohort.members if request.request_id not in result.left]
            if cohort_id in result.boundaries:
                cohort.boundary = result.boundaries[cohort_id]
                continue
            del self._by_id[cohort_id]
            done += cohort.members
        return done, left

    def dissolve(self) -> list[Request]:
        """End all cohorts; each begins its token anew. Returns the requests that were leaving, which rest."""
        left = list(self.leaving.values())
        for cohort in self._by_id.values():
            for request in cohort.members:
                request.cohort_id = None
        self._by_id.clear()
        self.leaving.clear()
        return left
