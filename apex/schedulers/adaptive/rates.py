"""Output tokens per second of each strategy if its load stayed as it is: one function per strategy.

Symbols, in the words of the papers: T_l, T_g and T_c are one layer's linear time, GPU attention and CPU attention. The
GPU batch has g decodes, n requests decode on the CPU. Prompts are charged at their steady share: each output token uses
up ``prompt_per_output`` prompt tokens, or there would soon be nothing left to decode. All functions take arrays of n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apex.schedulers.adaptive.times import Floats, OperationTimes

MEMBER_SHARES = np.array([1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.08])
"""Shares of the CPU decodes that pipelining may take along, at least one request: a part of it would seem to hide."""
ALONE_SHARES = np.array([0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
"""Shares of these that run alone; the others join. Where all join, no stage reads the weights a second time."""
OVERLAP_ROUNDS = 4
"""Iterations of the fixed point of :func:`overlap_rate`; its values change by less than 1% after them."""

LEAST_S = 1e-9
"""Nothing takes less, so that rates of an empty GPU batch can be computed too."""


@dataclass(frozen=True)
class SteadyLoad:
    """The sizes that decide a rate and change little from one iteration to the next."""

    gpu_decodes: int
    """g, requests that decode in the GPU batch."""
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
    prompt_tokens: Floats
    """Prompt tokens in an iteration."""
    joined: Floats
    """CPU decodes that run the GPU batch's stages with it, in an iteration."""
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
    rate = g / total_s if total_s > 0 else 0.0
    return Rate(none + rate, none + prompts, none, none, none)


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
    numbers = cpu_decodes[:, None, None]
    members = np.maximum(numbers * MEMBER_SHARES[:, None], np.minimum(numbers, 1.0))
    alone = members * ALONE_SHARES
    members = np.broadcast_to(members, alone.shape)
    joining = members - alone
    prompts = load.prompt_tokens(g + members)
    attention_s, context = times.gpu_attention_s(g, load.gpu_context), load.cpu_context
    layer_s = pipelining_layer_s(times, g + prompts, attention_s, (joining, context), (alone, context))
    total_s = times.num_layers * layer_s + times.outside_layers_s(g + joining) + times.outside_layers_s(alone)
    rates = (g + members) / np.maximum(total_s, LEAST_S)
    best = rates.reshape(len(cpu_decodes), -1).argmax(axis=1)

    def at_best(values: Floats) -> Floats:
        return values.reshape(len(cpu_decodes), -1)[np.arange(len(cpu_decodes)), best]

    none = np.zeros_like(cpu_decodes)
    return Rate(at_best(rates), at_best(prompts), at_best(joining), none, none)


def overlap_rate(max_cpu_batches: int, times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats) -> Rate:
    """Free-running CPU batches, in the better number, 1 to ``max_cpu_batches``; see :func:`cpu_batches_rate`."""
    rates = [cpu_batches_rate(times, load, cpu_decodes, number) for number in range(1, max_cpu_batches + 1)]
    best = np.argmax([rate.tokens_per_s for rate in rates], axis=0)

    def at_best(field: str) -> Floats:
        return np.array([getattr(rate, field) for rate in rates])[best, np.arange(len(best))]

    return Rate(*map(at_best, ("tokens_per_s", "prompt_tokens", "joined", "num_cpu_batches", "alone_stages_s")))


def cpu_batches_rate(times: OperationTimes, load: SteadyLoad, cpu_decodes: Floats, number: int) -> Rate:
    """Free-running in ``number`` CPU batches of n / number requests: X = (use n + q g) / (L R).

    In a round of R seconds each CPU batch runs one layer and the GPU batch runs q layers. The round is as long as
    the worker needs, or the GPU batch with all stages alone, or a CPU batch alone: its attention, half a layer of the
    GPU batch until it is asked, its stage alone. A CPU batch that ends its token is idle for half a pass of the GPU
    batch, so only a part ``use`` of them is under way. An idle CPU batch's partner goes on faster, up to the pace of a
    CPU batch alone.
    """
    layers, g = times.num_layers, load.gpu_decodes
    size = cpu_decodes / number
    alone_stage_s = times.alone_stage_s(size)
    alone_stages_s, cpu_s = number * alone_stage_s, times.cpu_attention_s(size, load.cpu_context)
    gpu_attention_s, ends_s = times.gpu_attention_s(g, load.gpu_context), times.outside_layers_s(g) / layers
    prompts = load.prompt_tokens(g + cpu_decodes)
    round_s = use = gpu_batch_layers = np.zeros_like(size)
    for _ in range(OVERLAP_ROUNDS):
        gpu_batch_s = np.maximum(times.layer_s(times.linear_s(g + prompts) + gpu_attention_s) + ends_s, LEAST_S)
        single_s = cpu_s + gpu_batch_s / 2 + alone_stage_s
        # A CPU batch runs a streamed stage when the GPU batch does, since its weights are there then: once a pass.
        round_s = np.maximum(
            np.maximum(single_s, alone_stages_s + gpu_batch_s / 2), times.streamed_layers * gpu_batch_s
        )
        if number > 1:
            round_s = np.maximum(round_s, np.maximum(number * cpu_s, alone_stages_s + gpu_batch_s))
        gpu_batch_layers = (round_s - alone_stages_s) / gpu_batch_s
        rest_s = layers * round_s / (2 * gpu_batch_layers)
        resting = rest_s / (layers * round_s + rest_s)
        use = 1 - resting
        if number > 1:
            use = use**2 + 2 * resting * use * np.minimum(1.0, round_s / (2 * single_s))
        gpu_batch_layers = (round_s - alone_stages_s * use) / gpu_batch_s
        wanted = load.prompt_per_output * (g + cpu_decodes * use / gpu_batch_layers)
        prompts = np.minimum((prompts + wanted) / 2, load.prompt_limit)  # halfway, or it would swing
    rates = (use * cpu_decodes + gpu_batch_layers * g) / (layers * round_s)
    rates = np.where(cpu_decodes > 0, rates, 0.0)
    return Rate(
        rates, prompts, np.zeros_like(size), np.full_like(size, number), alone_stages_s * use / gpu_batch_layers
    )
