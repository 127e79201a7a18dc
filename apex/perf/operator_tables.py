"""A profile table of a card whose operators were measured one by one, and the predictions from it.

Beside the curves of every table it has the attention of prompt chunks and decodes together, and what unequal contexts
cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import TYPE_CHECKING

from apex.perf.model import FREE, Curve, PerfModel, ProfileTable, total_s


@dataclass(frozen=True)
class TimeGrid:
    """Seconds over several sizes, interpolated linearly in each; beyond the ends along the line through the last two.

    Each of ``points`` has its sizes and, last, its seconds. They need not form a full grid: each size has points of its
    own for the sizes that follow.
    """

    points: tuple[tuple[float, ...], ...] = field(repr=False)
    if TYPE_CHECKING:  # set by __post_init__, and no fields: a table's identity is made of fields
        sizes: list[float] = field(init=False)
        _below: list[float | TimeGrid] = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError: a size has a single value, through which no line goes."""
        below: dict[float, list[tuple[float, ...]]] = {}
        for first, *rest in self.points:
            below.setdefault(first, []).append(tuple(rest))
        if len(below) < 2:
            raise ValueError(f"interpolation needs two values of each size, got {sorted(below)}")
        sizes = sorted(below)
        parts = [below[n][0][0] if len(below[n][0]) == 1 else TimeGrid(tuple(below[n])) for n in sizes]
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_below", parts)

    @staticmethod
    def of(seconds: Mapping[tuple[float, ...], float]) -> TimeGrid:
        return TimeGrid(tuple((*sizes, value) for sizes, value in seconds.items()))

    def sizes_after(self, first: float) -> list[float]:
        """The second sizes that were measured with a first one."""
        below = self._below[self.sizes.index(first)]
        assert isinstance(below, TimeGrid), "points of one size"
        return below.sizes

    def __call__(self, *sizes: float) -> float:
        first, *rest = sizes
        i = bisect_right(self.sizes, first, 1, len(self.sizes) - 1) - 1
        low, high = self._below[i], self._below[i + 1]
        if isinstance(low, TimeGrid):
            low = low(*rest)
        if isinstance(high, TimeGrid):
            high = high(*rest)
        return low + (first - self.sizes[i]) / (self.sizes[i + 1] - self.sizes[i]) * (high - low)


@dataclass(frozen=True)
class UnequalContexts:
    """Where attention of unequal contexts lies between that of their mean (0) and that of the longest of them (1).

    Shares by number of decodes, of batches of decodes alone and beside prompt chunks; interpolated in its logarithm.
    """

    alone: Mapping[int, float]
    beside_chunks: Mapping[int, float]

    def share(self, decodes: int, *, beside_chunks: bool) -> float:
        shares = self.beside_chunks if beside_chunks else self.alone
        sizes = sorted(shares)
        if decodes <= sizes[0] or len(sizes) == 1:
            return shares[sizes[0]]
        if decodes >= sizes[-1]:
            return shares[sizes[-1]]
        i = bisect_right(sizes, decodes) - 1
        low, high = sizes[i], sizes[i + 1]
        part = log2(decodes / low) / log2(high / low)
        return shares[low] + part * (shares[high] - shares[low])


@dataclass(frozen=True)
class OperatorTable(ProfileTable):
    """A table of measured operators. ``linear`` and both attentions are tables, too; ``ends`` over sampled rows is the
    head and the sampler.

    ``token_ends`` over all tokens: embedding and last norm. ``mixed_attention`` over (prompt tokens, tokens cached
    before them, decodes, context of each): a layer's attention of chunks and decodes in one call. None: their sum.
    ``unequal``: None where contexts are taken as equal.
    """

    token_ends: Curve = FREE
    mixed_attention: TimeGrid | None = field(default=None, repr=False)
    unequal: UnequalContexts | None = None


class OperatorModel(PerfModel):
    """Predictions from an :class:`OperatorTable`."""

    table: OperatorTable

    def first_stage_s(self, tokens: int) -> float:
        return super().first_stage_s(tokens) + self._curve("token_ends", self.table.token_ends, tokens)

    def gpu_batch_attention_s(
        self,
        decodes: int,
        decode_context: int,
        chunks: Sequence[tuple[int, int]],
        longest_context: int = 0,
        cpu_tier_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        """See :meth:`PerfModel.gpu_batch_attention_s`. Beside chunks decodes take longer than alone: the difference
        between a call of all and two calls is measured for one chunk, so that several count as one of their mean
        context."""
        mixed, unequal = self.table.mixed_attention, self.table.unequal
        seconds = super().gpu_batch_attention_s(decodes, decode_context, chunks, cpu_tier_chunks=cpu_tier_chunks)
        if not decodes:
            return seconds
        mean, together = decode_context / decodes, self.table.gpu_attention
        if chunks and mixed is not None:
            tokens = sum([new for new, _ in chunks])
            cached = total_s([new * before for new, before in chunks]) / tokens
            together = partial(mixed, tokens, cached)
            seconds += together(decodes, mean) - self.table.gpu_attention(decodes, mean)
            seconds -= self.table.prefill_attention(tokens, cached)
        if unequal is not None and longest_context > mean:
            share = unequal.share(decodes, beside_chunks=bool(chunks))
            seconds += share * (together(decodes, longest_context) - together(decodes, mean))
        return max(seconds, 0.0)


def model_of(table: ProfileTable, num_layers: int) -> PerfModel:
    """The predictions that a table allows."""
    return (OperatorModel if isinstance(table, OperatorTable) else PerfModel)(table, num_layers)
