"""The prefix cache's bookkeeping: names, holders, eviction, copies between the tiers, and what it costs."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Callable

import pytest

from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.block_pool import BlockPool
from swiftllm.kv.kv_cache_manager import BlockHashes, KVCacheManager

GPU, CPU = Tier
SIZE = 4


def request_of(
    kv: KVCacheManager, tokens: list[int], tier: Tier = GPU, salt: str | None = None, name: str = "r"
) -> Request:
    request = Request(f"{name}{id(tokens)}", tuple(tokens), SamplingParams(max_tokens=100), tier=tier, cache_salt=salt)
    kv.hash_prompt(request)
    return request


def compute(kv: KVCacheManager, request: Request) -> Request:
    """Start a request and compute its prompt."""
    kv.start(request, request.num_tokens)
    request.num_uncomputed = 0
    kv.publish(request)
    return request


def test_a_name_stands_for_all_tokens_before_it_the_salt_and_the_engine() -> None:
    own = BlockHashes(SIZE)

    def names_of(tokens: list[int], salt: str | None = None, of: BlockHashes = own) -> list[bytes]:
        request = Request("r", tuple(tokens), SamplingParams(), cache_salt=salt, block_hashes=[])
        of.extend(request, len(tokens) // SIZE)
        return request.block_hashes

    text = list(range(12))
    names = names_of(text)
    assert names == names_of(text) and len(set(names)) == 3
    assert names_of(text[:11]) == names[:2]
    assert names_of([9, *text[1:]])[1:] != names[1:], "the first block is part of every later name"
    assert names_of(text[4:])[0] != names[1], "the same tokens at another place"
    others = [names_of(text, ""), names_of(text, "a"), names_of(text, "b"), names_of(text, of=BlockHashes(SIZE))]
    assert len({*names, *(name for other in others for name in other)}) == 15


def test_names_are_the_same_whether_made_at_once_or_as_tokens_come() -> None:
    names, tokens = BlockHashes(SIZE), list(range(40))
    at_once = Request("a", tuple(tokens), SamplingParams(), block_hashes=[])
    names.extend(at_once, 10)
    growing = Request("b", tuple(tokens[:6]), SamplingParams(), block_hashes=[])
    for count in range(1, 11):
        growing.output_token_ids[:] = tokens[6 : max(6, SIZE * count)]
        names.extend(growing, count)
    assert growing.block_hashes == at_once.block_hashes


def test_the_least_recently_used_blocks_go_first_and_of_a_request_the_last() -> None:
    kv = KVCacheManager(9, 0, SIZE, cached_tiers=[GPU])
    first, second = (compute(kv, request_of(kv, [i, *range(15)])) for i in (100, 200))
    kv.free_blocks(first)
    kv.free_blocks(second)
    assert kv.num_cached[GPU] == 8
    compute(kv, request_of(kv, [300] * 12))  # the free block, and the last two of the first request
    assert [kv.num_findable(request) for request in (first, second)] == [2, 3]
    pool = kv.block_pools[GPU]
    assert [pool.find(name) is not None for name in first.block_hashes] == [True, True, False, False]
    kv.check_blocks()


def test_a_hit_makes_a_prefix_the_most_recently_used() -> None:
    kv = KVCacheManager(8, 0, SIZE, cached_tiers=[GPU])
    requests = [compute(kv, request_of(kv, [i, *range(15)])) for i in (100, 200)]
    for request in requests:
        kv.free_blocks(request)
    again = compute(kv, request_of(kv, [100, *range(15)]))
    assert (kv.num_held(again), again.num_hashed) == (4, 4)
    kv.free_blocks(again)
    compute(kv, request_of(kv, [300] * 13))  # 4 blocks: none of the first three
    pool = kv.block_pools[GPU]
    assert [pool.find(name) is not None for name in requests[0].block_hashes[:3]] == [True] * 3
    assert kv.num_findable(requests[1]) == 0


def test_shared_blocks_have_several_holders_and_take_no_room() -> None:
    kv = KVCacheManager(8, 0, SIZE, cached_tiers=[GPU])
    first = compute(kv, request_of(kv, list(range(18))))
    second = request_of(kv, list(range(20)))
    second.tier = None  # it waits
    assert (kv.num_findable(second), kv.num_shared(second, GPU)) == (4, 4)
    assert kv.num_free(GPU) == 3
    second.tier = GPU
    compute(kv, second)
    assert kv.num_free(GPU) == 2
    assert kv.block_tables[first.request_id][:4] == kv.block_tables[second.request_id][:4]
    assert kv.num_freed_with([first]) == 1 and kv.num_freed_with([first, second]) == 6
    kv.free_blocks(first)
    assert kv.num_free(GPU) == 3 and kv.num_cached[GPU] == 0, "the second holds them still"
    kv.free_blocks(second)
    assert (kv.num_free(GPU), kv.num_cached[GPU]) == (8, 5)
    kv.check_blocks()


def saving_at_most(most: int) -> Callable[[Tier, int], bool]:
    """``copying_pays`` of a plan that may save so many blocks."""
    return lambda source, num_blocks: source is CPU or num_blocks <= most


def test_a_prefix_of_the_other_tier_is_copied_before_anything_can_take_it() -> None:
    """The CPU tier is full with the prefix alone, so making room on the GPU finds no room there."""
    kv = KVCacheManager(4, 3, SIZE, cached_tiers=tuple(Tier))
    kv.free_blocks(compute(kv, request_of(kv, list(range(12)), CPU)))
    kv.free_blocks(compute(kv, request_of(kv, [50] * 16)))
    kv.begin_plan()
    request = request_of(kv, list(range(14)))
    kv.start(request, 14)
    into = [swap for swap in kv.swaps if swap.source is CPU]
    assert len(into) == 1 and into[0].target_blocks == tuple(kv.block_tables[request.request_id][:3])
    assert len(kv.swaps) == 1, "what the GPU evicts has no room"
    assert request.num_uncomputed == 2 and request.cached_tokens == {GPU: 0, CPU: 12}
    assert not kv.may_move_out(request), "its blocks are there when the iteration has begun"
    kv.begin_plan()
    assert kv.may_move_out(request)
    kv.check_blocks()


def test_evicted_blocks_go_to_the_cpu_tier_as_many_as_copying_pays_for() -> None:
    """Those of a plan count together, and of too many the beginnings stay."""
    kv = KVCacheManager(6, 8, SIZE, cached_tiers=tuple(Tier))
    old = compute(kv, request_of(kv, list(range(24))))
    kv.free_blocks(old)
    kv.copying_pays = lambda source, num_blocks: num_blocks <= 3
    kv.begin_plan()
    for tokens in ([70] * 8, [71] * 16):
        compute(kv, request_of(kv, tokens))
    assert [(swap.request, swap.source, len(swap.source_blocks)) for swap in kv.swaps] == [
        (None, GPU, 2),
        (None, GPU, 1),
    ]
    local = kv.block_pools[CPU]
    assert [local.find(name) is not None for name in old.block_hashes] == [True, False, False, False, True, True]
    assert kv.num_cached == {GPU: 0, CPU: 3} and kv.num_free(CPU) == 8
    kv.check_blocks()


def test_a_prompt_that_takes_the_whole_gpu_tier_saves_all_that_lies_there() -> None:
    kv = KVCacheManager(300, 400, SIZE, cached_tiers=tuple(Tier))
    old = compute(kv, request_of(kv, list(range(1200))))
    kv.free_blocks(old)
    kv.begin_plan()
    compute(kv, request_of(kv, [70] * 1200))
    assert sum(len(swap.source_blocks) for swap in kv.swaps) == 300
    assert all(kv.block_pools[CPU].find(name) is not None for name in old.block_hashes)
    kv.check_blocks()


def test_a_move_shares_what_the_other_tier_has_and_copies_the_rest() -> None:
    kv = KVCacheManager(8, 8, SIZE, cached_tiers=tuple(Tier))
    kv.free_blocks(compute(kv, request_of(kv, list(range(9)), CPU)))
    request = compute(kv, request_of(kv, [*range(8), 60, 61, 62, 63, 64]))
    kv.begin_plan()
    kv.copying_pays = lambda source, count: False
    kv.move_blocks(request, CPU)
    (swap,) = kv.swaps
    assert len(swap.source_blocks) == 2 and swap.request is request
    assert kv.num_cached == {GPU: 3, CPU: 0}
    kv.check_blocks()


def test_copies_that_may_have_failed_are_forgotten() -> None:
    kv = KVCacheManager(8, 8, SIZE, cached_tiers=tuple(Tier))
    kv.free_blocks(compute(kv, request_of(kv, list(range(9)), CPU)))
    kv.begin_plan()
    request = request_of(kv, list(range(12)))
    kv.start(request, 12)
    kv.free_blocks(request)
    assert kv.num_cached == {GPU: 2, CPU: 2}
    for swap in kv.swaps:
        kv.forget_copies(swap)
    assert kv.num_cached == {GPU: 0, CPU: 2} and kv.num_free(GPU) == 8
    kv.check_blocks()


@pytest.mark.parametrize("hosts", [(), (9, 12)], ids=["one host", "three hosts"])
def test_random_operations(hosts: tuple[int, ...]) -> None:
    """30,000 of them: every block is free, held or cached, and what a block holds is what its name stands for."""
    rng, running, texts = random.Random(1), [], [[7] * 9]
    kv = KVCacheManager(24, 30, SIZE, hosts, cached_tiers=tuple(Tier))
    content: dict[tuple[Tier, int], tuple] = {}
    counts: Counter[str] = Counter()

    def swap() -> None:
        arriving: set[int] = set()
        for each in kv.swaps:
            for source, target in zip(each.source_blocks, each.target_blocks, strict=True):
                assert each.source is CPU or source not in arriving
                arriving.update([target] if each.source is CPU else [])
                content[each.source.other, target] = content[each.source, source]
                counts["copied", each.source] += 1

    def write(request: Request, start: int) -> None:
        table = kv.block_tables[request.request_id]
        for place in range(start // SIZE, -(-request.num_tokens // SIZE)):
            assert kv.pool_of(request).num_holders(table[place]) == 1
            text = request.token_ids(0, min(request.num_tokens, (place + 1) * SIZE))
            content[request.tier, table[place]] = (request.cache_salt, *text)

    for step in range(30_000):
        kv.begin_plan()
        kv.copying_pays = saving_at_most(rng.choice((0, 1, 100)))
        kind = rng.random()
        if kind < 0.3 and len(running) < 8:
            text = [*rng.choice(texts)[: rng.randrange(40)], *(rng.randrange(9) for _ in range(rng.randrange(1, 12)))]
            request = request_of(kv, text, rng.choice(tuple(Tier)), rng.choice((None, "a")), f"{step}-")
            if any(pool.num_free >= kv.blocks_for(len(text)) for pool in kv.pools(request.tier)):
                kv.start(request, len(text))
                swap()
                found = request.num_computed_tokens
                counts["found"] += found
                for place in range(found // SIZE):
                    block = kv.block_tables[request.request_id][place]
                    assert content[request.tier, block] == (request.cache_salt, *text[: (place + 1) * SIZE])
                write(request, found)
                request.num_uncomputed = 0
                kv.publish(request)
                running.append(request)
        elif kind < 0.65 and running:
            request = rng.choice(running)
            if request.num_tokens < request.num_kv_slots or kv.pool_of(request).num_free:
                request.append_token(rng.randrange(9), 0.0)
                assert kv.allocate_slots(request, request.num_tokens)
                swap()
                write(request, request.num_tokens - 1)
        elif kind < 0.75 and running:
            request = rng.choice(running)
            target = request.tier.other
            if any(pool.num_free >= kv.num_held(request) for pool in kv.pools(target)):
                kv.move_blocks(request, target)
                swap()
        elif kind < 0.9995 and running:
            request = running.pop(rng.randrange(len(running)))
            texts = [*texts[-20:], request.token_ids(0, request.num_tokens)]
            kv.free_blocks(request)
        elif kind >= 0.9995:
            kv.reset_cache()
        if step % 20 == 0:
            kv.check_blocks()
    assert counts["found"] > 3000 and counts["copied", GPU] > 300 and counts["copied", CPU] > 300


def test_a_million_names_take_little_memory() -> None:
    """At most 150 bytes each, the name itself included. An eighth of a million fill their table as far."""
    count = 1_000_000 // 8
    tracemalloc.start()
    try:
        plain = BlockPool(count)
        plain.free(plain.allocate(count))
        before, _ = tracemalloc.get_traced_memory()
        pool = BlockPool(count, caches=True)
        blocks = pool.allocate(count)
        for block in blocks:
            pool.add_hash(block, block.to_bytes(32, "big"))
        pool.free(blocks)
        del blocks
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    bytes_each = (after - before) / count
    assert pool.num_cached == count
    of_allocator = before / count
    assert bytes_each - of_allocator <= 150, f"{bytes_each:.0f} bytes for each name, of which {of_allocator:.0f} anyway"
    assert plain.num_free == count


def test_a_prompt_under_way_shares_no_more_than_it_has_computed() -> None:
    """Others may hold all of its prefix on the GPU; a move shares its computed blocks and needs room for the rest."""
    kv = KVCacheManager(8, 8, SIZE, cached_tiers=tuple(Tier))
    text = list(range(16))
    behind = request_of(kv, text, CPU)
    kv.start(behind, 16)
    behind.num_uncomputed = 10  # 6 tokens are computed: one full block
    compute(kv, request_of(kv, text, name="other"))
    assert kv.num_shared(behind, GPU) == 1
    kv.begin_plan()
    kv.move_blocks(behind, GPU)
    assert kv.num_free(GPU) == 8 - 4 - 3
    kv.check_blocks()


def test_blocks_that_a_swap_of_this_plan_fills_are_no_source_of_another() -> None:
    """Else a host would be asked for a copy of what is still on its way from it."""
    kv, prefix = KVCacheManager(8, 6, SIZE, cached_tiers=tuple(Tier)), list(range(12))
    kv.free_blocks(compute(kv, request_of(kv, prefix, CPU)))
    kv.begin_plan()
    kv.start(request_of(kv, [*prefix, 50, 51], name="copied to the GPU"), 14)
    passing = request_of(kv, [60] * 24, CPU)
    kv.start(passing, 24)  # takes all blocks of the CPU tier, the prefix's too
    kv.free_blocks(passing)
    late = request_of(kv, [*prefix, 70, 71], CPU, name="late")
    kv.start(late, 14)
    assert [(swap.source, len(swap.source_blocks)) for swap in kv.swaps] == [(CPU, 3)]
    assert late.num_uncomputed == 14
    kv.begin_plan()
    kv.free_blocks(late)
    late = request_of(kv, [*prefix, 70, 71], CPU, name="later")
    kv.start(late, 14)
    assert [(swap.source, len(swap.source_blocks)) for swap in kv.swaps] == [(GPU, 3)]
    assert late.num_uncomputed == 2
    kv.check_blocks()


def test_a_request_enters_the_pool_that_has_most_of_its_prefix() -> None:
    kv, prefix = KVCacheManager(0, 8, SIZE, (8, 8), cached_tiers=tuple(Tier)), list(range(12))
    blocker = compute(kv, request_of(kv, [90] * 25, CPU, name="fills this host"))
    there = compute(kv, request_of(kv, [*prefix, 1, 1], CPU, name="goes to another host"))
    pool = kv.pool_of(there)
    assert pool is not kv.pool_of(blocker)
    kv.free_blocks(blocker)
    kv.free_blocks(there)
    again, other = request_of(kv, [*prefix, 2, 2], CPU, name="again"), request_of(kv, [80] * 13, CPU, name="other")
    for request in (again, other):
        compute(kv, request)
    assert kv.pool_of(again) is pool and again.cached_tokens == {CPU: 12, GPU: 0}
    assert kv.pool_of(other) is kv.pools(CPU)[0]


@pytest.mark.parametrize("tier", Tier)
def test_whether_copying_pays_is_asked_of_the_tier_that_is_read(tier: Tier) -> None:
    kv, text, asked = KVCacheManager(8, 8, SIZE, cached_tiers=tuple(Tier)), list(range(14)), []
    kv.free_blocks(compute(kv, request_of(kv, text, tier)))
    kv.copying_pays = lambda source, num_blocks: asked.append((source, num_blocks)) or False
    request = compute(kv, request_of(kv, text, tier.other))
    assert asked == [(tier, 3)] and request.cached_tokens is None and not kv.swaps


def test_what_a_swap_of_this_plan_fills_is_not_saved_when_it_is_evicted() -> None:
    """The block is on its way from the CPU tier, whose own copy may be gone by then; it is not there to be read yet."""
    kv, prefix = KVCacheManager(4, 6, SIZE, cached_tiers=tuple(Tier)), list(range(12))
    kv.free_blocks(compute(kv, request_of(kv, prefix, CPU)))
    kv.begin_plan()
    arriving = request_of(kv, [*prefix, 50, 51])
    kv.start(arriving, 14)
    kv.free_blocks(arriving)
    passing = request_of(kv, [60] * 24, CPU)
    kv.start(passing, 24)  # takes all blocks of the CPU tier, the prefix's too
    kv.free_blocks(passing)
    kv.start(request_of(kv, [70] * 16, name="evicts"), 16)
    assert [(swap.source, len(swap.source_blocks)) for swap in kv.swaps] == [(CPU, 3)]
    kv.check_blocks()
