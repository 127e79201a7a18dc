"""Block tables and free blocks of the KV cache in both tiers. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, Tier


class BlockAllocator:
    """Allocates the block ids 0..num_blocks-1 of one tier."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
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
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._used.clear()

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
    """Block tables of all requests that hold KV cache. A block holds ``block_size`` tokens."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.allocators = {Tier.GPU: BlockAllocator(num_gpu_blocks), Tier.CPU: BlockAllocator(num_cpu_blocks)}
        self.block_tables: dict[str, list[int]] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def capacity(self, tier: Tier) -> int:
        return self.allocators[tier].num_blocks

    def num_free(self, tier: Tier) -> int:
        return self.allocators[tier].num_free

    def num_held(self, request: Request) -> int:
        return len(self.block_tables.get(request.request_id, ()))

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's table in its tier to ``num_tokens`` in total. False, and no change: too few blocks."""
        if num_tokens <= request.num_kv_slots:
            return True
        allocator = self.allocators[request.tier]
        missing = self.blocks_for(num_tokens - request.num_kv_slots)
        if missing > allocator.num_free:
            return False
        self.block_tables.setdefault(request.request_id, []).extend(allocator.allocate(missing))
        request.num_kv_slots += missing * self.block_size
        return True

    def allocate_block_each(self, requests: Sequence[Request], tier: Tier) -> bool:
        """Allocate one more block for each of these requests of a tier. False, and no change: too few blocks."""
        allocator = self.allocators[tier]
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
        old_blocks = self.block_tables[request.request_id]
        new_blocks = self.allocators[target].allocate(len(old_blocks))
        self.block_tables[request.request_id] = new_blocks
        self.allocators[source].free(old_blocks)
        request.tier = target
        return Swap(request, source, tuple(old_blocks), tuple(new_blocks))

    def free_blocks(self, request: Request) -> None:
        """Free all blocks of a request; no effect if it holds none."""
        blocks = self.block_tables.pop(request.request_id, [])
        request.num_kv_slots = 0
        if blocks:
            self.allocators[request.tier].free(blocks)

    def free_all_blocks(self) -> None:
        """Free all blocks of both tiers and drop all block tables."""
        self.block_tables.clear()
        for allocator in self.allocators.values():
            allocator.free_all()

    def check_blocks(self) -> None:
        """Assert that each block is either free or in exactly one table."""
        for allocator in self.allocators.values():
            assert allocator.num_free + allocator.num_used == allocator.num_blocks
        held = sum(len(table) for table in self.block_tables.values())
        assert held == sum(allocator.num_used for allocator in self.allocators.values()), "a block is lost"


def out_of_blocks(requests: Sequence[Request]) -> list[Request]:
    """The requests without a cache slot for their newest token."""
    return [request for request in requests if request.num_tokens > request.num_kv_slots]
