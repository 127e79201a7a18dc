"""How many prompt tokens an iteration computes: the steady share of the strategy, more while more requests pay.

A token of a large batch costs a fixed time. In a small batch it is free, since reading the weights takes as long. So
prompts are computed in the shadow of the decodes, at the rate at which requests end. Two reasons to hurry: the batch is
too small for the machine, or the prompts exceed the shadow anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apex.perf.model import PerfModel
from apex.schedulers.adaptive.times import OperationTimes

SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
EFFICIENT = 1.09
"""A batch is efficient if its linear time per token is at most this multiple of the least of any batch."""
GROWTH = 1.25
"""While the batch grows, a chunk is at least this multiple of the steady one."""
AMORTISED, MOST_AMORTISED = 10, 40
"""A chunk need not be larger once its linear time is this multiple of what an iteration costs in any case.

The multiple is the number of prompt tokens to an output token, between these bounds. The more prompt tokens, the fewer
decodes wait for a large chunk.
"""

SHORT_QUEUE = 1 / 16
SHORT_QUEUE_PASSES = 4
"""A queue of at most this share of the decoding requests is short. It is computed in about so many iterations: then
requests come one by one, and their time to the first token counts more than a place in the shadow."""


class ChunkSizes:
    """The sizes of prompt chunks that a machine favours.

    Attributes:
        efficient: tokens from which on a batch's linear time per token is within ``EFFICIENT`` of the least.
        token_s: that least linear time per token, in seconds of one layer (b).
        flat_tokens: tokens up to which a stage costs about as much as for one.
        free: of these, the tokens that cost so little that others can wait for them; where weights are streamed, those
            that are done before the next layer's arrive.
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
    """Prompt tokens that cost a GPU batch of these rows nothing, because reading the weights takes as long anyway, or
    their way to the GPU."""
    return max(0.0, sizes.free - gpu_batch_decodes - joined)


def is_short_queue(waiting: int, decoding: int) -> bool:
    """Whether so few requests wait for their first token that they should be served at once."""
    return waiting <= max(SHORT_QUEUE_PASSES, SHORT_QUEUE * decoding)


def waiting_pays(
    sizes: ChunkSizes, num_layers: int, gain: float, free_tokens: float, steady_tokens: float, layer_s: float
) -> bool:
    """Whether prompts should rather wait for their turn in the shadow of the weights.

    Args:
        gain: by how much more requests would raise the rate, relative to it.
        free_tokens, steady_tokens: prompt tokens of an iteration, those that cost nothing and those needed.
        layer_s: seconds of a layer of the GPU batch.

    Prompt tokens beyond the steady ones may be computed for nothing at ``excess`` tokens per second. Computed at once
    instead, each takes the GPU batch L b seconds. Twice that share of the time must be gained to make up for it.
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
    is_settled: bool,
    short_queue_tokens: float = 0.0,
) -> int:
    """The most prompt tokens of the next iteration.

    Args:
        gpu_batch_decodes, joined CPU batches, cpu_decodes: decodes of the GPU batch, CPU decodes beside them, all CPU
        decodes.
        gpu_attention_s: attention of the GPU batch's decodes, in seconds of one layer.
        is_settled: whether the steady chunk rests on outputs seen.
        short_queue_tokens: prompt tokens of all who wait, if they are few; they are served at once.
    """
    if not gpu_batch_decodes and not cpu_decodes:
        return sizes.budget
    free_tokens = max(0.0, sizes.flat_tokens - gpu_batch_decodes - joined)
    largest = max(sizes.largest(gpu_attention_s, need.prompt_per_output), need.steady_tokens)
    if need.hurries:
        wanted = largest
    elif need.grows:
        wanted = max(sizes.efficient - gpu_batch_decodes, GROWTH * need.steady_tokens if is_settled else 0.0)
        wanted = min(wanted, largest)
    else:
        wanted = need.steady_tokens
    if short_queue_tokens:
        wanted = max(wanted, sizes.efficient - gpu_batch_decodes, short_queue_tokens / SHORT_QUEUE_PASSES)
    return min(sizes.budget, max(1, int(np.ceil(max(wanted, free_tokens)))))  # no prompt waits for ever
