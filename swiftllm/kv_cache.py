"""Blocks of KV cache in two tiers: who holds which, and that none is lost. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.plan import Swap
from swiftllm.request import Request, Tier


class BlockAllocator:
    """Hands out the block ids 0..num_blocks-1 of one tier."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            ValueError: fewer are free; the caller asks ``num_free`` first.
        """
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} free")
        blocks = [self._free.pop() for _ in range(count)]
        self._used.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._used.remove(block)  # KeyError: freed twice, or never handed out
            self._free.append(block)


class KVCacheManager:
    """Block tables of all requests that hold cache. Lengths are tokens, sizes are blocks of ``block_size`` tokens."""

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

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the request's table hold ``num_tokens`` tokens in its tier; False, and no change, if blocks lack."""
        table = self.block_tables.setdefault(request.request_id, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free(request.tier):
            return False
        table.extend(self.allocators[request.tier].allocate(missing))
        request.num_kv_slots = len(table) * self.block_size
        return True

    def move(self, request: Request, target: Tier) -> Swap:
        """Move a request's blocks to the other tier, which has room; the swap's copies come before any later use.

        The source blocks are free at once: a plan carries its swaps out in order, before anything else.
        """
        source = request.tier
        old_blocks = self.block_tables[request.request_id]
        new_blocks = self.allocators[target].allocate(len(old_blocks))
        self.block_tables[request.request_id] = new_blocks
        self.allocators[source].free(old_blocks)
        request.tier = target
        return Swap(request, source, tuple(old_blocks), tuple(new_blocks))

    def release(self, request: Request) -> None:
        """Give back all blocks of a request; harmless if it holds none."""
        blocks = self.block_tables.pop(request.request_id, [])
        request.num_kv_slots = 0
        if blocks:
            self.allocators[request.tier].free(blocks)

    def check(self) -> None:
        """Assert that every block is either free or in exactly one table."""
        for allocator in self.allocators.values():
            assert allocator.num_free + allocator.num_used == allocator.num_blocks
        held = sum(len(table) for table in self.block_tables.values())
        assert held == sum(allocator.num_used for allocator in self.allocators.values()), "a block is lost"
