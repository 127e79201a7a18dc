"""Blocks and block tables of layers with attention windows, against a ring that is written token by token."""

from __future__ import annotations

import random
import sys

import pytest

from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.kv_cache_manager import KVCacheManager

WINDOWS = ((None,), (8,), (8, None) * 2, (None, None, 7, 7), (1, None), (5, 17), (2, None, 33), (16, 17), (129, None))
CHUNK = 48


def some_groups() -> list[LayerGroups]:
    return [LayerGroups(size, windows) for size in (1, 4, 16) for windows in WINDOWS]


def test_tables_lead_to_the_tokens_that_windows_reach() -> None:
    """Prompts of one chunk and of several, then decodes; a token overwrites what its slot held."""
    draw = random.Random(0)
    for groups in some_groups():
        size, pool, slots, chunk = groups.block_size, list(range(1000)), {}, draw.choice([1, 5, CHUNK])
        draw.shuffle(pool)
        blocks, start = [], 0
        while start < 150:
            end = start + (chunk if start < 90 else 1)
            while len(blocks) < groups.blocks_for(end):
                blocks.append(pool.pop())
            tables = groups.tables([blocks], [end])[:, 0]
            for group, window in enumerate(groups.windows):
                reached = groups.first_reached(group, start)
                assert reached % size == 0 and reached <= max(0, start + 1 - (window or start + 1))
                for token in range(reached, start):  # gathered before the chunk is stored
                    assert slots[tables[group, token // size], token % size] == (group, token)
                kept = range(max(start, groups.first_kept(group, end)), end)
                own = [(tables[group, token // size], token % size) for token in kept]
                assert len(set(own)) == len(own), "two tokens of a chunk in one slot"
                slots |= {slot: (group, token) for slot, token in zip(own, kept, strict=True)}
                for token in range(max(0, end - (window or end)), end):  # as a decode finds them
                    assert slots[tables[group, token // size], token % size] == (group, token)
            start = end


def test_the_blocks_of_a_request_only_grow_and_are_as_few_as_windows_need() -> None:
    for groups in some_groups():
        size, counts = groups.block_size, [groups.blocks_for(n) for n in range(400)]
        for n in range(1, 400):
            assert 0 <= counts[n] - counts[n - 1] <= groups.growth
            assert counts[n] == len({*groups.tables([range(counts[n])], [n]).flatten()})
            assert groups.slots(n) <= counts[n] * size < groups.slots(n) + groups.growth * size
        for num_blocks in range(60):
            most = groups.tokens_in(num_blocks)
            if most == sys.maxsize:
                assert groups.blocks_for(10**9) <= num_blocks
            else:
                assert groups.blocks_for(most) <= num_blocks < groups.blocks_for(most + 1)
        for window, ring in zip(groups.windows, groups.rings, strict=True):
            assert window is None or ring <= (window + CHUNK) / size + 2


def test_an_eighth_of_a_long_context_is_held_for_windowed_layers_of_gpt_oss() -> None:
    """KV bytes at 8,000 tokens, with 12 of 24 layers of a window of 128, over those of a model without windows."""
    groups, plain = LayerGroups(16, (128, None) * 12), LayerGroups(16, (None,) * 24)
    per_block = groups.pool_layers / plain.pool_layers
    share = groups.blocks_for(8000) * per_block / plain.blocks_for(8000)
    assert share == (500 + 9) / 2 / 500 and share <= 0.52


def test_the_manager_counts_with_windows() -> None:
    groups = LayerGroups(4, (8, None))
    kv = KVCacheManager(40, 40, 4, groups=groups)
    requests = [Request(str(n), (2,) * n, SamplingParams(), tier=Tier.GPU) for n in (3, 12, 30)]
    for request in requests:
        assert kv.allocate_slots(request, request.num_tokens)
        assert kv.num_held(request) == groups.blocks_for(request.num_tokens)
    held = [kv.num_held(request) for request in requests]
    assert held == [2, 6, 8 + 3] and kv.num_free(Tier.GPU) == 40 - sum(held)
    slots = [request.num_kv_slots for request in requests]
    assert kv.allocate_block_each(requests, Tier.GPU)  # two blocks, then one, since a ring of three is whole
    assert [kv.num_held(request) for request in requests] == [4, 7, 12]
    assert [request.num_kv_slots for request in requests] == [n + 4 for n in slots]
    kv.move_blocks(requests[2], Tier.CPU)
    assert len(kv.swaps[0].source_blocks) == 12 and kv.num_held(requests[2]) == 12
    kv.check_blocks()
    full = Request("full", (2,) * 105, SamplingParams(), tier=Tier.GPU)
    assert not kv.allocate_slots(full, 105) and kv.num_held(full) == 0  # 27 + 3 of 29
    for request in requests:
        kv.free_blocks(request)
    assert all(kv.num_free(tier) == 40 for tier in Tier)


def test_prefixes_of_rings_are_not_cached() -> None:
    with pytest.raises(AssertionError):
        KVCacheManager(4, 4, 4, cached_tiers=(Tier.GPU,), groups=LayerGroups(4, (8, None)))
