"""Room in pools of several hosts, and what a plan does not know that is made beside an iteration."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.kv_cache_manager import Fetches, KVCacheManager, pool_has_room, victims_for
from swiftllm.scheduling.state import LookAhead

SIZE = 4


def started(kv: KVCacheManager, name: str, blocks: int, tier: Tier = Tier.CPU) -> Request:
    request = Request(name, (1,) * (SIZE * blocks), SamplingParams(max_tokens=9), tier=tier)
    kv.start(request, request.num_tokens)
    return request


def test_a_pool_has_room_beside_the_next_token_of_each_request_that_stays() -> None:
    kv = KVCacheManager(0, 8, SIZE)
    goes, stays = started(kv, "goes", 3), started(kv, "stays", 2)
    (pool,) = kv.pools(Tier.CPU)
    for without, most in (([], 8 - 5 - 2), ([goes], 8 - 2 - 1), ([goes, stays], 8)):
        assert pool_has_room(kv, pool, most, without) and not pool_has_room(kv, pool, most + 1, without)


def test_who_makes_room_in_a_pool_is_in_that_pool() -> None:
    """The last ones first, and no more of them than it takes; pools in the order in which they are filled."""
    kv = KVCacheManager(0, 6, SIZE, (6, 6))
    requests = [started(kv, str(number), 2) for number in range(9)]
    pools = [kv.pool_of(request) for request in requests]
    assert len(set(map(id, pools))) == 3 and not any(pool.num_free for pool in kv.pools(Tier.CPU))
    victims = victims_for(kv, 3, requests)
    first = kv.pools(Tier.CPU)[0]
    assert victims == [request for request in reversed(requests) if kv.pool_of(request) is first][:2]
    only = [request for request in requests if kv.pool_of(request) is not first][:1]
    assert victims_for(kv, 2, only) == only and victims_for(kv, 3, only) is None
    kv.free_blocks(requests[-1])
    assert victims_for(kv, 2, requests[:-1]) == []


class Fetcher:
    """Fetches at once, and notes what is asked for and what is dropped."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.dropped: list[tuple[int, ...]] = []

    def fetch(self, blocks: Sequence[int]) -> None:
        self.asked.append(tuple(blocks))

    def has_fetched(self, blocks: Sequence[int]) -> bool:
        return tuple(blocks) in self.asked

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        self.dropped.append(tuple(blocks))


def test_what_a_plan_does_not_ask_for_again_is_dropped_and_nothing_else() -> None:
    kv = KVCacheManager(0, 1, SIZE, (8,))
    fetcher = kv.host_pools.fetcher = Fetcher()
    wanted, unwanted = started(kv, "wanted", 3), started(kv, "unwanted", 2)
    first, second = (tuple(kv.block_tables[name]) for name in ("wanted", "unwanted"))
    fetches = Fetches(kv)
    assert not fetches.are_here(wanted) and not fetches.are_here(unwanted)
    fetches.begin_plan()
    assert fetches.are_here(wanted) and fetcher.dropped == []
    fetches.begin_plan()
    assert fetcher.dropped == [second]
    fetches.give_up(wanted)
    fetches.begin_plan()
    assert fetcher.dropped == [second, first] and fetcher.asked == [first, second]


def test_beside_an_iteration_a_plan_knows_neither_arrivals_nor_ends() -> None:
    kv = KVCacheManager(8, 0, SIZE)
    ahead, ended, new = LookAhead(kv), started(kv, "ended", 3, Tier.GPU), Request("new", (1,), SamplingParams())
    ahead.arrives(new)
    ahead.ends(ended)
    ahead.begin_plan(is_running=True)
    assert not ahead.knows(new) and ahead.num_seats == 1 and kv.num_free(Tier.GPU) == 5
    ahead.begin_plan(is_running=True)
    assert ahead.knows(new) and ahead.num_seats == 0 and kv.num_free(Tier.GPU) == 8


def test_an_idle_engine_knows_all() -> None:
    kv = KVCacheManager(8, 0, SIZE)
    ahead, ended, new = LookAhead(kv), started(kv, "ended", 3, Tier.GPU), Request("new", (1,), SamplingParams())
    ahead.arrives(new)
    ahead.ends(ended)
    ahead.begin_plan(is_running=False)
    assert ahead.knows(new) and ahead.num_seats == 0 and kv.num_free(Tier.GPU) == 8
