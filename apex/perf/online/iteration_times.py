"""What an iteration that has run should have taken, by the profile table: in the GPU batch, and on the CPU worker.

A plan is predicted before it runs, by each system's own rules. This counts what has run: stages run, attention
tasks submitted and collected. With a table that is right, the sums are the times of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel, total_s
from apex.perf.online.factor import SecondsRange
from swiftllm.core.plan import CpuBatchPlan, IterationPlan, StepResult
from swiftllm.core.request import Tier


class CpuBatchAdvance(NamedTuple):
    """A CPU batch, the stage it was to run next before the iteration, and the one after it."""

    cpu_batch: CpuBatchPlan
    start: int
    end: int  # the number of layers, once its token is done


def crossings(
    plan: IterationPlan, result: StepResult, stages: Mapping[int, int], num_layers: int
) -> list[CpuBatchAdvance]:
    """The way of every CPU batch of a plan. ``stages`` are those of CPU batches that were under way before, by id."""
    return [
        CpuBatchAdvance(
            cpu_batch, stages.get(cpu_batch.cpu_batch_id, -1), result.stages.get(cpu_batch.cpu_batch_id, num_layers)
        )
        for cpu_batch in plan.cpu_batches
    ]


def cpu_attention_span(model: PerfModel, ways: Sequence[CpuBatchAdvance]) -> SecondsRange:
    """Seconds that the worker should have computed for the attention tasks collected in an iteration.

    The table's times include the way to the worker and back, and an attention task's time need not. That way depends on
    the number of requests. It takes no longer than their attention task at the shortest context, which is the
    difference of the bounds.
    """
    seconds = way_s = 0.0
    surface = model.table.cpu_attention
    shortest = surface.curves[0].sizes[0]
    for cpu_batch, start, end in ways:
        collected = end - max(start, 0)
        if collected > 0:
            requests = cpu_batch.requests
            seconds += collected * model.cpu_attention_s(len(requests), context_tokens(requests))
            way_s += collected * surface(len(requests), shortest)
    return SecondsRange(max(0.0, seconds - way_s), seconds)


def gpu_batch_span(model: PerfModel, plan: IterationPlan, ways: Sequence[CpuBatchAdvance]) -> SecondsRange:
    """Seconds that the GPU batch should have taken for an iteration, waits for attention tasks left out.

    The upper bound includes the host's work, part of which lies between iterations, and swaps, which need not delay the
    GPU batch. It also includes a stage of its own for each that a CPU batch may have run without the GPU batch.
    """
    load = GpuBatchLoad.from_builder(plan)
    apart = [way for way in ways if _crosses_alone(plan, way.cpu_batch)]
    gpu_batch = [way for way in ways if not _crosses_alone(plan, way.cpu_batch)]
    base, sampled = load.tokens, load.decodes + sum([item.samples for item in plan.prefills])
    extra: Counter[int] = Counter()  # rows that join some stages, by stage
    possible_s = 0.0
    for cpu_batch, start, end in gpu_batch:
        rows = len(cpu_batch.requests)
        if load.tokens and end - start > 1 and not (cpu_batch.mode.waits and cpu_batch.mode.joins):
            possible_s += (end - start) * model.linear_s(rows)  # more than one join: some stages by itself
        if start < 0 and end == model.num_layers:
            base, sampled = base + rows, sampled + rows
            continue
        for layer in range(start, end):
            extra[layer] += rows
    seconds = _stages_s(model, base, sampled, -1, model.num_layers)
    for layer, rows in extra.items():
        seconds += _stages_s(model, base + rows, sampled + rows, layer, layer + 1)
        seconds -= _stages_s(model, base, sampled, layer, layer + 1)
    for cpu_batch, start, end in ways:
        rows = len(cpu_batch.requests)
        submitted = min(end, model.num_layers - 1) - start
        seconds += submitted * model.hand_over_s(rows)
    for cpu_batch, start, end in apart:
        seconds += _stages_s(model, len(cpu_batch.requests), len(cpu_batch.requests), start, end)
    seconds += model.num_layers * load.gpu_attention_s(model)
    if load.tokens:  # which run all stages
        seconds = max(seconds, model.num_layers * model.stream_s)
    return SecondsRange(seconds, seconds + possible_s + _host_s(model, load, ways) + _swaps_s(model, plan))


def _crosses_alone(plan: IterationPlan, cpu_batch: CpuBatchPlan) -> bool:
    """Whether each stage that the CPU batch runs reads the weights for it alone."""
    without_gpu_batch = not (plan.decodes or plan.prefills)
    return not cpu_batch.mode.joins or (without_gpu_batch and plan.time_limit_s is not None)


def _stages_s(model: PerfModel, rows: int, sampled: int, start: int, end: int) -> float:
    """Stages ``start`` to ``end - 1`` of a batch; only ``sampled`` of its rows run the last one of all."""
    if rows <= 0 or start >= end:
        return 0.0
    first, last = start < 0, end == model.num_layers
    seconds = (end - start - first - last) * model.linear_s(rows)
    if first:
        seconds += model.first_stage_s(rows)
    if last and sampled:
        seconds += model.last_stage_s(sampled)
    return seconds


def _host_s(model: PerfModel, load: GpuBatchLoad, ways: Sequence[CpuBatchAdvance]) -> float:
    each_s = model.host_work_s(0)
    opened = [load.requests, *(len(cpu_batch.requests) for cpu_batch, start, _ in ways if start < 0)]
    return each_s + total_s([model.host_work_s(requests) - each_s for requests in opened if requests])


def _swaps_s(model: PerfModel, plan: IterationPlan) -> float:
    blocks = {tier: 0 for tier in Tier}
    for swap in plan.swaps:
        blocks[swap.source] += len(swap.source_blocks)
    return total_s([model.swap_s(number) for number in blocks.values()])
