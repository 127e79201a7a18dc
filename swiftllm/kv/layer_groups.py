"""Layers by their attention window: what lies in a block, and which blocks a request needs.

Layers of one window are a group, and all groups have as many layers. A block holds some tokens in all layers of one
group, so blocks of all groups come from one pool, whose layers are as many as those of a group.

A group whose layers attend to all tokens needs a block for every ``block_size`` tokens of a request. One with a window
needs as many blocks as a window can touch, and uses them as a ring: tokens overwrite what no later token attends to. So
a request's blocks are one list that only grows, and it is moved, swapped and counted as one. For each ``block_size``
tokens, the list has a block for every group that still grows, in the order of the groups.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from swiftllm.model.config.model_config import ModelConfig


@dataclass(frozen=True)
class LayerGroups:
    """
    Attributes:
        block_size: tokens of a block.
        layer_windows: how many tokens each layer attends to, a row's own included; None: all.
    """

    block_size: int
    layer_windows: tuple[int | None, ...] = (None,)

    @classmethod
    def of(cls, model: ModelConfig, block_size: int) -> LayerGroups:
        return cls(block_size, model.windows or (None,) * model.num_layers)

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each group."""
        return tuple(dict.fromkeys(self.layer_windows))

    @cached_property
    def rings(self) -> tuple[int | None, ...]:
        """The blocks of each group that a request needs at most: those that a window touches, wherever it begins."""
        return tuple(None if w is None else -(-(w - 1) // self.block_size) + 1 for w in self.windows)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        return tuple(map(self.windows.index, self.layer_windows))

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """Each layer's place in its group: its layer of the pool."""
        return tuple(self.group_of[:layer].count(group) for layer, group in enumerate(self.group_of))

    @property
    def pool_layers(self) -> int:
        return len(self.layer_windows) // len(self.windows)

    @cached_property
    def are_exact(self) -> bool:
        """Whether every block stays as it is once it is full. The blocks of a ring are overwritten."""
        return self.rings == (None,)

    @property
    def growth(self) -> int:
        """Blocks that the next token of a request needs at most."""
        return len(self.windows)

    def describe(self) -> str:
        """A line about the windows, for people."""
        groups = [
            f"{self.pool_layers} layers of {'all tokens' if ring is None else f'the last {window} ({ring} blocks)'}"
            for window, ring in zip(self.windows, self.rings, strict=True)
        ]
        return f"Windows: {', '.join(groups)}; a block is of one such group, and no prefix is cached"

    # -- counting -----------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """The blocks of a request with so many tokens."""
        count = -(-num_tokens // self.block_size)
        if self.are_exact:
            return count
        return sum(count if ring is None else min(count, ring) for ring in self.rings)

    def tokens_in(self, num_blocks: int) -> int:
        """The most tokens of a request with so many blocks."""
        if self.are_exact:
            return num_blocks * self.block_size
        rings = [ring for ring in self.rings if ring is not None]
        if len(rings) == len(self.rings) and num_blocks >= sum(rings):
            return sys.maxsize
        return self.block_size * (
            bisect_right(range(num_blocks + 1), num_blocks, key=lambda n: self.blocks_for(n * self.block_size)) - 1
        )

    def slots(self, num_tokens: float) -> float:
        """Slots of blocks that hold so many tokens of a request, in all groups: a token in each group that keeps it."""
        if self.are_exact:
            return num_tokens
        return sum(num_tokens if ring is None else min(num_tokens, ring * self.block_size) for ring in self.rings)

    # -- block tables -------------------------------------------------------------------------------------------------

    def tables(self, blocks: Sequence[Sequence[int]], lens: Sequence[int]) -> np.ndarray:
        """The block of each ``block_size`` tokens of some requests in each group, int32 ``[groups, requests, most]``.

        ``blocks``: those of each request, for its ``lens`` tokens at least. A block of a ring holds the last tokens
        that were written to it, so only those within the window of the newest token are in the block that the table
        tells. What is beyond a request's tokens has no meaning.
        """
        most = max(lens, default=0)
        lists = np.zeros((len(lens), self.blocks_for(most)), dtype=np.int32)
        for row, (own, num_tokens) in enumerate(zip(blocks, lens, strict=True)):
            count = self.blocks_for(num_tokens)
            lists[row, :count] = own[:count]
        if self.are_exact:
            return lists[None]
        count = -(-most // self.block_size)
        places = _places(self.rings, 1 << max(0, count - 1).bit_length())[:, :count]
        return np.ascontiguousarray(lists[:, places].swapaxes(0, 1))

    def first_kept(self, group: int, num_tokens: int) -> int:
        """The first token that the blocks of a group still hold when a request has so many."""
        ring = self.rings[group]
        return 0 if ring is None else max(0, -(-num_tokens // self.block_size) - ring) * self.block_size

    def first_reached(self, group: int, position: int) -> int:
        """The first token, at the beginning of a block, that is held for the token at ``position`` of a request."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size * self.block_size


@lru_cache
def _places(rings: tuple[int | None, ...], count: int) -> np.ndarray:
    """Where in a request's list of blocks each block of each group is, ``[groups, count]``."""
    of_ring = np.stack([np.arange(count) % (ring or count) for ring in rings])
    is_new = of_ring == np.arange(count)
    places = (np.cumsum(is_new.T.ravel()) - 1).reshape(count, len(rings)).T  # where it is new
    return np.take_along_axis(places, of_ring, axis=1)
