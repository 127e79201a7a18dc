"""What best-effort requests get whatever else: a share of the iterations, and their turn after long waits."""

from __future__ import annotations

from operator import attrgetter

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.omniserve.gpu_batch import BEST_EFFORT, URGENT
from apex.schedulers.omniserve.times import iteration_s, with_decodes
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.state import SchedulerState

ONE_ROW = GpuBatchLoad(1, 1, 0, 0, ())
"""A GPU batch that only reads the weights, which prompts pay for in any case."""
OCCUPANCY = 0.3
"""Best-effort work lengthens iterations while latency-sensitive requests hold less than this share of the GPU pool."""
DECODES_SHARE = 0.2
"""And while the decodes of latency-sensitive requests take less than this share of the longest iteration."""
RESIDENCE = 256
"""Iterations over which their length, and what is held, are averaged: about as many as a request is resident."""
LEAST_SHARE = 0.03
"""Best-effort work may lengthen an iteration by this share of its latency-sensitive work whatever else, within the
target. So it goes on where latency-sensitive requests fill the pool."""


class IterationLength:
    """The longest iteration with best-effort work: the target, or less where that costs others theirs.

    Latency-sensitive requests stay as long as their tokens take, so longer iterations keep more of them on the GPU
    (Little's law). Where the target alone decided, they would fill the pool, and arrivals would wait for blocks. Or
    their decodes would fill the iterations, and the prompts of arrivals would get small chunks. So the mean iteration
    may grow only as far as either share allows. (Not in the paper.)
    """

    def __init__(self) -> None:
        self._mean_s = self._mean_wanted = 0.0

    def limit_s(self, state: SchedulerState, model: PerfModel, target_s: float, urgent_s: float) -> float:
        """Seconds; ``urgent_s`` is the latency-sensitive work of this iteration."""
        urgent = [*state.running[Tier.GPU].of_class(URGENT), *state.waiting.of_class(URGENT)]
        wanted = sum([state.kv.groups.slots(request.num_tokens) for request in urgent])
        self._mean_wanted += (wanted - self._mean_wanted) / min(state.iteration, RESIDENCE)
        if not wanted:
            return target_s
        # No less than the mean: when few are there by chance, more will come.
        pool_slots = state.kv.capacity(Tier.GPU) * state.kv.block_size
        growth = OCCUPANCY * pool_slots / max(wanted, self._mean_wanted)
        if (decodes_s := added_by_decodes_s(state, model)) > 0:
            growth = min(growth, DECODES_SHARE * target_s / decodes_s)
        longest_s = max(self._mean_s * growth, (1 + LEAST_SHARE) * urgent_s)
        return min(target_s, longest_s)

    def add_iteration(self, seconds: float, iteration: int) -> None:
        """Count an iteration, which is the given one by number, into the mean."""
        self._mean_s += (seconds - self._mean_s) / min(iteration, RESIDENCE)


def added_by_decodes_s(state: SchedulerState, model: PerfModel) -> float:
    """Seconds that the resident latency-sensitive decodes take of an iteration: what prompts beside them lose."""
    decodes = state.decoding[Tier.GPU].of_class(URGENT)
    load = with_decodes(ONE_ROW, len(decodes), context_tokens(decodes))
    return iteration_s(model, load) - iteration_s(model, ONE_ROW)


class Turns:
    """Which best-effort work goes on whatever the limit, since it has waited for more than ``patience`` iterations."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._next_look = 0  # the iteration of the next search for a decode
        self.last_prompt = 0  # the iteration in which prompts went on, or in which there were none

    def overdue_decode(self, state: SchedulerState) -> Request | None:
        """The decode of either tier that waited longest for its token, if too long.

        It goes on until it has its token; then the next one may be overdue. Those that wait for blocks of older ones do
        not count.
        """
        if state.iteration < self._next_look:
            return None
        can_grow = state.kv.num_free(Tier.CPU) > 0
        on_cpu = state.decoding[Tier.CPU].of_class(BEST_EFFORT)
        decodes = [r for r in on_cpu if can_grow or r.num_tokens <= r.num_kv_slots]
        decodes += state.decoding[Tier.GPU].of_class(BEST_EFFORT)
        if not decodes:
            return None
        longest_waiting = min(decodes, key=attrgetter("last_served"))
        self._next_look = longest_waiting.last_served + self.patience + 1
        return longest_waiting if self._next_look <= state.iteration else None

    def prompts_are_overdue(self, iteration: int) -> bool:
        return iteration - self.last_prompt > self.patience

    def saved_share(self, iteration: int) -> float:
        """Even one token may take more than an iteration's share, so shares of several are saved for it."""
        return LEAST_SHARE * (iteration - self.last_prompt - 1)
