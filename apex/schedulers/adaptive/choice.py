"""The choice that rests on the load alone: the mode, and what it needs of prompts. It is kept while the load stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from apex.schedulers.adaptive.chunks import ChunkSizes, PromptNeed, free_prompt_tokens, waiting_pays
from apex.schedulers.adaptive.modes import Mode, ModeRates, best_mode
from apex.schedulers.adaptive.rates import SteadyLoad
from apex.schedulers.adaptive.times import OperationTimes

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
class Choice:
    """A mode and its rates, what it needs of prompts, and the sizes on which this rests."""

    rates: ModeRates
    need: PromptNeed
    sizes: tuple[float, ...]

    @property
    def mode(self) -> Mode:
        return self.rates.mode

    def rests_on(self, sizes: Sequence[float]) -> bool:
        """Whether these sizes are about those of the choice."""
        return all(abs(new - old) <= SAME * old for new, old in zip(sizes, self.sizes, strict=True))


def choose(
    times: OperationTimes, chunk_sizes: ChunkSizes, load: Load, modes: Sequence[Mode], max_cohorts: int
) -> Choice:
    """The best of the modes for a load."""
    steady, layers = load.steady, times.num_layers
    rates = best_mode(times, steady, load.cpu_decodes, load.larger_cpu_decodes(), modes, max_cohorts=max_cohorts)
    gain = rates.reachable_tokens_per_s / rates.tokens_per_s - 1 if rates.tokens_per_s else float("inf")
    free_tokens = free_prompt_tokens(chunk_sizes, steady.gpu_decodes, rates.riders)
    lane_s = times.linear_s(steady.gpu_decodes + free_tokens)
    lane_s += times.gpu_attention_s(steady.gpu_decodes, steady.gpu_context)
    layer_s = times.layer_s(lane_s) + times.outside_layers_s(steady.gpu_decodes) / layers
    exceeds = rates.prompt_tokens > free_tokens
    waits = waiting_pays(chunk_sizes, layers, gain, free_tokens, rates.prompt_tokens, float(layer_s))
    need = PromptNeed(
        rates.prompt_tokens,
        steady.prompt_per_output,
        grows=load.has_room or exceeds or not waits,
        hurries=exceeds and gain > HURRY_GAIN / (1 + steady.prompt_per_output),
    )
    return Choice(rates, need, load.sizes())
