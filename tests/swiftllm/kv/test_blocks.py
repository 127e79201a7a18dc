"""Block tables: who holds which block, and that a lost or doubly freed one is noticed."""

from __future__ import annotations

import pytest

from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.block_pool import BlockPool
from swiftllm.kv.kv_cache_manager import KVCacheManager


def holding(kv: KVCacheManager, tier: Tier, num_tokens: int) -> Request:
    request = Request(f"{tier.value}{num_tokens}", (2,) * num_tokens, SamplingParams(), tier=tier)
    assert kv.allocate_slots(request, num_tokens)
    return request


def test_blocks_are_handed_out_once_the_lowest_first() -> None:
    allocator = BlockPool(5)
    assert [allocator.allocate(2), allocator.allocate(0), allocator.allocate(3)] == [[0, 1], [], [2, 3, 4]]
    assert (allocator.num_free, allocator.num_used) == (0, 5)
    with pytest.raises(ValueError, match="1 blocks asked for, 0 of 5 free"):
        allocator.allocate(1)


@pytest.mark.parametrize("blocks", [[0], [1, 1], [7]], ids=["free", "twice at once", "of nobody"])
def test_a_block_that_is_not_handed_out_cannot_be_freed(blocks: list[int]) -> None:
    allocator = BlockPool(3)
    allocator.allocate(2)
    allocator.free([0])
    with pytest.raises(ValueError, match="freed twice"):
        allocator.free(blocks)


def test_tables_grow_by_whole_blocks_and_by_no_more_than_needed() -> None:
    kv = KVCacheManager(num_gpu_blocks=3, num_cpu_blocks=0, block_size=4)
    request = holding(kv, Tier.GPU, 5)
    assert (kv.num_held(request), request.num_kv_slots) == (2, 8)
    assert kv.allocate_slots(request, 8) and kv.num_held(request) == 2
    assert kv.allocate_slots(request, 9) and kv.num_held(request) == 3
    assert not kv.allocate_slots(request, 13) and kv.num_held(request) == 3


@pytest.mark.parametrize("tier", Tier)
def test_a_block_lost_from_either_tier_is_noticed(tier: Tier) -> None:
    kv = KVCacheManager(num_gpu_blocks=4, num_cpu_blocks=4, block_size=4)
    for each in Tier:
        holding(kv, each, 6)
    kv.check_blocks()
    kv.block_pools[tier].num_blocks += 1
    with pytest.raises(AssertionError):
        kv.check_blocks()


def test_a_block_that_no_table_lists_is_noticed() -> None:
    kv = KVCacheManager(num_gpu_blocks=4, num_cpu_blocks=4, block_size=4)
    request = holding(kv, Tier.GPU, 6)
    kv.block_tables[request.request_id].pop()
    with pytest.raises(AssertionError, match="a block is lost"):
        kv.check_blocks()
