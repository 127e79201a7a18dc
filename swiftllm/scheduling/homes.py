"""Room in a tier of several pools: a request has all of its blocks in one of them."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.request import Request, Tier
from swiftllm.kv.blocks import BlockAllocator, KVCacheManager


def pool_has_room(kv: KVCacheManager, pool: BlockAllocator, num_blocks: int, without: Sequence[Request]) -> bool:
    """Whether the pool, once its requests ``without`` are gone, can take ``num_blocks`` and one more block for each
    request in it."""
    gone = [request for request in without if kv.pool_of(request) is pool]
    reserved = pool.num_tables - len(gone)
    return num_blocks + reserved <= pool.num_free + sum(map(kv.num_held, gone))


def victims_for(kv: KVCacheManager, num_blocks: int, evictable: Sequence[Request]) -> list[Request] | None:
    """The requests to evict, of those that may be, the last ones first, so that some pool of the CPU tier can take
    ``num_blocks``. A request of another pool frees nothing there. None: no pool can."""
    pools = kv.pools(Tier.CPU)
    if any(pool.num_free >= num_blocks for pool in pools):
        return []
    for pool in pools:
        missing, victims = num_blocks - pool.num_free, []
        for victim in reversed(evictable):
            if missing > 0 and kv.pool_of(victim) is pool:
                victims.append(victim)
                missing -= kv.num_held(victim)
        if missing <= 0:
            return victims
    return None
