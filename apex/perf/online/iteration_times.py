"""What an iteration that has run should have taken, by the profile table: in the lane, and on the CPU worker.

A plan is predicted before it runs, by each system's own rules. This counts what has run: boundaries crossed, tickets
submitted and collected. With a table that is right, the sums are the times of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel, total_s
from apex.perf.online.factor import SecondsRange
from swiftllm.core.plan import CohortPlan, IterationPlan, StepResult
from swiftllm.core.request import Tier


class CohortAdvance(NamedTuple):
    """A cohort, the boundary it was to cross next before the iteration, and the one after it."""

    cohort: CohortPlan
    start: int
    end: int  # the number of layers, once its token is done


def crossings(
    plan: IterationPlan, result: StepResult, boundaries: Mapping[int, int], num_layers: int
) -> list[CohortAdvance]:
    """The way of every cohort of a plan. ``boundaries`` are those of cohorts that were under way before, by id."""
    return [
        CohortAdvance(cohort, boundaries.get(cohort.cohort_id, -1), result.boundaries.get(cohort.cohort_id, num_layers))
        for cohort in plan.cohorts
    ]


def cpu_attention_span(model: PerfModel, ways: Sequence[CohortAdvance]) -> SecondsRange:
    """Seconds that the worker should have computed for the tickets collected in an iteration.

    The table's times include the way to the worker and back, and a ticket's time need not. That way depends on the
    number of requests. It takes no longer than their ticket at the shortest context, which is the difference of the
    bounds.
    """
    seconds = way_s = 0.0
    surface = model.table.cpu_attention
    shortest = surface.curves[0].sizes[0]
    for cohort, start, end in ways:
        collected = end - max(start, 0)
        if collected > 0:
            requests = cohort.requests
            seconds += collected * model.cpu_attention_s(len(requests), context_tokens(requests))
            way_s += collected * surface(len(requests), shortest)
    return SecondsRange(max(0.0, seconds - way_s), seconds)


def lane_span(model: PerfModel, plan: IterationPlan, ways: Sequence[CohortAdvance]) -> SecondsRange:
    """Seconds that the lane should have taken for an iteration, waits for tickets left out.

    The upper bound includes the host's work, part of which lies between iterations, and swaps, which need not delay the
    lane. It also includes a boundary of its own for each that a cohort may have crossed without the lane.
    """
    load = LaneLoad.from_draft(plan)
    apart = [way for way in ways if _crosses_alone(plan, way.cohort)]
    lane = [way for way in ways if not _crosses_alone(plan, way.cohort)]
    base, sampled = load.tokens, load.decodes + sum([item.samples for item in plan.prefills])
    extra: Counter[int] = Counter()  # rows that ride some boundaries, by boundary
    possible_s = 0.0
    for cohort, start, end in lane:
        rows = len(cohort.requests)
        if load.tokens and end - start > 1 and not (cohort.rule.waits and cohort.rule.rides):
            possible_s += (end - start) * model.linear_s(rows)  # more than one ride: some boundaries by itself
        if start < 0 and end == model.num_layers:
            base, sampled = base + rows, sampled + rows
            continue
        for layer in range(start, end):
            extra[layer] += rows
    seconds = _boundaries_s(model, base, sampled, -1, model.num_layers)
    for layer, rows in extra.items():
        seconds += _boundaries_s(model, base + rows, sampled + rows, layer, layer + 1)
        seconds -= _boundaries_s(model, base, sampled, layer, layer + 1)
    for cohort, start, end in ways:
        rows = len(cohort.requests)
        submitted = min(end, model.num_layers - 1) - start
        seconds += submitted * model.hand_over_s(rows)
    for cohort, start, end in apart:
        seconds += _boundaries_s(model, len(cohort.requests), len(cohort.requests), start, end)
    seconds += model.num_layers * load.gpu_attention_s(model)
    if load.tokens:  # which cross all boundaries
        seconds = max(seconds, model.num_layers * model.stream_s)
    return SecondsRange(seconds, seconds + possible_s + _host_s(model, load, ways) + _swaps_s(model, plan))


def _crosses_alone(plan: IterationPlan, cohort: CohortPlan) -> bool:
    """Whether each boundary that the cohort crosses reads the weights for it alone."""
    without_lane = not (plan.decodes or plan.prefills)
    return not cohort.rule.rides or (without_lane and plan.time_limit_s is not None)


def _boundaries_s(model: PerfModel, rows: int, sampled: int, start: int, end: int) -> float:
    """Boundaries ``start`` to ``end - 1`` of a batch; only ``sampled`` of its rows cross the last one of all."""
    if rows <= 0 or start >= end:
        return 0.0
    first, last = start < 0, end == model.num_layers
    seconds = (end - start - first - last) * model.linear_s(rows)
    if first:
        seconds += model.first_boundary_s(rows)
    if last and sampled:
        seconds += model.last_boundary_s(sampled)
    return seconds


def _host_s(model: PerfModel, load: LaneLoad, ways: Sequence[CohortAdvance]) -> float:
    each_s = model.host_work_s(0)
    opened = [load.requests, *(len(cohort.requests) for cohort, start, _ in ways if start < 0)]
    return each_s + total_s([model.host_work_s(requests) - each_s for requests in opened if requests])


def _swaps_s(model: PerfModel, plan: IterationPlan) -> float:
    blocks = {tier: 0 for tier in Tier}
    for swap in plan.swaps:
        blocks[swap.source] += len(swap.source_blocks)
    return total_s([model.swap_s(number) for number in blocks.values()])
