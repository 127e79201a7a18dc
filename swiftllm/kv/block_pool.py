"""The blocks of a tier: what lies in one, which of them a request needs, and the pool that hands them out."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from swiftllm.model.config import ModelConfig

# -- layers by their attention window ----------------------------------------------------------------------------------
# Layers by their attention window: what lies in a block, and which blocks a request needs.
#
# Layers of one window are a group, and all groups have as many layers. A block holds some tokens in all layers of one
# group, so blocks of all groups come from one pool, whose layers are as many as those of a group.
#
# A group whose layers attend to all tokens needs a block for every ``block_size`` tokens of a request. One with a
# window needs as many blocks as a window can touch, and uses them as a ring: tokens overwrite what no later token
# attends to. So a request's blocks are one list that only grows, and it is moved, swapped and counted as one. For each
# ``block_size`` tokens, the list has a block for every group that still grows, in the order of the groups.


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
        most, size = max(lens, default=0), self.block_size
        width, padded = self.blocks_for(most), []
        padding = [0] * width
        for own, num_tokens in zip(blocks, lens, strict=True):
            count = -(-num_tokens // size) if self.are_exact else self.blocks_for(num_tokens)
            padded += own[:count]
            padded += padding[count:]
        lists = np.array(padded, dtype=np.int32).reshape(len(lens), width)
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


# -- the pool ----------------------------------------------------------------------------------------------------------
# The blocks of a tier: free, held by requests, or cached, that is held by none and still findable by hash.
#
# A block is written only while one request holds it and it is not full. A full block may have a hash and several
# holders.


class BlockFetcher(Protocol):
    """Brings blocks of other hosts here, so that the swap that reads them does not wait for a host. Block ids are those
    of the CPU tier; the blocks of a call lie on one host, and are not written until they are swapped or dropped."""

    def fetch(self, blocks: Sequence[int]) -> None:
        """Begin, without waiting. If the host is gone, they never come."""

    def has_fetched(self, blocks: Sequence[int]) -> bool: ...

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        """They are not wanted any more; ignored for those that were swapped."""


class BlockOrder:
    """Blocks in the order in which they were added; any of them can be taken out. Takes 8 bytes for each possible one.

    Each block is linked to the next and the previous one, an absent block to itself. ``num_blocks`` is both ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self._end = num_blocks
        self._next, self._previous = array("i", range(num_blocks + 1)), array("i", range(num_blocks + 1))
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, block: int) -> None:
        """Add an absent block as the last one."""
        last = self._previous[self._end]
        self._next[last] = self._previous[self._end] = block
        self._previous[block], self._next[block] = last, self._end
        self._length += 1

    def remove(self, block: int) -> None:
        """Take out a block that is present."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._next[block] = self._previous[block] = block
        self._length -= 1

    def __contains__(self, block: int) -> bool:
        return self._next[block] != block

    def pop_first(self) -> int:
        block = self._next[self._end]
        self.remove(block)
        return block


class StateSlots:
    """The slots of states of linear attention. A request has one from its start until it gives its blocks back,
    whichever tier these are in."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.of_request: dict[str, int] = {}
        self.free_all()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, request_id: str) -> int:
        slot = self.of_request[request_id] = self._free.pop()
        return slot

    def free(self, request_id: str) -> None:
        """Free the slot of a request; no effect if it has none."""
        if (slot := self.of_request.pop(request_id, None)) is not None:
            self._free.append(slot)

    def free_all(self) -> None:
        self._free = list(range(self._num_slots))[::-1]
        self.of_request.clear()

    def check(self) -> None:
        """Assert that each slot is free or of one request."""
        assert sorted([*self._free, *self.of_request.values()]) == list(range(self._num_slots)), "a slot is lost"


class Snapshots:
    """Slots of host memory that hold copies of states. A copy is named by the hash of the block at whose end it was
    made. If none is free, the least recently used one is given away.

    Attributes:
        every: tokens of an output between two copies.
    """

    def __init__(self, num_slots: int, every: int = 512) -> None:
        self.num_slots, self.every = num_slots, every
        self.free_all()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slots

    def num_resumable(self, block_hashes: Sequence[bytes]) -> int:
        """The first of a request's blocks that end where there is a copy; of these numbers the largest."""
        found = (number for number in range(len(block_hashes), 0, -1) if block_hashes[number - 1] in self._slots)
        return next(found, 0)

    def add(self, block_hash: bytes) -> int:
        """A slot for a new copy."""
        if not self._free:
            self.forget(next(iter(self._slots)))
        slot = self._slots[block_hash] = self._free.pop()
        return slot

    def use(self, block_hash: bytes) -> int:
        """The slot of a copy, which so is the most recently used one."""
        slot = self._slots[block_hash] = self._slots.pop(block_hash)
        return slot

    def forget(self, block_hash: bytes) -> None:
        """No effect if there is no such copy."""
        if (slot := self._slots.pop(block_hash, None)) is not None:
            self._free.append(slot)

    def forget_slots(self, slots: Collection[int]) -> None:
        """Forget the copies there: what they hold is not valid."""
        for block_hash in [block_hash for block_hash, slot in self._slots.items() if slot in slots]:
            self.forget(block_hash)

    def free_all(self) -> None:
        self._free = list(range(self.num_slots))[::-1]
        self._slots: dict[bytes, int] = {}  # by name, the least recently used one first

    def check(self) -> None:
        """Assert that each slot is free or holds one copy."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots)), "a snapshot is lost"


class BlockPool:
    """Allocates the block ids ``first``..``first + num_blocks - 1`` of one tier, or of one host's part of the CPU tier.

    With ``caches``, blocks may have hashes. A hashed block that nobody holds any more is cached: it is found by its
    hash, and counts as free, until it is the least recently used one and another one is needed.

    Attributes:
        num_tables: requests whose blocks are here; kept by :class:`~swiftllm.kv.kv_cache_manager.KVCacheManager`.
        on_evict: called with cached blocks that are about to be reused, the least recently used first, and their
            hashes.
    """

    on_evict: Callable[[Sequence[int], Sequence[bytes]], None] | None = None

    def __init__(self, num_blocks: int, first: int = 0, *, caches: bool = False) -> None:
        self.num_blocks = num_blocks
        self.first = first
        self.caches = caches
        self._used: set[int] = set()
        self.free_all()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: those that are free, and the cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def num_holders(self, block: int) -> int:
        return (block in self._used) + self._more_holders.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, the cached ones last. The caller checks ``num_free`` first."""
        free = self._free
        if count > len(free):
            if count > self.num_free:
                raise ValueError(f"{count} blocks asked for, {self.num_free} of {self.num_blocks} free")
            self._evict(count - len(free))
        blocks = free[: -count - 1 : -1]
        del free[len(free) - count :]
        self._used.update(blocks)
        return blocks

    def free_all(self) -> None:
        """Free all blocks, whatever their state, and forget their hashes."""
        self._free = list(range(self.first + self.num_blocks - 1, self.first - 1, -1))
        self._used.clear()
        self.num_tables = 0
        self._more_holders: dict[int, int] = {}  # of held blocks, how many hold them beside the first one
        num_hashed = self.num_blocks if self.caches else 0
        self._blocks: dict[bytes, int] = {}  # by hash
        self._hashes: list[bytes | None] = [None] * num_hashed
        self._cached = BlockOrder(num_hashed)  # counted from ``first``; the next one to be reused comes first

    def free(self, blocks: Sequence[int]) -> None:
        """Take one holder from each of a request's blocks, given in the request's order."""
        if self._more_holders:
            blocks = [block for block in blocks if not self._leave(block)]
        num_used = len(self._used)
        self._used.difference_update(blocks)
        if len(self._used) != num_used - len(blocks):
            raise ValueError(f"blocks freed twice, or never allocated: {blocks}")
        if not self._blocks:
            self._free += blocks
            return
        block_hashes, first = self._hashes, self.first
        self._free += [block for block in blocks if block_hashes[block - first] is None]
        for block in reversed(blocks):  # the last ones go first, so that prefixes stay
            if block_hashes[block - first] is not None:
                self._cached.append(block - first)

    def _leave(self, block: int) -> bool:
        """Take a holder from a block that has several. False: it has not."""
        more = self._more_holders.pop(block, 0)
        if more > 1:
            self._more_holders[block] = more - 1
        return more > 0

    # -- hashes --------------------------------------------------------------------------------------------------------

    def find(self, block_hash: bytes) -> int | None:
        """The block of this hash, held or cached."""
        return self._blocks.get(block_hash)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these held or cached blocks."""
        for block in blocks:
            if block in self._used:
                self._more_holders[block] = self._more_holders.get(block, 0) + 1
            else:
                self._cached.remove(block - self.first)
                self._used.add(block)

    def add_hash(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable. No effect if there is another one of this hash, or without ``caches``."""
        if self.caches and block_hash not in self._blocks:
            self._blocks[block_hash] = block
            self._hashes[block - self.first] = block_hash

    def forget(self, blocks: Sequence[int]) -> None:
        """Take the hashes of these blocks away, if they have any: what they hold is not valid."""
        for block in blocks:
            if self.caches and (block_hash := self._hashes[block - self.first]) is not None:
                del self._blocks[block_hash]
                self._hashes[block - self.first] = None
                if block - self.first in self._cached:
                    self._cached.remove(block - self.first)
                    self._free.append(block)

    def forget_all(self) -> None:
        self.forget(list(self._blocks.values()))

    def _evict(self, count: int) -> None:
        """Free the least recently used cached blocks."""
        blocks = [self._cached.pop_first() + self.first for _ in range(count)]
        block_hashes = [
            block_hash for block in blocks if (block_hash := self._hashes[block - self.first]) is not None
        ]  # all have one
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            del self._blocks[block_hash]
            self._hashes[block - self.first] = None
        self._free += blocks
        if self.on_evict is not None:
            self.on_evict(blocks, block_hashes)

    def check(self) -> Counter[int]:
        """Assert that each block is free, held or cached, and that hashes and blocks belong to each other. Returns the
        number of holders of each held block."""
        free, first = set(self._free), self.first
        cached = {block + first for block in range(len(self._hashes)) if block in self._cached}
        assert len(free) == len(self._free) and not free & self._used and not cached & (free | self._used)
        assert len(free) + len(self._used) + len(cached) == self.num_blocks, "a block is lost"
        assert len(cached) == self.num_cached and self._more_holders.keys() <= self._used
        hashed = {block + first: block_hash for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        assert hashed == {block: block_hash for block_hash, block in self._blocks.items()} and not free & hashed.keys()
        assert cached <= hashed.keys()
        return Counter({block: self.num_holders(block) for block in self._used})


class HostPools:
    """The pools of the CPU tier, one a host; host 0 is this one.

    The pool of a host that is gone is withdrawn: it has no blocks until it is restored.

    Attributes:
        fetcher: brings blocks of other hosts here; without one, swaps read them as they are carried out.
    """

    fetcher: BlockFetcher | None = None

    def __init__(self, num_blocks: Sequence[int], *, caches: bool = False) -> None:
        firsts = [0, *accumulate(num_blocks)]
        pools = zip(num_blocks, firsts, strict=False)
        self.pools = [BlockPool(count, first, caches=caches) for count, first in pools]
        self._firsts, self._sizes = firsts[:-1], tuple(num_blocks)

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free(self) -> int:
        return sum(pool.num_free for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    def by_preference(self) -> list[BlockPool]:
        local, *others = self.pools
        return [local, *sorted(others, key=lambda pool: -pool.num_free)]

    def pool_of(self, block: int) -> BlockPool:
        return self.pools[bisect_right(self._firsts, block) - 1]

    def free_all(self) -> None:
        for pool in self.pools:
            pool.free_all()

    def withdraw(self, host: int) -> None:
        """Take a host's blocks away; no request may hold any."""
        assert self.pools[host].num_used == 0
        self.pools[host].num_blocks = 0
        self.pools[host].free_all()

    def restore(self, host: int) -> None:
        """Give a host's withdrawn pool its blocks again."""
        self.pools[host].num_blocks = self._sizes[host]
        self.pools[host].free_all()
