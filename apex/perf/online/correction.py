"""The correction of a performance model while it is in use: one factor for the lane, one for CPU attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apex.perf.model import PerfModel, ProfileTable
from apex.perf.online.factor import RunningFactor, SecondsRange
from apex.perf.online.iteration_times import cpu_attention_span, crossings, lane_span
from swiftllm.core.plan import IterationPlan, StepResult

OPERATIONS = ("lane", "cpu_attention")
"""What is told apart. Schedulers weigh one against the other; the operations of the lane share a factor."""


class OnlineCorrection:
    """Compares every iteration with the profile table, and corrects the model that schedulers predict with."""

    def __init__(self, model: PerfModel) -> None:
        self.model = model
        """Predicts as the machine is now. It is replaced when a factor changes; without one it is the model given."""
        self._profiled = model
        self._lane, self._cpu_attention = self._running = [RunningFactor() for _ in OPERATIONS]
        self._is_settled = False  # whether the last iteration left no work to the device

    @property
    def factors(self) -> Mapping[str, float]:
        """By operation: seconds measured lately over seconds in the profile table."""
        return {name: factor.value for name, factor in zip(OPERATIONS, self._running, strict=True)}

    def observe(self, plan: IterationPlan, result: StepResult, layers: Mapping[int, int]) -> bool:
        """Take in an iteration before its tokens are added to its requests. Returns whether :attr:`model` changed.

        ``layers`` are those of the cohorts that were under way before it, by id.
        """
        before, profiled = self.factors, self._profiled
        ways = crossings(plan, result, layers, profiled.num_layers)
        # Only sampling waits for the device. Without it an iteration ends early, and the next one late.
        was_settled, self._is_settled = self._is_settled, bool(result.tokens)
        if was_settled and self._is_settled:
            # A host that waits for a ticket is ahead of the device, so part of the wait may be work of the lane.
            busy = SecondsRange(result.lane_busy_s, result.duration_s)
            self._lane.observe(busy, lane_span(profiled, plan, ways))
        if result.cpu_busy_s:
            busy = SecondsRange(result.cpu_busy_s, result.cpu_busy_s)
            # Where tickets are too small to tell, the balance of lane and CPU stays as it was profiled.
            self._cpu_attention.observe(busy, cpu_attention_span(profiled, ways), expected=self._lane.value)
        if self.factors == before:
            return False
        self.model = self._corrected()
        return True

    def _corrected(self) -> PerfModel:
        profiled, lane, cpu_attention = self._profiled, self._lane.value, self._cpu_attention.value
        if lane == cpu_attention == 1.0:
            return profiled
        return profiled.with_table(scaled_table(profiled.table, lane, cpu_attention))


def scaled_table(table: ProfileTable, lane: float, cpu_attention: float) -> ProfileTable:
    """The table of a machine whose lane and CPU attention take so many times as long."""
    of_lane = ("linear", "ends", "swap", "prefill_attention", "gpu_attention", "hand_over", "iteration")
    in_cpu_tier = table.prefill_attention_cpu_tier
    return replace(
        table,
        cpu_attention=table.cpu_attention.times(cpu_attention),
        prefill_shared_s=table.prefill_shared_s * lane,
        prefill_attention_cpu_tier=None if in_cpu_tier is None else in_cpu_tier.times(lane),
        **{name: getattr(table, name).times(lane) for name in of_lane},
    )
