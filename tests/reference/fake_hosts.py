"""Hosts that hold parts of the fake backend's CPU tier, and die when they are told to, with all that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, Tier
from swiftllm.engine.backend import HostDied
from swiftllm.kv.block_pool import HostPools
from tests.reference.fake_backend import FakeBackend, FakeBatch, FakeFuture


class FakeHosts:
    """See :class:`swiftllm.engine.engine.HostWatch`. ``plan_death`` lets a host die after some more operations."""

    def __init__(self, hosts: HostPools) -> None:
        self.host_pools = hosts
        self.dead: set[int] = set()
        self._told: set[int] = set()
        self._deaths: dict[int, int] = {}

    def plan_death(self, host: int, operations: int) -> None:
        if host not in self.dead:
            self._deaths.setdefault(host, operations)

    def revive(self, host: int) -> None:
        """A host in the place of one whose death the engine has been told of."""
        if host in self._told:
            self.dead.discard(host)

    def touch(self, backend: BackendOfHosts, block: int, *, swaps_incomplete: bool = False) -> None:
        """An operation on a block: the host may die in it."""
        pools = self.host_pools.pools
        host = pools.index(self.host_pools.pool_of(block))
        if host in self._deaths:
            self._deaths[host] -= 1
            if self._deaths[host] <= 0:
                del self._deaths[host]
                self.dead.add(host)
                backend.lose_blocks(self.host_pools, host)
        if host in self.dead:
            raise HostDied(f"host {host} died", swaps_incomplete=swaps_incomplete)

    def take_died(self) -> list[int]:
        died = sorted(self.dead - self._told)
        self._told |= self.dead
        return died

    def take_returned(self) -> list[int]:
        returned = sorted(self._told - self.dead)
        self._told -= set(returned)
        return returned

    @property
    def num_connected(self) -> int:
        return len(self.host_pools.pools) - 1 - len(self.dead)


class BackendOfHosts(FakeBackend):
    """Every operation on a block of the CPU tier may find its host dead."""

    def __init__(self, hosts: FakeHosts, num_layers: int, seed: int) -> None:
        super().__init__(num_layers, seed=seed)
        self.hosts = hosts

    def lose_blocks(self, hosts: HostPools, host: int) -> None:
        pool = hosts.pools[host]
        blocks = range(pool.first, pool.first + pool.num_blocks)
        self.slots = {slot: note for slot, note in self.slots.items() if slot[0] is Tier.GPU or slot[1] not in blocks}

    def attend(self, request: Request, tier: Tier, layer: int, table: list[int], upto: int | None = None) -> None:
        if tier is Tier.CPU:
            self.hosts.touch(self, table[0])
        super().attend(request, tier, layer, table, upto)

    def swap(self, swaps: Sequence[Swap]) -> None:
        for swap in swaps:
            for block in (swap.source_blocks if swap.source is Tier.CPU else swap.target_blocks)[:1]:
                self.hosts.touch(self, block, swaps_incomplete=True)
            super().swap([swap])

    def submit_cpu_attention(self, layer: int, cpu_batch: FakeBatch) -> FakeFuture:
        for request in cpu_batch.requests:
            self.hosts.touch(self, cpu_batch.tables[request.request_id][0])
        return super().submit_cpu_attention(layer, cpu_batch)
