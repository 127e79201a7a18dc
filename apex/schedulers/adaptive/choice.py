"""The choice that rests on the load alone: the strategy, and what it needs of prompts. It stays while the load does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

import numpy as np

from apex.schedulers.adaptive.chunks import ChunkSizes, PromptNeed, free_prompt_tokens, waiting_pays
from apex.schedulers.adaptive.rates import Rate, SteadyLoad, gpu_only_rate, overlap_rate, pipelining_rate
from apex.schedulers.adaptive.times import OperationTimes
from swiftllm.core.plan import Strategy

SAME = 0.05
"""A choice is kept until a size of the load has changed by more than this share."""
HURRY_GAIN = 0.6
"""Where prompts exceed the shadow of the weights, they hurry while more CPU decodes would raise the rate by more than
this multiple of the decodes' share of all tokens. The fewer decodes there are, the less is lost while they wait."""
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
        return (*astuple(self.steady), self.cpu_decodes, self.most_cpu_decodes, self.has_room)

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
    """CPU decodes beside the GPU batch's own in a stage of the GPU batch."""
    num_cpu_batches: int
    alone_stages_per_layer_s: float
    """Seconds that the GPU batch spends on stages that CPU batches run alone between two of its layers."""
    need: PromptNeed
    sizes: tuple[float, ...]

    def rests_on(self, sizes: Sequence[float]) -> bool:
        """Whether these sizes are about those of the choice."""
        return all(abs(new - old) <= SAME * old for new, old in zip(sizes, self.sizes, strict=True))


def compare(
    times: OperationTimes,
    load: SteadyLoad,
    numbers: Sequence[float],
    strategies: Sequence[Strategy],
    max_cpu_batches: int,
) -> tuple[Strategy, Rate, float]:
    """The strategy with most tokens per second at the first of these numbers of CPU decodes, its rates at each of them,
    and the most tokens per second of any strategy at any of them."""
    functions = {
        Strategy.GPU_ONLY: gpu_only_rate,
        Strategy.PIPELINING: pipelining_rate,
        Strategy.OVERLAP: partial(overlap_rate, max_cpu_batches),
    }
    rates = {strategy: functions[strategy](times, load, np.array(numbers, float)) for strategy in strategies}
    best = max(rates, key=lambda strategy: rates[strategy].tokens_per_s[0])
    return best, rates[best], max(float(rate.tokens_per_s.max()) for rate in rates.values())


def choose(
    times: OperationTimes, chunk_sizes: ChunkSizes, load: Load, strategies: Sequence[Strategy], max_cpu_batches: int
) -> ChosenStrategy:
    """The best of the strategies for a load."""
    steady, layers, numbers = load.steady, times.num_layers, [load.cpu_decodes, *load.larger_cpu_decodes()]
    strategy, rates, reachable_per_s = compare(times, steady, numbers, strategies, max_cpu_batches)
    tokens_per_s, prompt_tokens = float(rates.tokens_per_s[0]), float(rates.prompt_tokens[0])
    joined = float(rates.joined[0])
    gain = reachable_per_s / tokens_per_s - 1 if tokens_per_s else float("inf")
    free_tokens = free_prompt_tokens(chunk_sizes, steady.gpu_decodes, joined)
    gpu_batch_s = times.linear_s(steady.gpu_decodes + free_tokens)
    gpu_batch_s += times.gpu_attention_s(steady.gpu_decodes, steady.gpu_context)
    layer_s = times.layer_s(gpu_batch_s) + times.outside_layers_s(steady.gpu_decodes) / layers
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
