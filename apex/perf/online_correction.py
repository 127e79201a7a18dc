"""Online correction: predictions follow the times that iterations take on the machine as it is now."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from apex.perf.model import GpuBatchLoad, PerfModel, ProfileTable, context_tokens, total_s
from swiftllm.core.plan import CpuBatchPlan, IterationPlan, StepResult
from swiftllm.core.request import Tier

# -- a running factor --------------------------------------------------------------------------------------------------
# A running factor: how much longer an operation takes than the profile table predicts.

WINDOW = 32
"""Observations that count. Their median follows a lasting change within half as many."""
LEAST_OBSERVATIONS = 8
"""Before that the factor is 1: the first iterations compile kernels and fill caches."""
MOST = 3.0
"""Factors lie between 1/MOST and MOST. Beyond that the table belongs to another machine."""
DEAD_BAND = 0.05
"""A median this close to 1 means that the table is right: the factor is then exactly 1."""
STEP = 0.03
"""The factor changes when the median differs from it by more than this share. Each change rebuilds the model."""
LEAST_S = 1e-4
"""Predictions below this many seconds are not compared: the clock and the interpreter decide those times."""


class SecondsRange(NamedTuple):
    """Seconds known to lie between two bounds."""

    least: float
    most: float


def nearest_ratio(measured: SecondsRange, predicted: SecondsRange, expected: float = 1.0) -> float:
    """Measured over predicted seconds: of the ratios that the bounds allow, the nearest to the one expected.

    ``predicted.most`` must be positive.
    """
    ratio = max(expected, measured.least / predicted.most)
    return min(ratio, measured.most / predicted.least) if predicted.least > 0.0 else ratio


class RunningFactor:
    """The median ratio of the last observations, bounded.

    Attributes:
        value: the factor, between ``1 / MOST`` and ``MOST``.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def observe(self, measured: SecondsRange, predicted: SecondsRange, expected: float = 1.0) -> None:
        """Take in the seconds of one operation; predictions that are too short are ignored.

        ``expected`` is the ratio that is assumed as far as the bounds allow.
        """
        if predicted.most < LEAST_S:
            return
        self._ratios.append(min(max(nearest_ratio(measured, predicted, expected), 1.0 / MOST), MOST))
        if len(self._ratios) < LEAST_OBSERVATIONS:
            return
        median = statistics.median(self._ratios)
        if abs(median - 1.0) <= DEAD_BAND:
            median = 1.0
        if abs(median / self.value - 1.0) > STEP:
            self.value = median


# -- predicted times of what has run -----------------------------------------------------------------------------------
# What an iteration that has run should have taken, by the profile table: in the GPU batch, and on the CPU worker.
#
# A plan is predicted before it runs, by each system's own rules. This counts what has run: stages run, attention tasks
# submitted and collected. With a table that is right, the sums are the times of the run.


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


# -- the correction ----------------------------------------------------------------------------------------------------
# The correction of a performance model while it is in use: one factor for the GPU batch, one for CPU attention.

OPERATIONS = {"gpu_batch": "GPU batch", "cpu_attention": "CPU attention"}
"""What is told apart. Schedulers weigh one against the other; the operations of the GPU batch share a factor."""


class OnlineCorrection:
    """Compares every iteration with the profile table, and corrects the model that schedulers predict with."""

    def __init__(self, model: PerfModel) -> None:
        self.model = model
        """Predicts as the machine is now. It is replaced when a factor changes; without one it is the model given."""
        self._profiled = model
        self._gpu_batch, self._cpu_attention = self._running = [RunningFactor() for _ in OPERATIONS]
        self._is_settled = False  # whether the last iteration left no work to the device

    @property
    def factors(self) -> Mapping[str, float]:
        """By operation: seconds measured lately over seconds in the profile table."""
        return {name: factor.value for name, factor in zip(OPERATIONS, self._running, strict=True)}

    def observe(self, plan: IterationPlan, result: StepResult, layers: Mapping[int, int]) -> bool:
        """Take in an iteration before its tokens are added to its requests. Returns whether :attr:`model` changed.

        ``layers`` are those of the CPU batches that were under way before it, by id.
        """
        before, profiled = self.factors, self._profiled
        ways = crossings(plan, result, layers, profiled.num_layers)
        # Only sampling waits for the device. Without it an iteration ends early, and the next one late.
        was_settled, self._is_settled = self._is_settled, bool(result.tokens)
        # What copies of states take is not predicted.
        if was_settled and self._is_settled and not plan.state_copies:
            # A host that waits for an attention task is ahead of the device, so part of the wait may be work of the GPU
            # batch.
            busy = SecondsRange(result.gpu_batch_busy_s, result.duration_s)
            self._gpu_batch.observe(busy, gpu_batch_span(profiled, plan, ways))
        if result.cpu_busy_s:
            busy = SecondsRange(result.cpu_busy_s, result.cpu_busy_s)
            # Where attention tasks are too small to tell, the balance of GPU batch and CPU stays as it was profiled.
            self._cpu_attention.observe(busy, cpu_attention_span(profiled, ways), expected=self._gpu_batch.value)
        if self.factors == before:
            return False
        self.model = self._corrected()
        return True

    def _corrected(self) -> PerfModel:
        profiled, gpu_batch, cpu_attention = self._profiled, self._gpu_batch.value, self._cpu_attention.value
        if gpu_batch == cpu_attention == 1.0:
            return profiled
        return profiled.with_table(scaled_table(profiled.table, gpu_batch, cpu_attention))


def scaled_table(table: ProfileTable, gpu_batch: float, cpu_attention: float) -> ProfileTable:
    """The table of a machine whose GPU batch and CPU attention take so many times as long."""
    of_gpu_batch = ("linear", "ends", "swap", "prefill_attention", "gpu_attention", "hand_over", "iteration")
    in_cpu_tier = table.prefill_attention_cpu_tier
    return replace(
        table,
        cpu_attention=table.cpu_attention.times(cpu_attention),
        prefill_shared_s=table.prefill_shared_s * gpu_batch,
        prefill_attention_cpu_tier=None if in_cpu_tier is None else in_cpu_tier.times(gpu_batch),
        **{name: getattr(table, name).times(gpu_batch) for name in of_gpu_batch},
    )


# --  ------------------------------------------------------------------------------------------------------------------
# Online correction: predictions follow the times that iterations take on the machine as it is now.

__all__ = ["OPERATIONS", "OnlineCorrection"]
