"""OmniServe (SIGMOD'26, section 3.3): latency-sensitive requests first, best-effort requests in the time left.

An iteration is filled in the order of section 3.3.2: latency-sensitive decodes and prompts, then best-effort prompts
and decodes. Best-effort requests in the CPU tier decode in CPU batches that join the GPU batch. Every iteration with
best-effort work is predicted to end within the target for a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite
from operator import attrgetter
from typing import NamedTuple

from apex.perf.model import GpuBatchLoad, PerfModel, context_tokens, total_s
from apex.schedulers.hybrid import LengthsSeen, Predicting, longest_run
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE_RUNNING, OVERLAPPED, CpuBatchPlan, IterationPlan
from swiftllm.core.request import FinishReason, Request, RequestRefusedForNow, ServiceClass, Slo, Tier
from swiftllm.scheduling.scheduler import PlanBuilder, Vllm, gpu_decodes, new_prompts, running_prompts
from swiftllm.scheduling.state import CpuBatch, SchedulerState, SchedulingRules
from swiftllm.scheduling.validation import can_hold

# -- formulas of section 3.3 -------------------------------------------------------------------------------------------
# The times that decide whether targets hold: one function per formula of OmniServe (SIGMOD'26), section 3.3.
#
# In the paper each module of a layer has its own fitted model: f_PA and f_DA for the attention of prompts and decodes,
# f_D for the dense modules, gamma for communication; d is the number of layers. Here a profile table has them all. f_D
# of a machine with several GPUs includes gamma.


class PromptLeft(NamedTuple):
    """A prompt that is not computed yet. ``tier``: where its K and V go; None as long as it waits."""

    tokens: int
    cached: int
    tier: Tier | None = None


def joined_rows_s(
    model: PerfModel, gpu_batch_tokens: int, gpu_batch_rows: int, joined_rows: Mapping[int, int]
) -> float:
    """What rows that join the GPU batch's stages add to an iteration (omega, sections 3.3.4 to 3.3.6), in seconds.

    Args:
        gpu_batch_tokens, gpu_batch_rows: rows of the GPU batch, and those of them that get a token.
        joined_rows: rows of CPU batches by the stage that they join, from -1 to the number of layers - 1.
    """
    last, seconds = model.num_layers - 1, 0.0
    for stage, rows in joined_rows.items():
        if stage < 0:
            seconds += model.first_stage_s(gpu_batch_tokens + rows) - model.first_stage_s(gpu_batch_tokens)
            seconds += model.host_work_s(rows) - model.host_work_s(0)  # opening the CPU batch
        elif stage < last:
            seconds += model.linear_s(gpu_batch_tokens + rows) - model.linear_s(gpu_batch_tokens)
        else:
            seconds += model.last_stage_s(gpu_batch_rows + rows) - model.last_stage_s(gpu_batch_rows)
        if stage < last:  # its attention task for the next layer
            seconds += model.hand_over_s(rows)
    return seconds


def iteration_s(
    model: PerfModel, load: GpuBatchLoad, joined_rows: Mapping[int, int] | None = None, swapped: int = 0
) -> float:
    """An iteration of a GPU batch with joined CPU batches and swaps: d (f_PA + f_DA + f_D) and its ends (section
    3.3.1), in seconds.

    Args:
        joined_rows: rows of CPU batches by the stage that they join.
        swapped: blocks moved between the tiers; each layer's attention waits for its part of them.
    """
    linear_s = model.linear_s(load.tokens)
    seconds = model.num_layers * (linear_s + load.gpu_attention_s(model))
    # Only rows that get a token run the last stage, which is the rest of a layer. Prompts that go on do not.
    seconds += model.first_stage_s(load.tokens) - linear_s + model.last_stage_s(load.sampled)
    seconds = max(seconds, model.num_layers * model.stream_s)
    if load.requests:
        seconds += model.host_work_s(load.requests)
    if joined_rows:
        seconds += joined_rows_s(model, load.tokens, load.sampled, joined_rows)
    if not swapped:
        return seconds
    # Parts arrive at even intervals: if the GPU batch is late, then at the first layer's attention or at the last
    # one's.
    swap_s, before_s = model.swap_s(swapped), model.host_work_s(0)
    ahead_s = model.host_work_s(load.requests) - before_s + model.first_stage_s(load.tokens)
    behind_s = load.gpu_attention_s(model) + model.last_stage_s(load.sampled)
    return max(seconds, seconds - ahead_s + swap_s / model.num_layers, before_s + swap_s + behind_s)


def with_prompts(load: GpuBatchLoad, prompts: Sequence[PromptLeft], tokens: int) -> GpuBatchLoad:
    """The load with the next ``tokens`` of ``prompts``, in order of service."""
    chunks, cpu_tier_chunks, goes_on = [], [], False
    for left, cached, tier in prompts:
        if tokens <= 0:
            break
        chunk = min(left, tokens)
        chunks.append((chunk, cached))
        if tier is Tier.CPU:
            cpu_tier_chunks.append((chunk, cached))
        tokens -= chunk
        goes_on = chunk < left
    added = sum([chunk for chunk, _ in chunks])
    return replace(
        load,
        tokens=load.tokens + added,
        requests=load.requests + len(chunks),
        chunks=(*load.chunks, *chunks),
        cpu_tier_chunks=(*load.cpu_tier_chunks, *cpu_tier_chunks),
        open_chunks=load.open_chunks + goes_on,
    )


def with_decodes(load: GpuBatchLoad, decodes: int, context_tokens: int) -> GpuBatchLoad:
    """The load with more decodes, whose contexts sum to ``context_tokens``."""
    return replace(
        load,
        tokens=load.tokens + decodes,
        requests=load.requests + decodes,
        decodes=load.decodes + decodes,
        decode_context=load.decode_context + context_tokens,
    )


def most_prompt_tokens(
    model: PerfModel,
    load: GpuBatchLoad,
    prompts: Sequence[PromptLeft],
    limit_s: float,
    most: int,
    joined_rows: Mapping[int, int] | None = None,
    swapped: int = 0,
) -> int:
    """Chunked prefill under a target (section 3.3.4): max q with f_PA + f_DA + f_D(n + q) <= S_d / d.

    Args:
        load: the GPU batch so far.
        prompts: in order of service.
        limit_s: the longest iteration.
        most: the most tokens.
    """
    most = min(most, sum([prompt.tokens for prompt in prompts]))
    return longest_run(
        lambda tokens: iteration_s(model, with_prompts(load, prompts, tokens), joined_rows, swapped), limit_s, most
    )


def chunk_of_no_cost(model: PerfModel, load: GpuBatchLoad, most: int) -> int:
    """Prompt tokens beside ``load`` that cost little more than one: reading the weights dominates. At least one."""
    return min(most, max(1, model.flat_linear_tokens - load.tokens))


def urgent_chunk_tokens(
    model: PerfModel,
    load: GpuBatchLoad,
    prompts: Sequence[PromptLeft],
    limit_s: float,
    most: int,
    swapped: int = 0,
) -> int:
    """Prompt tokens of latency-sensitive requests in an iteration, within the target or at no cost.

    Beside decodes that fill the target no prompt would end otherwise. (Not in the paper.)
    """
    within = most_prompt_tokens(model, load, prompts, limit_s, most, swapped=swapped)
    return max(within, chunk_of_no_cost(model, load, most))


# -- the GPU batch of an iteration -------------------------------------------------------------------------------------
# The GPU batch of an iteration that should end in time: what is added to it, as far as predictions allow.

URGENT, BEST_EFFORT = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
PROMPTS_LOOKED_AT = 32
"""Waiting requests whose prompts are considered for an iteration."""

RowsByStage = Mapping[int, int]
"""Rows that join, by stage."""


class GpuBatch:
    """A plan builder, and how long it takes. Limits are the longest iteration, in seconds."""

    def __init__(self, builder: PlanBuilder, model: PerfModel) -> None:
        self.builder = builder
        self.model = model
        self.state = builder.state
        self._counted, self._load = (-1, -1), GpuBatchLoad(0, 0, 0, 0, ())

    @property
    def load(self) -> GpuBatchLoad:
        """Made anew where something was added since; nothing is ever taken out."""
        counts = len(self.builder.decodes), len(self.builder.prefills)
        if counts != self._counted:
            self._counted, self._load = counts, GpuBatchLoad.from_builder(self.builder)
        return self._load

    @property
    def swapped(self) -> int:
        """Blocks that move between the tiers before the GPU batch can end."""
        return sum([len(swap.source_blocks) for swap in self.state.kv.swaps])

    @property
    def is_empty(self) -> bool:
        return not (self.builder.decodes or self.builder.prefills)

    def iteration_s(self, joined_rows: RowsByStage | None = None) -> float:
        return iteration_s(self.model, self.load, joined_rows, self.swapped)

    def has_time_to_move(self, request: Request, limit_s: float) -> bool:
        """Whether the GPU batch may wait for the blocks of a request, if there is latency-sensitive work in it."""
        load = self.load
        if not self.builder.decodes:  # they are growing, and come into the plan builder when all have grown
            decodes = self.state.decoding[Tier.GPU].of_class(URGENT)
            load = with_decodes(load, len(decodes), context_tokens(decodes))
        swapped = self.swapped + self.state.kv.num_held(request)
        return not load.requests or iteration_s(self.model, load, swapped=swapped) <= limit_s

    # -- prompts (section 3.3.4) ------------------------------------------------------------------------------------

    def _prompts(self, service_class: ServiceClass) -> list[PromptLeft]:
        """The prompts of a class, in order of service."""
        running = self.state.prefilling.of_class(service_class)
        waiting = self.state.waiting.of_class(service_class, PROMPTS_LOOKED_AT)
        return prompt_lengths([*sorted(running, key=lambda request: request.tier is Tier.CPU), *waiting])

    def add_urgent_prompts(self, limit_s: float) -> None:
        """Latency-sensitive prompts go on by as many tokens as cost little more than one, whatever the limit. Else none
        would ever end."""
        prompts, most = self._prompts(URGENT), self.builder.tokens_left
        tokens = urgent_chunk_tokens(self.model, self.load, prompts, limit_s, most, self.swapped)

        def on_preempt(builder: PlanBuilder) -> None:
            # The GPU batch waits for the requests that are swapped out, so prompts get the time that they leave.
            waiting = prompt_lengths(self.state.waiting.of_class(URGENT, PROMPTS_LOOKED_AT))
            size = most_prompt_tokens if builder.prefills else urgent_chunk_tokens
            most = builder.prompt_tokens_left
            builder.prompt_limit = size(self.model, self.load, waiting, limit_s, most, swapped=self.swapped)

        self.builder.prompt_limit = tokens
        running_prompts(self.builder, URGENT)
        new_prompts(self.builder, URGENT, on_preempt)

    def add_prompts(self, joined_rows: RowsByStage, limit_s: float, *, must: bool) -> bool:
        """Best-effort prompts. If they ``must``, or if there is nothing else, they go on by a few tokens where not even
        one fits. False: none goes on, although there are some."""
        builder, load, most = self.builder, self.load, self.builder.tokens_left
        prompts, num_chunks = self._prompts(BEST_EFFORT), len(builder.prefills)
        tokens = most_prompt_tokens(self.model, load, prompts, limit_s, most, joined_rows, self.swapped)
        if not tokens and (must or (self.is_empty and not joined_rows)):
            tokens = chunk_of_no_cost(self.model, load, most)
        builder.prompt_limit = tokens
        running_prompts(builder, BEST_EFFORT)
        new_prompts(builder, BEST_EFFORT)
        return not prompts or len(builder.prefills) > num_chunks

    # -- decodes (section 3.3.5) ------------------------------------------------------------------------------------

    def add_decodes(self, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort decodes on the GPU, as many as the limit allows; the others are idle."""
        decodes = decodes[: self.builder.tokens_left]
        load, swapped = self.load, self.swapped
        contexts = [0, *accumulate([request.num_tokens for request in decodes])]
        count = longest_run(
            lambda count: iteration_s(self.model, with_decodes(load, count, contexts[count]), joined_rows, swapped),
            limit_s,
            len(decodes),
        )
        if not load.requests and not joined_rows:
            count = max(count, 1)
        self.builder.add_decodes(decodes[:count])

    def recall(self, joined_rows: RowsByStage, limit_s: float) -> None:
        """Move best-effort requests back to the GPU where memory and limit allow it.

        Only those between two tokens, since a token that is under way would be lost (section 3.2.4).
        """
        state, kv = self.state, self.state.kv
        if state.kv.moves or Tier.GPU not in state.open_tiers:
            return
        for request in state.decoding[Tier.CPU].of_class(BEST_EFFORT):
            if not state.is_idle(request) or not can_hold(kv, Tier.GPU, request):
                continue
            num_blocks = kv.blocks_for(request.num_tokens)
            if self.builder.tokens_left < 1 or not state.can_allocate(Tier.GPU, request, num_blocks):
                break
            load = with_decodes(self.load, 1, request.num_tokens)
            if iteration_s(self.model, load, joined_rows, self.swapped + kv.num_held(request)) > limit_s:
                break
            state.move(request, Tier.GPU)
            kv.allocate_slots(request, request.num_tokens)
            self.builder.add_decodes([request])

    # -- piggybacking (section 3.3.6) -------------------------------------------------------------------------------

    def choose_joining(
        self, startable: Sequence[Request], limit_s: float, most_cpu_batches: int, overdue: Request | None
    ) -> tuple[list[CpuBatch], list[Request]]:
        """CPU batches that may join their next stage within the limit, oldest first, and members of a new CPU batch.

        The request that is overdue comes first, alone or with its CPU batch, whatever the limit. (The paper begins with
        the lowest layer, where CPU batches that have come far would starve behind those that start.)
        """
        load, joined_rows, joining = self.load, Counter[int](), []
        spare_s = limit_s - self.iteration_s()
        under_way = self.state.cpu_batches.under_way()
        for cpu_batch in sorted(
            under_way, key=lambda cpu_batch: (overdue not in cpu_batch.members, cpu_batch.cpu_batch_id)
        ):
            cost_s = self._added_s(load, joined_rows[cpu_batch.stage], len(cpu_batch.members), cpu_batch.stage)
            if cost_s <= spare_s or not load.requests or overdue in cpu_batch.members:
                spare_s -= cost_s
                joined_rows[cpu_batch.stage] += len(cpu_batch.members)
                joining.append(cpu_batch)
        starting = []
        if len(under_way) < most_cpu_batches:
            before = joined_rows[-1]
            count = longest_run(lambda rows: self._added_s(load, before, rows, -1), spare_s, len(startable))
            starting = list(startable[:count])
        if overdue in startable and overdue not in starting:
            starting = [*starting[:-1], overdue]
        return joining, starting

    def _added_s(self, load: GpuBatchLoad, rows_before: int, rows: int, stage: int) -> float:
        """What more rows at a stage add to the iteration, in seconds."""
        after_s = joined_rows_s(self.model, load.tokens, load.sampled, {stage: rows_before + rows})
        if not rows_before:
            return after_s
        return after_s - joined_rows_s(self.model, load.tokens, load.sampled, {stage: rows_before})


def rows_by_stage(joining: Sequence[CpuBatch], starting: Sequence[Request]) -> RowsByStage:
    rows = Counter({-1: len(starting)} if starting else {})
    for cpu_batch in joining:
        rows[cpu_batch.stage] += len(cpu_batch.members)
    return rows


def prompt_lengths(requests: Sequence[Request]) -> list[PromptLeft]:
    return [PromptLeft(request.num_uncomputed, request.num_computed_tokens, request.tier) for request in requests]


# -- admission control -------------------------------------------------------------------------------------------------
# Admission control (OmniServe section 3.3.3): when a latency-sensitive request would have its first token.


@dataclass(frozen=True)
class Backlog:
    """The latency-sensitive work before and including a request. Best-effort work makes way, so it does not count."""

    decodes: int
    decode_context: int
    """Context of the decodes, summed, in tokens."""
    prompts: Sequence[PromptLeft]
    """In order of service, the request's own last."""
    missing_blocks: int
    """GPU blocks that those who wait lack now."""
    missing_seats: int
    """Places among the requests that may run at once that those who wait lack now."""
    prompt_blocks: int
    """GPU blocks of the decodes' prompts."""
    mean_output: float
    """Output tokens after which a decode ends, on average."""

    @property
    def load(self) -> GpuBatchLoad:
        """The GPU batch without prompts."""
        return GpuBatchLoad(self.decodes, self.decodes, self.decodes, self.decode_context, ())


def backlog_before(request: Request, state: SchedulerState, lengths: LengthsSeen) -> Backlog:
    """The backlog of a latency-sensitive request that arrives now."""
    decodes = [r for tier in Tier for r in state.decoding[tier].of_class(URGENT)]
    prompts = [*state.prefilling.of_class(URGENT), *state.waiting.of_class(URGENT)]
    return Backlog(
        decodes=len(decodes),
        decode_context=context_tokens(decodes),
        prompts=prompt_lengths([*prompts, request]),
        missing_blocks=_missing_blocks(request, state),
        missing_seats=max(0, len(decodes) + len(prompts) + 1 - state.limits.max_num_seqs),
        prompt_blocks=sum([state.kv.blocks_for(r.prompt_len) for r in decodes]),
        mean_output=lengths.mean_output([r.output_len for r in decodes]),
    )


def _missing_blocks(request: Request, state: SchedulerState) -> int:
    """GPU blocks that this request and those before it lack, if all best-effort requests made way.

    Every running request is left the reserve of :class:`~swiftllm.scheduling.state.SchedulingRules`.
    """
    kv, queue, running = state.kv, [*state.waiting.of_class(URGENT), request], state.running[Tier.GPU]
    reserved = kv.groups.growth * (len(queue) + len(running.of_class(URGENT)))
    wanted = sum([kv.blocks_for(r.num_tokens) for r in queue]) + reserved
    yielded = sum(map(kv.num_held, running.of_class(BEST_EFFORT)))
    return max(0, wanted - yielded - kv.num_free(Tier.GPU))


def first_token_s(model: PerfModel, slo: Slo, backlog: Backlog, budget: int) -> float:
    """Seconds until the last of the prompts has its token: for all prompts, or for their blocks or seats and itself.

    Args:
        budget: the most tokens of an iteration.
    """
    single_s = prefill_s(model, slo, replace(backlog, prompts=backlog.prompts[-1:]), budget)
    wait_s = max(blocks_s(model, slo, backlog), seats_s(model, slo, backlog))
    return max(prefill_s(model, slo, backlog, budget), wait_s + single_s)


def prefill_s(model: PerfModel, slo: Slo, backlog: Backlog, budget: int) -> float:
    """Seconds until all prompts are computed, in iterations that are filled up to the target.

    The paper predicts a single pass over all outstanding prompts. That leaves out the decodes, which every chunk
    repeats. So this counts the iterations for R tokens in chunks of q: the whole part of R / q, and one for the rest.
    Decodes are taken as constant: about as many end as prompts become decodes.
    """
    load, prompts = backlog.load, backlog.prompts
    total = sum([prompt.tokens for prompt in prompts])
    most = max(1, budget - backlog.decodes)
    chunk = urgent_chunk_tokens(model, load, prompts, slo.iteration_s, most)
    full, rest = divmod(total, chunk)
    full_s = iteration_s(model, with_prompts(load, prompts, chunk))
    return full * full_s + (iteration_s(model, with_prompts(load, prompts, rest)) if rest else 0.0)


def blocks_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds until the decodes have freed the missing blocks, if they end at their mean rate. (Not in the paper.)

    Those that go on grow by as many tokens as those that end have put out. So what comes free are the prompts' blocks.
    Iterations count as long as the target allows, although they may be shorter: when decodes end is a matter of chance,
    and of requests for which the mean is in time half would be late.
    """
    if not backlog.missing_blocks:
        return 0.0
    if not backlog.prompt_blocks:
        return float("inf")  # prompts hold them all, and end later than their first token
    freed_per_s = backlog.prompt_blocks / output_s(model, slo, backlog)
    return backlog.missing_blocks / freed_per_s


def seats_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds until as many decodes have ended as seats are missing, counted as in :func:`blocks_s`."""
    if not backlog.missing_seats:
        return 0.0
    if not backlog.decodes:
        return float("inf")
    return backlog.missing_seats * output_s(model, slo, backlog) / backlog.decodes


def output_s(model: PerfModel, slo: Slo, backlog: Backlog) -> float:
    """Seconds for the mean output of a decode."""
    return backlog.mean_output * max(slo.iteration_s, iteration_s(model, backlog.load))


# -- what best-effort requests get -------------------------------------------------------------------------------------
# What best-effort requests get whatever else: a share of the iterations, and their turn after long waits.

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


# -- OmniServe ---------------------------------------------------------------------------------------------------------

GPU_ONLY = SchedulingRules(spills=())


class OmniServe(Predicting):
    """Two service classes on one GPU. The CPU tier holds best-effort requests only.

    A plan names those CPU batches that may join: with all of them the iteration is predicted to keep the target. A CPU
    batch joins at most one stage an iteration. The oldest CPU batch comes first.
    """

    rules = SchedulingRules(tiers=(Tier.GPU, Tier.CPU), urgent_tiers=(Tier.GPU,), spills=(BEST_EFFORT,))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        if not config.overlaps:
            self.rules = GPU_ONLY
        self._slo = config.slo
        self.lengths = LengthsSeen()
        self._length = IterationLength()
        self._turns = Turns(config.max_wait_iterations)

    @property
    def slo(self) -> Slo:
        return self._slo

    def ended(self, request: Request) -> None:
        if request.service_class is URGENT and request.finish_reason is not FinishReason.ABORT:
            self.lengths.add_output(request.output_len)

    def check_targets(self, request: Request, state: SchedulerState) -> None:
        if request.service_class is not URGENT or self.config.disable_admission_control:
            return
        backlog = backlog_before(request, state, self.lengths)
        waited_s = state.now() - request.arrival_s
        budget = state.limits.max_num_batched_tokens
        expected_s = waited_s + first_token_s(self.model, self.slo, backlog, budget)
        late_s = expected_s - self.slo.first_token_s
        if late_s > 0:
            expected = f"is expected after {expected_s:.1f} s" if isfinite(late_s) else "cannot be predicted now"
            raise RequestRefusedForNow(
                f"the first token {expected}, and the target of {self.slo.ttft_s:g} s less its margin is "
                f"{self.slo.first_token_s:g} s: try again later, or ask for best effort",
                retry_after_s=late_s if isfinite(late_s) else self.slo.ttft_s,
            )

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder, target_s = PlanBuilder(state), self.slo.iteration_s
        gpu_batch = GpuBatch(builder, self.model)
        state.may_swap_out = lambda request: gpu_batch.has_time_to_move(request, target_s)
        overdue = self._turns.overdue_decode(state)
        reserved = overdue is not None or self._turns.prompts_are_overdue(state.iteration)
        builder.tokens_left -= reserved
        gpu_decodes(builder, URGENT)
        gpu_batch.add_urgent_prompts(target_s)
        builder.tokens_left += reserved
        urgent_s = gpu_batch.iteration_s()
        limit_s = self._length.limit_s(state, self.model, target_s, urgent_s)
        # Growing may swap, so best-effort decodes are idle where others fill the time already.
        decodes = state.grow_on_gpu(BEST_EFFORT, builder.tokens_left) if urgent_s <= limit_s else []
        if overdue is not None and overdue.tier is Tier.GPU:
            if state.hold_on_gpu(overdue, overdue.num_tokens):
                builder.add_decodes([overdue])
            decodes = [request for request in decodes if request is not overdue and request.tier is Tier.GPU]
        startable = state.grow_on_cpu(BEST_EFFORT)
        joining, starting = gpu_batch.choose_joining(startable, limit_s, self.most_cpu_batches, overdue)
        self.fill(gpu_batch, decodes, rows_by_stage(joining, starting), limit_s)
        if gpu_batch.is_empty and not joining:
            starting = starting or startable[:1]  # nothing else goes on, so the least does, whatever the target
        return self._plan_cpu_batches(gpu_batch, joining, starting, limit_s)

    @property
    def most_cpu_batches(self) -> int:
        """CPU batches under way at once: one at each stage."""
        return self.model.num_layers + 1

    def fill(self, gpu_batch: GpuBatch, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort work of the GPU batch beside ``joined_rows``: prompts before decodes (section 3.3.2)."""
        self.add_prompts(gpu_batch, joined_rows, limit_s)
        gpu_batch.add_decodes(decodes, joined_rows, limit_s)
        gpu_batch.recall(joined_rows, limit_s)

    def add_prompts(self, gpu_batch: GpuBatch, joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort prompts within the limit, or within the shares saved for them."""
        iteration = gpu_batch.state.iteration
        saved_s = (1 + self._turns.saved_share(iteration)) * gpu_batch.iteration_s(joined_rows)
        limit_s = max(limit_s, min(self.slo.iteration_s, saved_s))
        if gpu_batch.add_prompts(joined_rows, limit_s, must=self._turns.prompts_are_overdue(iteration)):
            self._turns.last_prompt = iteration

    def cpu_batch_plans(self, cpu_batches: Sequence[CpuBatch], spare_s: float) -> tuple[list[CpuBatchPlan], float]:
        """How CPU batches run stages, and the seconds that this takes beside one that each joins of each.

        ``spare_s`` is the time left if each joins once.
        """
        return [cpu_batch.plan(OVERLAPPED) for cpu_batch in cpu_batches], 0.0

    def _plan_cpu_batches(
        self, gpu_batch: GpuBatch, joining: list[CpuBatch], starting: Sequence[Request], limit_s: float
    ) -> IterationPlan:
        state, target_s = gpu_batch.state, self.slo.iteration_s
        for request in gpu_batch.builder.decodes:
            request.last_served = state.iteration
        recalled = {swap.request.request_id for swap in state.kv.swaps if swap.request is not None}
        starting = [request for request in starting if request.request_id not in recalled]
        expected_s = gpu_batch.iteration_s(rows_by_stage(joining, starting))
        cpu_batches = [*joining, state.cpu_batches.start(starting)] if starting else joining
        plans, added_s = self.cpu_batch_plans(cpu_batches, limit_s - expected_s)
        expected_s += added_s
        if gpu_batch.is_empty:
            expected_s = min(expected_s, target_s)
        self._length.add_iteration(expected_s, state.iteration)
        # With an empty GPU batch nothing else would end the iteration before the CPU batches have their tokens.
        return gpu_batch.builder.plan(plans, {"iteration_s": expected_s}, time_limit_s=target_s)


class OmniServeStepping(OmniServe):
    """OmniServe with few large CPU batches that run free, each as often as the target allows. This is not in a paper.

    A joined CPU batch runs one stage in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the
    CPU is. A stage alone costs the GPU batch the weights of a layer once more. With large CPU batches that is little
    for each request.

    Decodes are as many as requests are resident, but a backlog of prompts has no end. Where prompts come first, decodes
    wait until the tiers are full. So prompts get the time that decodes leave.
    """

    @property
    def most_cpu_batches(self) -> int:
        return self.config.max_cpu_batches

    def fill(self, gpu_batch: GpuBatch, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        gpu_batch.add_decodes(decodes, joined_rows, limit_s)
        gpu_batch.recall(joined_rows, limit_s)
        self.add_prompts(
            gpu_batch, joined_rows, limit_s - self._alone_stages_s(gpu_batch.state.cpu_batches.under_way(), limit_s)
        )

    def _alone_stages_s(self, cpu_batches: Sequence[CpuBatch], limit_s: float) -> float:
        """Seconds of the stages alone for which the worker can be ready in an iteration of ``limit_s``, beside one that
        each joins."""
        loads = [(len(cpu_batch.members), context_tokens(cpu_batch.members)) for cpu_batch in cpu_batches]
        round_s = total_s(self.model.cpu_attention_s(*load) for load in loads)  # of the worker, for a layer of each
        rounds = limit_s / round_s if round_s else 0.0
        steps = [max(0.0, min(rounds, self.model.num_layers - cpu_batch.stage) - 1) for cpu_batch in cpu_batches]
        each_s = [self.model.linear_s(rows) + self.model.hand_over_s(rows) for rows, _ in loads]
        return total_s(count * alone_stage_s for count, alone_stage_s in zip(steps, each_s, strict=True))

    def cpu_batch_plans(self, cpu_batches: Sequence[CpuBatch], spare_s: float) -> tuple[list[CpuBatchPlan], float]:
        plans, added_s = [], 0.0
        for cpu_batch in sorted(cpu_batches, key=lambda cpu_batch: -len(cpu_batch.members)):
            rows, alone_stages_s = len(cpu_batch.members), [0.0]
            for stage in range(cpu_batch.stage, self.model.num_layers):
                # A stage alone costs as much as one joined to an empty GPU batch. Some stages will be joined, which is
                # cheaper.
                seconds = alone_stages_s[-1] + joined_rows_s(self.model, 0, 0, {stage: rows})
                if added_s + seconds > spare_s:
                    break
                alone_stages_s.append(seconds)
            crossings = len(alone_stages_s) - 1
            if crossings > 1:
                added_s += alone_stages_s[-1]
                plans.append(cpu_batch.plan(replace(FREE_RUNNING, max_stages=crossings)))
            else:
                plans.append(cpu_batch.plan(OVERLAPPED))
        return plans, added_s


# -- its baselines -----------------------------------------------------------------------------------------------------
# The systems that OmniServe's evaluation compares with, as it adapts them: two service classes, GPU only.

RESERVED_SHARE = 0.1
"""Of the GPU's blocks, the share kept free of best-effort requests. Assumed: neither paper states it."""


class Llumnix(Vllm):
    """Llumnix (OSDI'24) on one instance: vLLM's scheduler, and a reserve of GPU blocks for latency-sensitive requests.

    Llumnix places and migrates requests among instances by their memory, and keeps headroom for those of high priority.
    With one instance only the headroom remains. Priorities are decided by memory; no iteration is bounded by a target.
    """

    rules = replace(Vllm.rules, withheld=RESERVED_SHARE, whole_prompts=False)  # its vLLM was older


class Sarathi(OmniServe):
    """Sarathi-Serve (OSDI'24) as in section 5.1.3: OmniServe's order and chunks on the GPU alone.

    Best-effort requests wait for GPU blocks. A preempted request is computed again, as in vLLM, on which Sarathi-Serve
    is built.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        self.rules = GPU_ONLY
