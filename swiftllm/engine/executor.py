"""Carries out plans: moves a lane and cohorts across the boundaries of an iteration, in one loop for every strategy.

A strategy is the set of rules of its cohorts (APEX section 3). A plan without cohorts is GPU-only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from swiftllm.core.plan import RIDE, CohortPlan, IterationPlan, Rule, StepResult
from swiftllm.engine.backend import Batch, ExecutorBackend, HostDied, Ticket


@dataclass(eq=False)
class CohortRun:
    """A cohort under way. ``boundary`` is the one it crosses next, ``ticket`` the attention that precedes it.

    ``submission`` ranks the tickets by time: the CPU worker serves them in this order. ``rule`` and ``crossings_left``
    are those of the iteration that last named it.
    """

    batch: Batch
    request_ids: tuple[str, ...]
    boundary: int = -1
    ticket: Ticket | None = None
    submission: int = 0
    rule: Rule = RIDE
    crossings_left: float = math.inf

    @property
    def is_ready(self) -> bool:
        """Whether the attention that precedes the boundary is done; never blocks."""
        return self.ticket is None or self.ticket.ready()


@dataclass
class _Run:
    """What one iteration has given so far."""

    tokens: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    waited_s: float = 0.0
    cpu_busy_s: float = 0.0


class _AtWork:
    """A context that notes who is being worked on. After an exception in it, the note stays."""

    def __init__(self) -> None:
        self.lane, self.groups = False, ()

    def on(self, *groups: Sequence[str], lane: bool = False) -> _AtWork:
        """The context of work on groups of request ids, or on the ``lane`` beside them."""
        self.lane, self.groups = lane, groups
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.on()


class Executor:
    """Moves the lane through all layers, and each cohort by its rule.

    A cohort lives from the plan that first names it until its token is done, which may take many plans.
    """

    def __init__(self, backend: ExecutorBackend, may_step: Callable[[int], bool] = lambda boundary: True) -> None:
        """``may_step``: whether a cohort that is not waited for may cross this boundary without the lane now.

        It may not where the weights would be streamed for it alone.
        """
        self.backend = backend
        self.may_step = may_step
        self._cohorts: dict[int, CohortRun] = {}
        self._plan = IterationPlan()
        self._submissions = itertools.count(1)
        self._at_work = _AtWork()

    @property
    def cohorts(self) -> tuple[CohortRun, ...]:
        """Those under way between iterations, the oldest first."""
        return tuple(self._cohorts.values())

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out one plan. The lane has crossed all layers when this returns; cohorts may be under way.

        Cohorts of earlier plans that this plan does not name stay at their boundary.
        """
        backend, run, at_work = self.backend, _Run(), self._at_work
        self._plan = plan
        start_s = backend.now()
        try:
            self._remove_leaving(plan, run)
        except HostDied as death:
            death.in_swap = True  # the plan's swaps have not begun
            raise
        with at_work.on([request.request_id for request in plan.moving()]):
            backend.swap(plan.swaps)
        with at_work.on(lane=True):
            lane = backend.open_lane(plan.lane) if plan.lane else None
        cohorts = [self._cohort(cohort_plan, lane) for cohort_plan in plan.cohorts]
        last = backend.num_layers - 1
        boundaries = range(-1, backend.num_layers)
        if lane is not None and not cohorts:
            with at_work.on(lane=True):
                tokens = backend.whole_iteration(lane)
            if tokens is not None:
                run.tokens.update(tokens)
                boundaries = range(0)
        elif lane is None and plan.time_limit_s is not None:
            self._advance(cohorts, start_s + plan.time_limit_s, run)
            boundaries = range(0)
        for boundary in boundaries:
            riders = [c for c in cohorts if c.boundary == boundary and c.rule.rides and self._boards(c, run)]
            self._cross(boundary, lane, riders, run)
            if lane is not None and boundary < last:
                with at_work.on(lane=True):
                    backend.gpu_attention(boundary + 1, lane)
            for cohort in cohorts:
                if cohort.boundary <= last and cohort.rule.steps and self._steps_now(cohort, boundary + 1):
                    self._step(cohort, run)
        self._cohorts = {i: c for i, c in self._cohorts.items() if c.boundary <= last}
        duration_s = backend.now() - start_s
        under_way = {cohort_id: cohort.boundary for cohort_id, cohort in self._cohorts.items()}
        left, busy_s = frozenset(run.left), duration_s - run.waited_s
        return StepResult(run.tokens, under_way, left, duration_s, busy_s, run.cpu_busy_s)

    def at_work(self) -> frozenset[str]:
        """Ids of the requests that :meth:`run` works on, or last worked on before it raised: the suspects."""
        lane = [request.request_id for request in self._plan.in_lane()] if self._at_work.lane else []
        return frozenset(itertools.chain(lane, *self._at_work.groups))

    def abandon(self) -> None:
        """Drop all cohorts. No CPU attention touches any block once this returns."""
        for cohort in self._cohorts.values():
            if cohort.ticket is not None:
                with contextlib.suppress(Exception):  # a failed task touches no block either
                    cohort.ticket.wait()
        self._cohorts.clear()

    def _cohort(self, plan: CohortPlan, lane: Batch | None) -> CohortRun:
        """The cohort under way, or a new one, with its rule for this iteration."""
        cohort = self._cohorts.get(plan.cohort_id)
        if cohort is None:
            request_ids = tuple(request.request_id for request in plan.requests)
            with self._at_work.on(request_ids):
                cohort = self._cohorts[plan.cohort_id] = CohortRun(self.backend.open_cohort(plan.requests), request_ids)
        cohort.rule = RIDE if lane is None and plan.rule.rides else plan.rule  # without a lane waiting delays nothing
        cohort.crossings_left = cohort.rule.most
        return cohort

    def _boards(self, cohort: CohortRun, run: _Run) -> bool:
        """Whether a cohort at the lane's boundary crosses it with the lane; its ticket is waited for if need be."""
        if cohort.crossings_left <= 0 or not (cohort.rule.waits or cohort.is_ready):
            return False
        self._wait(cohort, run)
        return True

    def _steps_now(self, cohort: CohortRun, next_of_lane: int) -> bool:
        """Whether a cohort crosses its boundary on its own before the lane goes on to the boundary ``next_of_lane``."""
        if cohort.rule.waits:
            return True
        if cohort.crossings_left <= 0 or cohort.boundary == next_of_lane:  # there it boards: a ride costs less
            return False
        return self.may_step(cohort.boundary) and cohort.is_ready

    def _step(self, cohort: CohortRun, run: _Run) -> None:
        """Let the cohort cross its boundary without the lane, once its ticket is ready."""
        self._wait(cohort, run)
        self._cross(cohort.boundary, None, [cohort], run)

    def _advance(self, cohorts: Sequence[CohortRun], end_s: float, run: _Run) -> None:
        """Without a lane: let cohorts cross their boundaries until ``end_s``, or until all have their tokens.

        It ends late by one ticket at most, since at least one cohort crosses a boundary. Tickets are waited for in the
        order in which the worker serves them, so that no cohort stays behind.
        """
        queue = sorted(cohorts, key=attrgetter("submission"))
        while queue:
            cohort = next((cohort for cohort in queue if cohort.is_ready), queue[0])
            queue.remove(cohort)
            self._step(cohort, run)
            if cohort.boundary < self.backend.num_layers:
                queue.append(cohort)
            if self.backend.now() >= end_s:
                break

    def _wait(self, cohort: CohortRun, run: _Run) -> None:
        """Wait for the cohort's ticket, and take out requests that leave: now nothing uses their blocks.

        The seconds count as waiting, not as work of the lane.
        """
        if cohort.ticket is not None:
            with self._at_work.on(cohort.request_ids):
                before_s = self.backend.now()
                run.cpu_busy_s += cohort.ticket.wait()
                run.waited_s += self.backend.now() - before_s
            cohort.ticket = None
        if self._plan.leaving and (leaving := self._plan.leaving.intersection(cohort.request_ids)):
            run.left |= leaving
            cohort.request_ids = tuple(i for i in cohort.request_ids if i not in leaving)
            if cohort.request_ids:
                cohort.batch = self.backend.drop_rows(cohort.batch, leaving)

    def _cross(self, boundary: int, lane: Batch | None, cohorts: Sequence[CohortRun], run: _Run) -> None:
        """Let lane and cohorts cross a boundary together, and submit the next tickets of the cohorts."""
        batches = ([lane] if lane is not None else []) + [cohort.batch for cohort in cohorts]
        if not batches:
            return
        with self._at_work.on(*(cohort.request_ids for cohort in cohorts), lane=lane is not None):
            run.tokens.update(self.backend.boundary(boundary, batches))
            for cohort in cohorts:
                cohort.crossings_left -= 1
                cohort.boundary += 1
                if cohort.boundary < self.backend.num_layers:
                    cohort.ticket = self.backend.submit_cpu_attention(cohort.boundary, cohort.batch)
                    cohort.submission = next(self._submissions)

    def _remove_leaving(self, plan: IterationPlan, run: _Run) -> None:
        """Remove leaving requests from cohorts whose attention is done; wait for it only in an otherwise empty plan.

        From other cohorts they are removed as soon as it is done: see :meth:`_wait`.
        """
        nothing_else = not plan.lane and not plan.cohorts
        for cohort_id, cohort in list(self._cohorts.items()):
            if plan.leaving.isdisjoint(cohort.request_ids) or not (nothing_else or cohort.is_ready):
                continue
            self._wait(cohort, run)
            if not cohort.request_ids:
                del self._cohorts[cohort_id]
