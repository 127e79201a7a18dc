"""Room in a tier of several pools: a request has all of its blocks in one of them."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.request import Request, Tier
from swiftllm.kv.allocator import BlockPool
from swiftllm.kv.blocks import KVCacheManager


class Fetches:
    """The requests of other hosts whose blocks are fetched before they move to the GPU. They are idle until then.

    A host that does not answer holds up these requests, and no iteration.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._before: dict[str, tuple[int, ...]] = {}  # by request, those that the last plan asked for
        self._now: dict[str, tuple[int, ...]] = {}

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._now

    def __len__(self) -> int:
        return len(self._now)

    def give_up(self, request: Request) -> None:
        """The request loses its blocks."""
        for asked in (self._before, self._now):
            if (blocks := asked.pop(request.request_id, None)) is not None:
                self._drop(blocks)

    def begin_plan(self) -> None:
        """What the last plan did not ask for is given up."""
        for request_id in self._before.keys() - self._now.keys():
            self._drop(self._before[request_id])
        self._before, self._now = self._now, {}

    def _drop(self, blocks: Sequence[int]) -> None:
        fetcher = self._kv.host_pools.fetcher
        assert fetcher is not None, "blocks that nobody has asked for"
        fetcher.drop_fetched(blocks)

    def are_here(self, request: Request) -> bool:
        """Whether the blocks of an idle request of the CPU tier are on this host. If not, they are asked for."""
        of_hosts = self._kv.host_pools
        if of_hosts.fetcher is None or self._kv.pool_of(request) is of_hosts.pools[0]:
            return True
        blocks = self._now[request.request_id] = tuple(self._kv.block_tables[request.request_id])
        if self._before.get(request.request_id) == blocks:
            return of_hosts.fetcher.has_fetched(blocks)
        of_hosts.fetcher.fetch(blocks)
        return False


def pool_has_room(kv: KVCacheManager, pool: BlockPool, num_blocks: int, without: Sequence[Request]) -> bool:
    """Whether the pool, once its requests ``without`` are gone, can take ``num_blocks`` and the next token of each
    request in it."""
    gone = [request for request in without if kv.pool_of(request) is pool]
    reserved = kv.groups.growth * (pool.num_tables - len(gone))
    return num_blocks + reserved <= pool.num_free + kv.num_freed_with(gone)


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
