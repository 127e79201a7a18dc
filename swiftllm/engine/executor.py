"""Carries out plans: moves a lane and cohorts across the boundaries of an iteration, in one loop for every strategy.

A strategy is the set of stepping rules of its cohorts (APEX section 3). A plan without cohorts is GPU-only.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from swiftllm.core.plan import CohortPlan, IterationPlan, SteppingRule, StepResult
from swiftllm.engine.backend import Backend, Batch, Ticket


@dataclass(eq=False)
class Cohort:
    """A cohort under way. ``layer`` is the boundary it crosses next, ``ticket`` the attention that precedes it.

    ``submission`` ranks the tickets by time: the CPU worker serves them in this order.
    """

    batch: Batch
    request_ids: tuple[str, ...]
    layer: int = -1
    ticket: Ticket | None = None
    submission: int = 0


@dataclass
class _Rider:
    """A cohort that may cross boundaries with the lane, in one iteration."""

    cohort: Cohort
    rule: SteppingRule
    crossings_left: float


@dataclass
class _Run:
    """What one iteration has given so far."""

    tokens: dict[str, int] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    waited_s: float = 0.0
    cpu_busy_s: float = 0.0


class Executor(Protocol):
    """Carries out a scheduler's plans on a backend, one iteration after the other."""

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out one plan. The lane has crossed all layers when this returns; cohorts may be under way."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way between iterations."""

    @property
    def cohorts(self) -> Sequence[Cohort]:
        """Cohorts under way between iterations, the oldest first."""

    def at_work(self) -> frozenset[str]:
        """Ids of the requests that :meth:`run` last worked on: the suspects when it raises or hangs."""

    def abandon(self) -> None:
        """Drop all cohorts. No CPU attention touches any block once this returns."""


class OverlapExecutor:
    """Moves the lane through all layers, and each cohort by its stepping rule.

    A cohort lives from the plan that first names it until its token is done, which may take many plans.
    """

    def __init__(self, backend: Backend, may_step: Callable[[int], bool] = lambda layer: True) -> None:
        """``may_step``: whether a free-running cohort may cross this boundary without the lane now.

        It may not where the weights would be streamed for it alone.
        """
        self.backend = backend
        self.may_step = may_step
        self._cohorts: dict[int, Cohort] = {}
        self._plan = IterationPlan()
        self._submissions = itertools.count(1)
        self._at_work: tuple[bool, Sequence[Sequence[str]]] = (False, ())  # the lane, and groups of request ids

    @property
    def is_idle(self) -> bool:
        return not self._cohorts

    @property
    def cohorts(self) -> tuple[Cohort, ...]:
        """Those under way, the oldest first."""
        return tuple(self._cohorts.values())

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out one plan.

        Cohorts of earlier plans that this plan does not name stay at their layer.
        """
        backend, run = self.backend, _Run()
        self._plan, self._at_work = plan, (False, ())
        start_s = backend.now()
        self._remove_leaving(plan, run)
        self._at_work = (False, [[swap.request.request_id for swap in plan.swaps]])
        backend.swap(plan.swaps)
        self._at_work = (True, ())
        lane = backend.open_lane(plan.lane) if plan.lane else None
        riders, steppers = self._cohorts_by_rule(plan, lane)
        last = backend.num_layers - 1
        layers = range(-1, backend.num_layers)
        if lane is not None and not riders and not steppers:
            tokens = backend.whole_iteration(lane)
            if tokens is not None:
                run.tokens.update(tokens)
                layers = range(0)
        elif lane is None and plan.time_limit_s is not None:
            self._advance(steppers + [rider.cohort for rider in riders], start_s + plan.time_limit_s, run)
            layers = range(0)
        for layer in layers:
            riding = [rider for rider in riders if rider.cohort.layer == layer and self._admit(rider, run)]
            self._cross(layer, lane, [rider.cohort for rider in riding], run)
            for rider in riding:
                rider.crossings_left -= 1
                self._submit_next(rider.cohort)
            if lane is not None and layer < last:
                self._at_work = (True, ())
                backend.gpu_attention(layer + 1, lane)
            for cohort in [c for c in steppers if c.layer <= last]:
                self._step(cohort, run)
            for rider in [r for r in riders if r.rule is SteppingRule.FREE_RUNNING and r.cohort.layer <= last]:
                # At the lane's next layer it boards, since a rider costs less than a step.
                if rider.crossings_left <= 0 or rider.cohort.layer == layer + 1:
                    continue
                if self.may_step(rider.cohort.layer) and _is_ready(rider.cohort):
                    rider.crossings_left -= 1
                    self._step(rider.cohort, run)
            riders = [rider for rider in riders if rider.crossings_left > 0]
        self._cohorts = {i: c for i, c in self._cohorts.items() if c.layer <= last}
        duration_s = backend.now() - start_s
        cohort_layers = {cohort_id: cohort.layer for cohort_id, cohort in self._cohorts.items()}
        left, busy_s = frozenset(run.left), duration_s - run.waited_s
        return StepResult(run.tokens, cohort_layers, left, duration_s, busy_s, run.cpu_busy_s)

    def at_work(self) -> frozenset[str]:
        in_lane, groups = self._at_work
        lane = [request.request_id for request in self._plan.in_lane()] if in_lane else []
        return frozenset(itertools.chain(lane, *groups))

    def abandon(self) -> None:
        for cohort in self._cohorts.values():
            if cohort.ticket is not None:
                with contextlib.suppress(Exception):  # a failed task touches no block either
                    cohort.ticket.wait()
        self._cohorts.clear()

    def _cohorts_by_rule(self, plan: IterationPlan, lane: Batch | None) -> tuple[list[_Rider], list[Cohort]]:
        riders: list[_Rider] = []
        steppers: list[Cohort] = []
        for cohort_plan in plan.cohorts:
            cohort = self._cohorts.get(cohort_plan.cohort_id) or self._open(cohort_plan)
            if cohort_plan.rule is SteppingRule.STEP_AND_WAIT:
                steppers.append(cohort)
            else:  # waiting delays nothing when the lane is empty
                rule, most = cohort_plan.rule, cohort_plan.most_crossings
                if lane is None:
                    rule, most = SteppingRule.RIDE_AND_WAIT, math.inf
                elif rule is SteppingRule.RIDE_IF_READY:
                    most = 1
                riders.append(_Rider(cohort, rule, most))
        return riders, steppers

    def _open(self, plan: CohortPlan) -> Cohort:
        request_ids = tuple(request.request_id for request in plan.requests)
        self._at_work = (False, [request_ids])
        cohort = self._cohorts[plan.cohort_id] = Cohort(self.backend.open_cohort(plan.requests), request_ids)
        return cohort

    def _admit(self, rider: _Rider, run: _Run) -> bool:
        """Whether a cohort at the lane's layer rides this boundary."""
        if not rider.rule.lane_waits and not _is_ready(rider.cohort):
            return False
        self._wait(rider.cohort, run)
        return True

    def _step(self, cohort: Cohort, run: _Run) -> None:
        """Let the cohort cross its boundary without the lane, once its ticket is ready."""
        self._wait(cohort, run)
        self._cross(cohort.layer, None, [cohort], run)
        self._submit_next(cohort)

    def _advance(self, cohorts: Sequence[Cohort], end_s: float, run: _Run) -> None:
        """Without a lane: let cohorts cross their boundaries until ``end_s``, or until all have their tokens.

        It ends late by one ticket at most, since at least one cohort crosses a boundary. Tickets are waited for in the
        order in which the worker serves them, so that no cohort stays behind.
        """
        queue = sorted(cohorts, key=attrgetter("submission"))
        while queue:
            cohort = next(filter(_is_ready, queue), queue[0])
            queue.remove(cohort)
            self._step(cohort, run)
            if cohort.layer < self.backend.num_layers:
                queue.append(cohort)
            if self.backend.now() >= end_s:
                break

    def _wait(self, cohort: Cohort, run: _Run) -> None:
        """Wait for the cohort's ticket, and take out requests that leave: now nothing uses their blocks.

        The seconds count as waiting, not as work of the lane.
        """
        if cohort.ticket is not None:
            self._at_work = (False, [cohort.request_ids])
            before_s = self.backend.now()
            run.cpu_busy_s += cohort.ticket.wait()
            run.waited_s += self.backend.now() - before_s
            cohort.ticket = None
        if self._plan.leaving and (leaving := self._plan.leaving.intersection(cohort.request_ids)):
            run.left |= leaving
            cohort.request_ids = tuple(i for i in cohort.request_ids if i not in leaving)
            if cohort.request_ids:
                cohort.batch = self.backend.drop_rows(cohort.batch, leaving)

    def _cross(self, layer: int, lane: Batch | None, cohorts: list[Cohort], run: _Run) -> None:
        batches = ([lane] if lane is not None else []) + [cohort.batch for cohort in cohorts]
        if batches:
            self._at_work = (lane is not None, [cohort.request_ids for cohort in cohorts])
            run.tokens.update(self.backend.boundary(layer, batches))

    def _submit_next(self, cohort: Cohort) -> None:
        cohort.layer += 1
        if cohort.layer < self.backend.num_layers:
            cohort.ticket = self.backend.submit_cpu_attention(cohort.layer, cohort.batch)
            cohort.submission = next(self._submissions)

    def _remove_leaving(self, plan: IterationPlan, run: _Run) -> None:
        """Remove leaving requests from cohorts whose attention is done; wait for it only in an otherwise empty plan.

        From other cohorts they are removed as soon as it is done: see :meth:`_wait`.
        """
        nothing_else = not plan.lane and not plan.cohorts
        for cohort_id, cohort in list(self._cohorts.items()):
            if plan.leaving.isdisjoint(cohort.request_ids) or not (nothing_else or _is_ready(cohort)):
                continue
            self._wait(cohort, run)
            if not cohort.request_ids:
                del self._cohorts[cohort_id]


def _is_ready(cohort: Cohort) -> bool:
    """Whether the attention that precedes the cohort's boundary is done; never blocks."""
    return cohort.ticket is None or cohort.ticket.ready()
