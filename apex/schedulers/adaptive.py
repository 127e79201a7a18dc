"""The scheduler `adaptive`: prompts in the shadow of decodes, and the best of three ways to use the CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from apex.perf.model import Floats, GpuBatchLoad, OperationTimes, PerfModel, context_tokens
from apex.schedulers.hybrid import (
    LEAST_SHARE,
    WHOLE_BUDGET_GAIN,
    CpuDecodes,
    Hybrid,
    LastRequests,
    LengthsSeen,
    Pipeline,
    gpu_batch_s,
    gpu_only,
    pipelined,
    seconds_to_the_end,
)
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE_RUNNING, OVERLAPPED, CpuBatchMode, IterationPlan, Strategy
from swiftllm.core.request import FinishReason, Request, ServiceClass, Tier
from swiftllm.scheduling.scheduler import PlanBuilder, start_prompt
from swiftllm.scheduling.state import CpuBatch, SchedulerState

# -- rates of the strategies -------------------------------------------------------------------------------------------
# Output tokens per second of each strategy if its load stayed as it is: one function per strategy.
#
# Symbols, in the words of the papers: T_l, T_g and T_c are one layer's linear time, GPU attention and CPU attention.
# The GPU batch has g decodes, n requests decode on the CPU. Prompts are charged at their steady share: each output
# token uses up ``prompt_per_output`` prompt tokens, or there would soon be nothing left to decode. All functions take
# arrays of n.

MEMBER_SHARES = np.array([1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.08])
"""Shares of the CPU decodes that pipelining may take along, at least one request: a part of it would seem to hide."""
ALONE_SHARES = np.array([0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
"""Shares of these that run alone; the others join. Where all join, no stage reads the weights a second time."""
OVERLAP_ROUNDS = 4
"""Iterations of the fixed point of :func:`overlap_rate` at most; its values change by less than 1% after them."""

MANY_PROMPTS = 1e9
"""Prompt tokens to an output token where every iteration has as many as it may."""
LEAST_S = 1e-9
"""Nothing takes less, so that rates of an empty GPU batch can be computed too."""


@dataclass(frozen=True)
class SteadyLoad:
    """The sizes that decide a rate and change little from one iteration to the next."""

    gpu_decodes: int
    """g, requests that decode in the GPU batch; for the rates, as ``prompt_limit``, also one number for each of n."""
    gpu_context: float
    """Their mean context, in tokens."""
    cpu_context: float
    """Mean context of the requests that decode on the CPU, in tokens."""
    prompt_per_output: float
    """Prompt tokens that are computed for each output token in the long run; 0 without a backlog of prompts."""
    prompt_limit: float
    """Prompt tokens that an iteration could compute at most: the backlog, or the budget."""

    def prompt_tokens(self, decodes: Floats | float) -> Floats:
        """Prompt tokens of an iteration that yields ``decodes`` tokens."""
        return np.minimum(self.prompt_per_output * decodes, self.prompt_limit)


@dataclass(frozen=True)
class Rate:
    """A strategy's steady state, for each number of CPU decodes asked about."""

    tokens_per_s: Floats
    iteration_s: Floats
    prompt_tokens: Floats
    """Prompt tokens in an iteration."""
    joined: Floats
    """Number of CPU decodes that run the GPU batch's stages with it, in an iteration."""
    num_cpu_batches: Floats
    """Free-running CPU batches; 0 in other strategies."""
    alone_stages_s: Floats
    """Seconds of the GPU batch for stages that free-running CPU batches run alone, between two of its layers."""


def gpu_only_rate(times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats) -> Rate:
    """GPU-only: X = g / (L (T_l(g + P) + T_g) + ends(g)), whatever n is."""
    g, none = load.gpu_decodes, np.zeros_like(cpu_decodes)
    prompts = load.prompt_tokens(g)
    layer_s = times.layer_s(times.linear_s(g + prompts) + times.gpu_attention_s(g, load.gpu_context))
    total_s = times.num_layers * layer_s + times.outside_layers_s(g)
    rate = g / np.maximum(total_s, LEAST_S)
    return Rate(none + rate, none + total_s, none + prompts, none, none, none)


def pipelining_layer_s(
    times: OperationTimes,
    gpu_batch_tokens: Floats | int,
    gpu_batch_attention_s: Floats | float,
    joining: tuple[Floats, Floats | float],
    alone: tuple[Floats, Floats | float],
) -> Floats:
    """One layer of pipelining, in seconds: max(T_l0, T_c1) + max(T_l1 + T_g, T_c0), with hand-overs.

    The ``joining`` decodes share the GPU batch's stage (batch-0), the ``alone`` ones have their own (batch-1): their
    number, and their mean context in tokens. Either's CPU attention runs beside the other's part of the layer; the GPU
    batch waits where it takes longer.
    """
    joined_s = times.linear_s(gpu_batch_tokens + joining[0]) + times.hand_over_s(joining[0])
    alone_stage_s = times.alone_stage_s(alone[0]) + gpu_batch_attention_s
    cpu_0_s, cpu_1_s = times.cpu_attention_s(*joining), times.cpu_attention_s(*alone)
    return times.layer_s(np.maximum(joined_s, cpu_1_s) + np.maximum(alone_stage_s, cpu_0_s))


def pipelining_rate(times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats) -> Rate:
    """Pipelining: X = (g + k) / (L t + ends(g + k0) + ends(k1)) with the best k <= n and k1 = k - k0.

    t is :func:`pipelining_layer_s`. The CPU's time need not be hidden.
    """
    g = load.gpu_decodes
    members = np.maximum(MEMBER_SHARES[:, None, None] * cpu_decodes, np.minimum(cpu_decodes, 1.0))
    alone = ALONE_SHARES[:, None] * members
    members = np.broadcast_to(members, alone.shape)
    joining = members - alone
    prompts = load.prompt_tokens(g + members)
    attention_s, context = times.gpu_attention_s(g, load.gpu_context), load.cpu_context
    layer_s = pipelining_layer_s(times, g + prompts, attention_s, (joining, context), (alone, context))
    total_s = times.num_layers * layer_s + times.outside_layers_s(g + joining) + times.outside_layers_s(alone)
    rates = (g + members) / np.maximum(total_s, LEAST_S)
    best = rates.reshape(-1, len(cpu_decodes)).argmax(axis=0)

    def at_best(values: Floats) -> Floats:
        return values.reshape(-1, len(cpu_decodes))[best, np.arange(len(cpu_decodes))]

    none = np.zeros_like(cpu_decodes)
    return Rate(at_best(rates), at_best(total_s), at_best(prompts), at_best(joining), none, none)


def overlap_rate(max_cpu_batches: int, times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats) -> Rate:
    """Free-running CPU batches, in the better number, 1 to ``max_cpu_batches``; see :func:`cpu_batches_rate`."""
    rates = cpu_batches_rate(times, load, cpu_decodes, np.arange(1.0, max_cpu_batches + 1)[:, None])
    best = rates.tokens_per_s.argmax(axis=0), np.arange(len(cpu_decodes))
    return Rate(*(getattr(rates, field.name)[best] for field in fields(Rate)))


def cpu_batches_rate(times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats, number: Floats | int) -> Rate:
    """Free-running in ``number`` CPU batches of n / number requests: X = (use n + q g) / (L R).

    In a round of R seconds each CPU batch runs one layer and the GPU batch runs q layers. The round is as long as
    the worker needs, or the GPU batch with all stages alone, or a CPU batch alone: its attention, half a layer of the
    GPU batch until it is asked, its stage alone. A CPU batch that ends its token is idle for half a pass of the GPU
    batch, so only a part ``use`` of them is under way. An idle CPU batch's partner goes on faster, up to the pace of a
    CPU batch alone. For a column of numbers the results have a row each.
    """
    layers, g = times.num_layers, load.gpu_decodes
    size, several = cpu_decodes / number, np.greater(number, 1)
    alone_stage_s = times.alone_stage_s(size)
    alone_stages_s, cpu_s = number * alone_stage_s, times.cpu_attention_s(size, load.cpu_context)
    gpu_attention_s, ends_s = times.gpu_attention_s(g, load.gpu_context), times.outside_layers_s(g) / layers
    prompts = load.prompt_tokens(g + cpu_decodes)
    round_s = use = gpu_batch_layers = np.zeros_like(size)
    for _ in range(OVERLAP_ROUNDS):
        gpu_batch_s = np.maximum(times.layer_s(times.linear_s(g + prompts) + gpu_attention_s) + ends_s, LEAST_S)
        single_s = cpu_s + gpu_batch_s / 2 + alone_stage_s
        # A stage whose weights are copied in each iteration is run when the GPU batch runs it, as they are there then:
        # once a pass.
        round_s = np.maximum(single_s, alone_stages_s + gpu_batch_s / 2)
        round_s = np.maximum(round_s, times.streamed_layers * gpu_batch_s)
        round_s = np.maximum(round_s, np.where(several, np.maximum(number * cpu_s, alone_stages_s + gpu_batch_s), 0.0))
        gpu_batch_layers = (round_s - alone_stages_s) / gpu_batch_s
        rest_s = layers * round_s / (2 * gpu_batch_layers)
        resting = rest_s / (layers * round_s + rest_s)
        use = 1 - resting
        use = np.where(several, use**2 + 2 * resting * use * np.minimum(1.0, round_s / (2 * single_s)), use)
        gpu_batch_layers = (round_s - alone_stages_s * use) / gpu_batch_s
        wanted = load.prompt_per_output * (g + cpu_decodes * use / gpu_batch_layers)
        before, prompts = prompts, np.minimum((prompts + wanted) / 2, load.prompt_limit)  # halfway, or it would swing
        if (prompts == before).all():
            break
    iteration_s = layers * round_s / gpu_batch_layers
    rates = (use * cpu_decodes + gpu_batch_layers * g) / (layers * round_s)
    rates = np.where(cpu_decodes > 0, rates, 0.0)
    alone_s = alone_stages_s * use / gpu_batch_layers
    return Rate(rates, iteration_s, prompts, np.zeros_like(size), np.full_like(size, number), alone_s)


# -- prompt chunks -----------------------------------------------------------------------------------------------------
# How many prompt tokens an iteration computes: the steady share of the strategy, more while more requests pay.
#
# A token of a large batch costs a fixed time. In a small batch it is free, since reading the weights takes as long. So
# prompts are computed in the shadow of the decodes, at the rate at which requests end. Two reasons to hurry: the batch
# is too small for the machine, or the prompts exceed the shadow anyway.

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
EFFICIENT = 1.09
"""A batch is efficient if its linear time per token is at most this multiple of the least of any batch. In place of
1.15 it earns 7% on an A10 with CPU attention at 20 GB/s and 100 output tokens."""
GROWTH = 1.25
"""While the batch grows, a chunk is at least this multiple of the steady one: 3% on NEO's T4 with 50 output tokens."""
AMORTISED, MOST_AMORTISED = 10, 40
"""A chunk need not be larger once its linear time is this multiple of what an iteration costs in any case.

The multiple is the number of prompt tokens to an output token, between these bounds. The more prompt tokens, the fewer
decodes wait for a large chunk. More than the lower bound earns 2% on two H100 with 25 output tokens.
"""

SHORT_QUEUE = 1 / 16
SHORT_QUEUE_PASSES = 4
"""A queue of at most this share of the decoding requests is short. It is computed in about so many iterations: then
requests come one by one, and their time to the first token counts more than a place in the shadow. It earns no
throughput."""


class ChunkSizes:
    """The sizes of prompt chunks that a machine favours.

    Attributes:
        efficient: tokens from which on a batch's linear time per token is within ``EFFICIENT`` of the least.
        token_s: that least linear time per token, in seconds of one layer (b).
        flat_tokens: tokens up to which a stage costs about as much as for one.
        free: of these, the tokens that cost so little that others can wait for them; where weights are copied to the
            GPU in each iteration, those that are done before the next layer's arrive.
    """

    def __init__(self, times: OperationTimes, budget: int, flat_tokens: int) -> None:
        self._times = times
        tokens = np.arange(1, max(budget, 2) + 1)
        self._linear_s = times.layer_s(times.linear_s(tokens))
        per_token_s = self._linear_s / tokens
        self.budget, self.flat_tokens = budget, flat_tokens
        self.free = flat_tokens
        if times.stream_s:
            read_s = PerfModel.FLAT_RATIO * float(times.linear_s(1))
            self.free = min(flat_tokens, int(self._linear_s.searchsorted(max(times.stream_s, read_s), "right")))
        self.token_s = float(per_token_s[: SIZES[-1]].min())
        efficient = (s for s in SIZES if s <= budget and per_token_s[s - 1] <= EFFICIENT * self.token_s)
        self.efficient = next(efficient, min(budget, SIZES[-1]))

    def largest(self, gpu_attention_s: float, prompt_per_output: float) -> int:
        """Tokens of the largest chunk worth while beside a GPU batch with this attention of a layer, in seconds."""
        times = self._times
        fixed_s = self._linear_s[0] + gpu_attention_s + float(times.outside_layers_s(1)) / times.num_layers
        multiple = min(max(AMORTISED, prompt_per_output), MOST_AMORTISED)
        return max(self.efficient, int(self._linear_s.searchsorted(multiple * fixed_s)) + 1)


@dataclass(frozen=True)
class PromptNeed:
    """What the choice of a strategy says about prompts."""

    steady_tokens: float
    """The steady chunk, in tokens."""
    prompt_per_output: float
    """Prompt tokens that an output token uses up in the long run."""
    grows: bool
    """Whether more requests should decode."""
    hurries: bool
    """Whether they should soon, since early prompts cost nothing."""


def free_prompt_tokens(sizes: ChunkSizes, gpu_batch_decodes: int, joined: float) -> float:
    """Prompt tokens that cost a GPU batch of so many decodes and ``joined`` rows of CPU decodes nothing, because
    reading the weights takes as long anyway, or their way to the GPU."""
    return max(0.0, sizes.free - gpu_batch_decodes - joined)


def most_in_short_queue(decoding: int) -> int:
    """The most requests that wait for their first token and should be served at once, beside so many that decode."""
    return max(SHORT_QUEUE_PASSES, int(SHORT_QUEUE * decoding))


def waiting_pays(
    sizes: ChunkSizes, num_layers: int, gain: float, free_tokens: float, steady_tokens: float, layer_s: float
) -> bool:
    """Whether prompts should rather wait for their turn in the shadow of the weights.

    Args:
        gain: by how much more requests would raise the rate, relative to it.
        free_tokens, steady_tokens: prompt tokens of an iteration, those that cost nothing and those needed.
        layer_s: seconds of a layer of the GPU batch.

    Prompt tokens beyond the steady ones may be computed for nothing at ``excess`` tokens per second. Computed at once
    instead, each takes the GPU batch L b seconds. Twice that share of the time must be gained to make up for it. This
    earns 8% on an A10 with CPU attention at 20 GB/s and 500 output tokens.
    """
    excess = max(0.0, free_tokens - steady_tokens) / (num_layers * layer_s) if layer_s else 0.0
    return gain < 2 * sizes.token_s * num_layers * excess


def prompt_chunk(
    sizes: ChunkSizes,
    need: PromptNeed,
    *,
    gpu_batch_decodes: int,
    joined: float,
    cpu_decodes: int,
    gpu_attention_s: float,
    short_queue_tokens: float = 0.0,
) -> int:
    """The most prompt tokens of the next iteration.

    Args:
        gpu_batch_decodes, joined, cpu_decodes: numbers of decodes of the GPU batch, of CPU decodes that join its
            stages, and of all CPU decodes.
        gpu_attention_s: attention of the GPU batch's decodes, in seconds of one layer.
        short_queue_tokens: prompt tokens of all who wait, if they are few; they are served at once.
    """
    if not gpu_batch_decodes and not cpu_decodes:
        return sizes.budget
    free_tokens = max(0.0, sizes.flat_tokens - gpu_batch_decodes - joined)
    largest = max(sizes.largest(gpu_attention_s, need.prompt_per_output), need.steady_tokens)
    if need.hurries:
        wanted = largest
    elif need.grows:
        wanted = min(max(sizes.efficient - gpu_batch_decodes, GROWTH * need.steady_tokens), largest)
    else:
        wanted = need.steady_tokens
    if short_queue_tokens:
        wanted = max(wanted, sizes.efficient - gpu_batch_decodes, short_queue_tokens / SHORT_QUEUE_PASSES)
    return min(sizes.budget, max(1, int(np.ceil(max(wanted, free_tokens)))))  # no prompt waits for ever


# -- the split of CPU decodes in pipelining ----------------------------------------------------------------------------
# Which CPU decodes go along in pipelining, and which of them run alone: the split with most tokens for the GPU batch's
# time.

SPLIT_MEMBER_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12, 0.06, 0.0)
SPLIT_ALONE_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.25, 0.0)
LEAST_TIME_SHARE = 0.02
"""Of an iteration at least this share is charged to its decodes, however much of it the prompts pay."""


def best_split(
    times: OperationTimes,
    model: PerfModel,
    load: GpuBatchLoad,
    startable_tokens: np.ndarray,
    in_flight: tuple[int, int],
    *,
    token_s: float,
    least_members: int = 0,
) -> tuple[int, int]:
    """How many CPU decodes, of those that may start a token, join, and how many run alone.

    The split maximises the decodes over the time that the prompts do not pay. Prompts pay for the linear work of their
    tokens in a large batch, and for their attention.

    Args:
        startable_tokens: context of each startable CPU decode, in the order in which they are taken; int64 [number].
        in_flight: number of requests that are part of the way through their token, which run alone too, and the sum
            of their context in tokens.
        token_s: linear time of a token in a large batch, in seconds of one layer (b).
        least_members: take at least so many.

    Returns:
        The number that run alone, which come first, and the number that join, which come after them.
    """
    num_in_flight, in_flight_context = in_flight
    sums = np.concatenate(([0], np.cumsum(startable_tokens)))
    members, alone = candidate_splits(len(startable_tokens), least_members, model.flat_linear_tokens)
    joining = members - alone
    num_alone = alone + num_in_flight
    alone_context = sums[alone] + in_flight_context
    joined_context = sums[members] - sums[alone]
    prefill_s = load.prefill_attention_s(model)
    gpu_batch_attention_s = model.gpu_attention_s(load.decodes, load.decode_context) + prefill_s
    joined_load = joining, joined_context / np.maximum(joining, 1)
    alone_load = num_alone, alone_context / np.maximum(num_alone, 1)
    layer_s = pipelining_layer_s(times, load.tokens, gpu_batch_attention_s, joined_load, alone_load)
    total_s = times.num_layers * layer_s + times.outside_layers_s(load.requests + joining)
    total_s = total_s + times.outside_layers_s(num_alone)
    paid_s = times.num_layers * (token_s * (load.tokens - load.decodes) + prefill_s)
    rates = (load.decodes + num_in_flight + members) / np.maximum(total_s - paid_s, LEAST_TIME_SHARE * total_s)
    best = int(rates.argmax())
    return int(alone[best]), int(joining[best])


def candidate_splits(num_startable: int, least_members: int, flat_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of members and, of these, of those that run alone, to be compared; int64 [candidates] each."""
    members = np.ceil(num_startable * np.array(SPLIT_MEMBER_SHARES)).astype(int)
    members = np.unique(np.maximum(members, min(least_members, num_startable)))
    shares = np.round(members[:, None] * np.array(SPLIT_ALONE_SHARES)).astype(int)
    # As many alone as their stage takes for nothing: up to there it costs reading the weights, whatever their number.
    at_flat_end = np.minimum(members, flat_tokens)[:, None]
    alone = np.concatenate([shares, at_flat_end], axis=1)
    return np.repeat(members, alone.shape[1]), alone.ravel()


# -- the choice of a strategy ------------------------------------------------------------------------------------------
# The choice that rests on the load alone: the strategy, and what it needs of prompts. It stays while the load does.

SAME = 0.05
"""A choice is kept until a size of the load has changed by more than this share."""
HURRY_GAIN = 0.6
"""Where prompts exceed the shadow of the weights, they hurry while more CPU decodes would raise the rate by more than
this multiple of the decodes' share of all tokens. The fewer decodes there are, the less is lost while they wait. This
earns 4% on an A10 with 100 output tokens and on two H100 with 25."""
ROOM_SHARE = 1 / 8
"""The GPU has room if its free blocks hold one request more than this share of those that decode there."""


@dataclass(frozen=True)
class Load:
    """What a choice rests on."""

    steady: SteadyLoad
    cpu_decodes: int
    most_cpu_decodes: float
    """How many there could be: with all that wait, as far as the CPU tier has room."""
    gpu_room: float
    """Requests for which the GPU pool has room."""

    @property
    def has_room(self) -> bool:
        return self.gpu_room > 1 + ROOM_SHARE * self.steady.gpu_decodes

    def sizes(self) -> tuple[float, ...]:
        return (*vars(self.steady).values(), self.cpu_decodes, self.most_cpu_decodes, self.has_room)

    def larger_cpu_decodes(self) -> list[float]:
        """More CPU decodes than now, up to the most, to be asked about."""
        now, most = self.cpu_decodes, self.most_cpu_decodes
        numbers = [now + share * (most - now) for share in (0.25, 0.5, 1.0)] + [2.0 * now]
        return [number for number in numbers if now < number <= most]


@dataclass(frozen=True)
class ChosenStrategy:
    """A strategy in its steady state, what it needs of prompts, and the sizes on which this rests."""

    strategy: Strategy
    joined: float
    """Number of CPU decodes beside the GPU batch's own in a stage of the GPU batch."""
    num_cpu_batches: int
    alone_stages_per_layer_s: float
    """Seconds that the GPU batch spends on stages that CPU batches run alone between two of its layers."""
    need: PromptNeed
    sizes: tuple[float, ...]

    def rests_on(self, sizes: Sequence[float]) -> bool:
        """Whether these sizes are about those of the choice."""
        return all(abs(new - old) <= SAME * old for new, old in zip(sizes, self.sizes, strict=True))


def all_rates(
    times: OperationTimes,
    load: SteadyLoad,
    cpu_decodes: Floats,
    strategies: Sequence[Strategy],
    max_cpu_batches: int,
) -> dict[Strategy, Rate]:
    functions = {
        Strategy.GPU_ONLY: gpu_only_rate,
        Strategy.PIPELINING: pipelining_rate,
        Strategy.OVERLAP: partial(overlap_rate, max_cpu_batches),
    }
    return {strategy: functions[strategy](times, load, cpu_decodes) for strategy in strategies}


def compare(
    times: OperationTimes,
    load: SteadyLoad,
    numbers: Sequence[float],
    strategies: Sequence[Strategy],
    max_cpu_batches: int,
) -> tuple[Strategy, Rate, float]:
    """The strategy with most tokens per second at the first of these numbers of CPU decodes, its rates at each of them,
    and the most tokens per second of any strategy at any of them."""
    rates = all_rates(times, load, np.array(numbers, float), strategies, max_cpu_batches)
    best = max(rates, key=lambda strategy: rates[strategy].tokens_per_s[0])
    return best, rates[best], max(float(rate.tokens_per_s.max()) for rate in rates.values())


def choose(
    times: OperationTimes, chunk_sizes: ChunkSizes, load: Load, strategies: Sequence[Strategy], max_cpu_batches: int
) -> ChosenStrategy:
    """The best of the strategies for a load."""
    # The rates are asked for more CPU decodes than there are now, too: only they tell whether admitting requests pays.
    steady, layers, numbers = load.steady, times.num_layers, [load.cpu_decodes, *load.larger_cpu_decodes()]
    strategy, rates, reachable_per_s = compare(times, steady, numbers, strategies, max_cpu_batches)
    tokens_per_s, prompt_tokens = float(rates.tokens_per_s[0]), float(rates.prompt_tokens[0])
    joined = float(rates.joined[0])
    gain = reachable_per_s / tokens_per_s - 1 if tokens_per_s else float("inf")
    free_tokens = free_prompt_tokens(chunk_sizes, steady.gpu_decodes, joined)
    gpu_batch_s = times.linear_s(steady.gpu_decodes + free_tokens)
    gpu_batch_s += times.gpu_attention_s(steady.gpu_decodes, steady.gpu_context)
    layer_s = times.layer_s(gpu_batch_s) + times.outside_layers_s(steady.gpu_decodes) / layers
    # Beyond what is free, prompts cost time whenever they are computed: then waiting for their turn gains nothing.
    exceeds = prompt_tokens > free_tokens
    waits = waiting_pays(chunk_sizes, layers, gain, free_tokens, prompt_tokens, float(layer_s))
    need = PromptNeed(
        prompt_tokens,
        steady.prompt_per_output,
        grows=load.has_room or exceeds or not waits,
        hurries=exceeds and gain > HURRY_GAIN / (1 + steady.prompt_per_output),
    )
    return ChosenStrategy(
        strategy, joined, int(rates.num_cpu_batches[0]), float(rates.alone_stages_s[0]), need, load.sizes()
    )


# -- the scheduler -----------------------------------------------------------------------------------------------------

ESTIMATE_KEPT = 8
"""Iterations for which an estimate of output lengths is kept."""
WAITING_LOOKED_AT = 32
"""Waiting requests whose tokens count as backlog."""
ROOM_PER_REQUEST = 1.2
"""Room on the GPU is counted in requests of this multiple of the mean context, since they grow."""
LEFT_OUT_SHARE = 0.1
"""Of the GPU batch's time, the share spent on CPU decodes that the strategy leaves out. Else they wait for minutes
while prompts fill the GPU, for a percent more throughput."""


class Adaptive(Hybrid):
    """GPU-only, pipelining or free-running CPU batches, whichever yields most tokens per second in the steady state.

    No CPU decode starves. One of n that may start its next token does so within ``max_wait_iterations`` + n + c
    iterations, where c is what the CPU batches under way need to end their tokens. The reason: whatever starts takes
    those that have waited longest; and where nothing starts for ``max_wait_iterations``, one CPU batch of all of them
    does. With overlap disabled it is one request instead, so there the bound is n times ``max_wait_iterations``.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        self.lengths = LengthsSeen()
        self.emptied()

    def use_model(self, model: PerfModel) -> None:
        super().use_model(model)
        self.times = OperationTimes(model)
        self._chunk_sizes: ChunkSizes | None = None
        self._choice: ChosenStrategy | None = None

    def emptied(self) -> None:
        self._choice = None
        self._next_estimate, self._rho = 0, 0.0
        self._whole_budget, self._asked_of = False, -1  # for how many requests seen that was decided
        self._left_out_s = 0.0  # of the GPU batch, while CPU decodes were left out

    def added(self, request: Request) -> None:
        self.lengths.add_prompt(request.prompt_len, request.sampling.max_tokens)

    def ended(self, request: Request) -> None:
        self.lengths.add_output(request.output_len, aborted=request.finish_reason is FinishReason.ABORT)

    def decide(self, builder: PlanBuilder, startable: CpuDecodes) -> IterationPlan:
        self._start_first_tokens(builder)
        under_way, load = builder.state.cpu_batches.under_way(), GpuBatchLoad.from_builder(builder)
        if not startable and not under_way:
            return gpu_only(builder, self.model, load)
        startable = _longest_waiting_first(startable)
        pipeline = self._pipeline(load, startable, under_way) if self.config.pipelines else None
        if pipeline is not None:
            self._left_out_s = 0.0
            return pipelined(builder, pipeline, under_way)
        return self._overlapped(builder, load, startable, under_way)

    # -- the choice of a strategy and of the prompt chunk -----------------------------------------------------------

    def limit_prompts(self, builder: PlanBuilder) -> None:
        """Choose the strategy, unless the last choice still stands, and the most prompt tokens of this iteration."""
        # Before the plan has any prompt: how many an iteration should compute depends on what the CPU decodes do in it.
        state = builder.state
        if self._chunk_sizes is None:
            budget = state.limits.max_num_batched_tokens
            self._chunk_sizes = ChunkSizes(self.times, budget, self.model.flat_linear_tokens)
        on_gpu = state.decoding[Tier.GPU][: state.limits.max_num_batched_tokens]
        on_cpu, gpu_context = state.decoding[Tier.CPU], context_tokens(on_gpu)
        queue = len(state.waiting) + len(state.prefilling)
        load = self._load(state, len(on_gpu), gpu_context, queue)
        if self._choice is None or not self._choice.rests_on(load.sizes()):
            strategies = self._strategies(load.cpu_decodes)
            self._choice = choose(self.times, self._chunk_sizes, load, strategies, self.config.max_cpu_batches)
        is_short = queue <= most_in_short_queue(len(on_gpu) + len(on_cpu))
        chunk = prompt_chunk(
            self._chunk_sizes,
            self._choice.need,
            gpu_batch_decodes=len(on_gpu),
            joined=self._choice.joined,
            cpu_decodes=len(on_cpu),
            gpu_attention_s=self.model.gpu_attention_s(len(on_gpu), gpu_context),
            short_queue_tokens=load.steady.prompt_limit if is_short else 0.0,
        )
        if self.config.disable_prompt_chunks or self._takes_whole_budget(state, load, queue, chunk):
            return
        if is_short and queue > 1:  # a prompt with others behind it is not cut, as each cut delays them all
            chunk = max(chunk, (state.prefilling or state.waiting)[0].num_uncomputed)
        builder.prompt_limit = min(builder.prompt_limit, chunk)

    def _takes_whole_budget(self, state: SchedulerState, load: Load, queue: int, chunk: int) -> bool:
        """Whether prompts come first, as everything ends sooner then.

        Asked after an arrival: once where all fit, else in each iteration until they do.
        """
        on_gpu, on_cpu = state.decoding[Tier.GPU], state.decoding[Tier.CPU]
        decoding, num_seen = len(on_gpu) + len(on_cpu), self.lengths.num_seen
        prompt, prompt_per_output = self.lengths.mean_prompt, load.steady.prompt_per_output
        if not prompt_per_output or not decoding or num_seen == self._asked_of:
            return self._whole_budget
        # Until some have ended, their own limits may say more than the estimate.
        output = min(prompt / prompt_per_output, self.lengths.mean_limit)
        kv, slots = state.kv, state.kv.groups.slots(prompt + output)
        seats = {tier: kv.capacity(tier) * kv.block_size / slots for tier in Tier}
        self._whole_budget = False
        if queue + decoding > min(sum(seats.values()), state.limits.max_num_seqs):
            return False
        self._asked_of = num_seen
        uncomputed = sum([request.num_uncomputed for request in state.prefilling]) + len(state.waiting) * prompt
        produced = sum([request.output_len for request in (*on_gpu, *on_cpu)])
        last = LastRequests(
            waiting=queue,
            decoding=decoding,
            prompt_tokens=uncomputed,
            output_tokens=max(0.0, (queue + decoding) * output - produced),
            mean_output=output,
            mean_context=prompt + output / 2,
            gpu_seats=seats[Tier.GPU],
        )
        sizes = self._chunk_sizes
        assert sizes is not None  # as for the choice
        chunks = max(chunk, sizes.efficient), max(sizes.budget - decoding - queue / 2, 1)
        seconds, share = seconds_to_the_end(last, np.array(chunks, float), self._pace)
        self._whole_budget = bool(share[0] >= LEAST_SHARE and seconds[1] <= WHOLE_BUDGET_GAIN * seconds[0])
        return self._whole_budget

    def _pace(self, on_gpu: Any, on_cpu: Floats, prompt_tokens: Any, context: float) -> tuple[Floats, Floats]:
        """Tokens per second and seconds of an iteration, with the best strategy for each of these numbers."""
        load = SteadyLoad(on_gpu, context, context, MANY_PROMPTS, prompt_tokens)
        rates = all_rates(self.times, load, on_cpu, self._strategies(1), self.config.max_cpu_batches).values()
        tokens_per_s = np.array([rate.tokens_per_s for rate in rates])
        best = tokens_per_s.argmax(axis=0), np.arange(len(on_cpu))
        return np.maximum(tokens_per_s[best], LEAST_S), np.array([rate.iteration_s for rate in rates])[best]

    def _start_first_tokens(self, builder: PlanBuilder) -> None:
        """Where few wait for their first token, start them with the blocks that others keep for growth.

        A request overtakes those that have a first token and were preempted after it came. It overtakes nobody who was
        preempted before, and does so once, so nobody starves. As the youngest it is preempted first where blocks run
        out, with its first token sent: only a prompt that ends with this iteration may start so. With linear attention
        that is the next one, as prompts are cut where a snapshot is due.
        """
        state = builder.state
        most = most_in_short_queue(sum(map(len, state.decoding.values())))
        num_waiting = state.waiting.num_of_class(ServiceClass.LATENCY_SENSITIVE)  # they come first
        newest = [r for r in state.waiting[max(0, num_waiting - most - 1) : num_waiting] if not r.output_len]
        if not newest or len(newest) + len(state.prefilling) > most:
            return
        preempted_s = math.inf  # when the first of those that are overtaken was
        for request in state.waiting[:num_waiting]:
            if request.output_len:
                preempted_s = min(preempted_s, request.tier_history[-1][0])
                continue
            may_overtake = not request.num_preemptions and request.arrival_s <= preempted_s
            may_overtake = may_overtake and request.num_uncomputed <= builder.prompt_tokens_left
            if not may_overtake or not start_prompt(builder, request, find_tier=state.find_growth_room):
                break

    def _load(self, state: SchedulerState, gpu_decodes: int, gpu_context: int, queue: int) -> Load:
        """The load of this iteration; ``gpu_context`` is summed in tokens, ``queue`` counts requests without a token
        yet."""
        on_cpu, budget, kv = state.decoding[Tier.CPU], state.limits.max_num_batched_tokens, state.kv
        backlog = sum([request.num_uncomputed for request in state.prefilling])
        backlog += sum([request.num_uncomputed for request in state.waiting[:WAITING_LOOKED_AT]])
        each = context_tokens(on_cpu) / len(on_cpu) if on_cpu else self.lengths.mean_prompt
        steady = SteadyLoad(
            gpu_decodes,
            gpu_context / max(gpu_decodes, 1),
            each,
            self._prompt_per_output(state) if backlog else 0.0,
            min(backlog, budget),
        )
        room = {tier: kv.num_free(tier) * kv.block_size / kv.groups.slots(max(each, 1.0)) for tier in Tier}
        most_on_cpu = len(on_cpu) + min(queue, room[Tier.CPU])
        return Load(steady, len(on_cpu), most_on_cpu, room[Tier.GPU] / ROOM_PER_REQUEST)

    def _prompt_per_output(self, state: SchedulerState) -> float:
        """Prompt tokens per output token in the long run (rho)."""
        if state.iteration >= self._next_estimate:
            self._next_estimate = state.iteration + ESTIMATE_KEPT
            outputs = [request.output_len for queue in state.decoding.values() for request in queue]
            self._rho = self.lengths.mean_prompt / self.lengths.mean_output(outputs)
        return self._rho

    def _strategies(self, cpu_decodes: int) -> list[Strategy]:
        """Those to choose from; a forced one is the only one, where there are CPU decodes."""
        config = self.config
        strategies = [] if config.is_forced and cpu_decodes else [Strategy.GPU_ONLY]
        return strategies + [Strategy.PIPELINING] * config.pipelines + [Strategy.OVERLAP] * config.overlaps

    @property
    def _chosen(self) -> ChosenStrategy:
        """The choice on which the plan being made rests."""
        assert self._choice is not None, "prompts are limited before the plan is decided"
        return self._choice

    # -- plans ------------------------------------------------------------------------------------------------------

    def _pipeline(self, load: GpuBatchLoad, startable: CpuDecodes, under_way: Sequence[CpuBatch]) -> Pipeline | None:
        """The batches of pipelining; None if it is not its turn, or CPU batches under way should end first."""
        in_flight = [request for cpu_batch in under_way for request in cpu_batch.members]
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(in_flight)
        if not load.requests:
            pipeline.split_evenly(startable)  # no GPU batch to hide behind: the two batches hide each other
            return pipeline
        # With overlap an overdue request starts in a CPU batch, for which the GPU batch does not wait.
        must = startable.overdue is not None and not self.config.overlaps
        is_chosen = self._chosen.strategy is Strategy.PIPELINING
        if not must and (not is_chosen or (in_flight and not pipeline.hides_cpu())):
            return None
        assert self._chunk_sizes is not None  # as for the choice
        alone, joining = best_split(
            self.times,
            self.model,
            load,
            startable.tokens,
            (len(in_flight), context_tokens(in_flight)),
            token_s=self._chunk_sizes.token_s,
            least_members=1 if must or self.config.is_forced else 0,
        )
        first, second = pipeline.batches
        last = alone + joining
        second.add_requests(startable.requests[:alone], int(startable.tokens[:alone].sum()))
        first.add_requests(startable.requests[alone:last], int(startable.tokens[alone:last].sum()))
        return pipeline if first.size or second.size else None

    def _overlapped(
        self, builder: PlanBuilder, load: GpuBatchLoad, startable: CpuDecodes, under_way: Sequence[CpuBatch]
    ) -> IterationPlan:
        """CPU batches under way go on, and one may start."""
        state, choice, cpu_batches = builder.state, self._chosen, list(under_way)
        is_chosen = choice.strategy is Strategy.OVERLAP
        # Of equal size, as the rate on which the choice rests assumes (:func:`cpu_batches_rate`).
        most = choice.num_cpu_batches if is_chosen else 1
        size = -(-(len(startable) + sum(len(cpu_batch.members) for cpu_batch in under_way)) // most)
        # CPU decodes that the strategy leaves out get a turn once the GPU batch has worked long enough without them.
        if not under_way:
            self._left_out_s += gpu_batch_s(self.model, load)
        its_turn = LEFT_OUT_SHARE * self._left_out_s >= self.model.num_layers * self.model.linear_s(len(startable))
        starts = (
            its_turn or startable.overdue is not None or not load.requests or (is_chosen and 2 * len(startable) >= size)
        )
        if self.config.overlaps and startable and starts and len(under_way) < most:
            self._left_out_s = 0.0
            cpu_batches.append(state.cpu_batches.start(startable.requests[:size]))
        elif startable.overdue is not None:
            self.patience.look_again(state.iteration + 1)  # as soon as a CPU batch has ended
        if not cpu_batches:
            return gpu_only(builder, self.model, load)
        plans = [cpu_batch.plan(self._rule(len(cpu_batch.members), load, is_chosen)) for cpu_batch in cpu_batches]
        alone_stages_s = self.model.num_layers * choice.alone_stages_per_layer_s  # of CPU batches, in the steady state
        return builder.plan(plans, {"iteration_s": gpu_batch_s(self.model, load) + alone_stages_s})

    def _rule(self, members: int, load: GpuBatchLoad, is_chosen: bool) -> CpuBatchMode:
        """Whether a CPU batch should run its stage alone: not if the GPU batch yields more tokens in the time of its
        stages."""
        if not is_chosen:
            return FREE_RUNNING
        model = self.model
        attention_s = model.gpu_attention_s(load.decodes, load.decode_context)
        gpu_batch_layer_s = model.layer_s(model.linear_s(load.decodes) + attention_s)
        alone_stage_s = model.linear_s(members) + model.hand_over_s(members)
        return FREE_RUNNING if members * gpu_batch_layer_s >= load.decodes * alone_stage_s else OVERLAPPED


def _longest_waiting_first(startable: CpuDecodes) -> CpuDecodes:
    """In any order in which some come first for ever, the others would starve."""
    return CpuDecodes(sorted(startable.requests, key=attrgetter("last_served")), startable.overdue)
