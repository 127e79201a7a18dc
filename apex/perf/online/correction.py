"""The correction of a performance model while it is in use: one factor for the GPU batch, one for CPU attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from apex.perf.model import PerfModel, ProfileTable
from apex.perf.online.factor import RunningFactor, SecondsRange
from apex.perf.online.iteration_times import cpu_attention_span, crossings, gpu_batch_span
from swiftllm.core.plan import IterationPlan, StepResult

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
        if was_settled and self._is_settled:
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
