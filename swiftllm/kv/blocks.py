"""Block tables and free blocks of the KV cache in both tiers. Pure bookkeeping, no tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, Tier

if TYPE_CHECKING:
    from swiftllm.scheduling.host_pools import BlockFetcher


class BlockAllocator:
    """Allocates the block ids ``first``..``first + num_blocks - 1`` of one tier, or of one host's part of the CPU tier.

    Attributes:
        num_tables: requests whose blocks are here; kept by :class:`KVCacheManager`.
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.first = first
        self.num_tables = 0
        self._used: set[int] = set()
        self.free_all()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks. The caller checks ``num_free`` first.

        Raises:
            ValueError: fewer are free.
        """
        free = self._free
        if count > len(free):
            raise ValueError(f"{count} blocks asked for, {len(free)} of {self.num_blocks} free")
        blocks = free[: -count - 1 : -1]
        del free[len(free) - count :]
        self._used.update(blocks)
        return blocks

    def free_all(self) -> None:
        """Free all blocks, whatever their state."""
        self._free = list(range(self.first + self.num_blocks - 1, self.first - 1, -1))
        self._used.clear()
        self.num_tables = 0

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks.

        Raises:
            ValueError: some of them are not allocated.
        """
        num_used = len(self._used)
        self._used.difference_update(blocks)
        if len(self._used) != num_used - len(blocks):
            raise ValueError(f"blocks freed twice, or never allocated: {blocks}")
        self._free += blocks


class KVCacheManager:
    """Block tables of all requests that hold KV cache. A block holds ``block_size`` tokens.

    The CPU tier may have several pools: this host's, and other hosts'. All blocks of a request are in one pool.
    """

    def __init__(
        self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, host_blocks: Sequence[int] = ()
    ) -> None:
        """``host_blocks``: the blocks of each other host; their ids follow those of this host."""
        self.block_size = block_size
        self.host_pools = HostPools((num_cpu_blocks, *host_blocks))
        local = self.host_pools.pools[0]
        self.allocators: dict[Tier, BlockAllocator | HostPools] = {
            Tier.GPU: BlockAllocator(num_gpu_blocks),
            Tier.CPU: self.host_pools if host_blocks else local,
        }
        self.block_tables: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def capacity(self, tier: Tier) -> int:
        """Blocks that a tier always has. Other hosts may go away, so theirs do not count."""
        return self.host_pools.pools[0].num_blocks if tier is Tier.CPU else self.allocators[tier].num_blocks

    def pools(self, tier: Tier) -> Sequence[BlockAllocator]:
        """The pools of a tier in the order in which they are filled: this host, then the host with most free blocks."""
        allocator = self.allocators[tier]
        return allocator.by_preference() if isinstance(allocator, HostPools) else (allocator,)

    def pool_of(self, request: Request) -> BlockAllocator:
        """The pool of a request that holds blocks."""
        allocator = self.allocators[request.tier]
        if isinstance(allocator, HostPools):
            return allocator.pool_of(self.block_tables[request.request_id][0])
        return allocator

    def num_free(self, tier: Tier) -> int:
        return self.allocators[tier].num_free

    def num_held(self, request: Request) -> int:
        return len(self.block_tables.get(request.request_id, ()))

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's table in its tier to ``num_tokens`` in total. False, and no change: too few blocks."""
        if num_tokens <= request.num_kv_slots:
            return True
        missing = self.blocks_for(num_tokens - request.num_kv_slots)
        table = self.block_tables.get(request.request_id)
        pool = self._pool_with_room(request.tier, missing) if table is None else self.pool_of(request)
        if missing > pool.num_free:
            return False
        if table is None:
            table = self.block_tables[request.request_id] = []
            pool.num_tables += 1
        table.extend(pool.allocate(missing))
        request.num_kv_slots += missing * self.block_size
        return True

    def allocate_block_each(self, requests: Sequence[Request], tier: Tier) -> bool:
        """Allocate one more block for each of these requests of a tier. False, and no change: too few blocks."""
        allocator = self.allocators[tier]
        if isinstance(allocator, HostPools):
            counts = Counter(map(self.pool_of, requests))
            if any(count > pool.num_free for pool, count in counts.items()):
                return False
            return all(self.allocate_slots(request, request.num_kv_slots + self.block_size) for request in requests)
        if len(requests) > allocator.num_free:
            return False
        for request, block in zip(requests, allocator.allocate(len(requests)), strict=True):
            self.block_tables[request.request_id].append(block)
            request.num_kv_slots += self.block_size
        return True

    def move_blocks(self, request: Request, target: Tier) -> Swap:
        """Move a request's blocks to the other tier, which must have room. Returns the swap to put into the plan.

        The source blocks are free at once, since an iteration runs its swaps first, in order.
        """
        source = request.tier
        old_blocks, old_pool = self.block_tables[request.request_id], self.pool_of(request)
        new_pool = self._pool_with_room(target, len(old_blocks))
        new_blocks = new_pool.allocate(len(old_blocks))
        self.block_tables[request.request_id] = new_blocks
        old_pool.free(old_blocks)
        old_pool.num_tables -= 1
        new_pool.num_tables += 1
        request.tier = target
        return Swap(request, source, tuple(old_blocks), tuple(new_blocks))

    def free_blocks(self, request: Request) -> None:
        """Free all blocks of a request; no effect if it holds none."""
        request.num_kv_slots = 0
        if self.block_tables.get(request.request_id):
            pool = self.pool_of(request)
            pool.free(self.block_tables.pop(request.request_id))
            pool.num_tables -= 1

    def free_all_blocks(self) -> None:
        """Free all blocks of both tiers and drop all block tables."""
        self.block_tables.clear()
        for allocator in self.allocators.values():
            allocator.free_all()

    def _pool_with_room(self, tier: Tier, num_blocks: int) -> BlockAllocator:
        """Where a request that enters a tier gets its blocks: the first pool with room for it and one more block for
        each request there, else the first with room. Without any, the one filled first."""
        pools = self.pools(tier)
        for spare in (1, 0):
            for pool in pools:
                if num_blocks + spare * pool.num_tables <= pool.num_free:
                    return pool
        return pools[0]

    def check_blocks(self) -> None:
        """Assert that each block is either free or in exactly one table."""
        for allocator in self.allocators.values():
            assert allocator.num_free + allocator.num_used == allocator.num_blocks
        held = sum(len(table) for table in self.block_tables.values())
        assert held == sum(allocator.num_used for allocator in self.allocators.values()), "a block is lost"


class HostPools:
    """The pools of the CPU tier, one a host; host 0 is this one.

    The pool of a host that is gone is withdrawn: it has no blocks until it is restored.

    Attributes:
        fetcher: brings blocks of other hosts here; without one, swaps read them as they are carried out.
    """

    fetcher: BlockFetcher | None = None

    def __init__(self, num_blocks: Sequence[int]) -> None:
        firsts = [0, *accumulate(num_blocks)]
        self.pools = [BlockAllocator(count, first) for count, first in zip(num_blocks, firsts, strict=False)]
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

    def by_preference(self) -> list[BlockAllocator]:
        local, *others = self.pools
        return [local, *sorted(others, key=lambda pool: -pool.num_free)]

    def pool_of(self, block: int) -> BlockAllocator:
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


def out_of_blocks(requests: Sequence[Request]) -> list[Request]:
    """The requests without a cache slot for their newest token."""
    return [request for request in requests if request.num_tokens > request.num_kv_slots]
