"""Block tables of the requests, and the prefix cache, in both tiers. Pure bookkeeping, no tensors.

A request that starts holds the cached blocks of its tokens: those of its tier are shared, those of the other tier are
copied to its own. Full blocks never change, and the last block, which is not full, is always a request's own. Where
layers have attention windows, blocks are overwritten (:mod:`swiftllm.kv.block_pool`), and no prefix is cached.

Blocks are copied between the tiers for two reasons, both by swaps of a plan. *Moves* take all blocks of a request to
the tier where it goes on. *Prefix copies* take cached blocks of no single request: those that a starting request finds
in the other tier, and those that the GPU tier is about to reuse. ``copying_pays`` limits prefix copies alone.

In models with linear attention a prefix is worth nothing without the state after it. States of requests are in slots on
the device, and :class:`~swiftllm.kv.block_pool.Snapshots` of them in host memory. So a request finds the blocks up to
the last one at whose end there is a snapshot. It begins with that, and computes all that comes behind, cached or not.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from itertools import chain, islice

from swiftllm.core.plan import StateCopy, Swap
from swiftllm.core.request import Request, Tier
from swiftllm.kv.block_pool import BlockPool, HostPools, LayerGroups, Snapshots, StateSlots

# -- block hashes ------------------------------------------------------------------------------------------------------
# Hashes of full KV blocks: two blocks have one hash only if they hold K and V of the same tokens at the same place.
#
# A hash is the SHA-256 of the hash before it and of the block's token ids, so it stands for all tokens up to the
# block's end. The chain begins at a secret of the process and the request's ``cache_salt``. So nobody outside can
# compute a hash, or find two texts with one, and requests with different salts never share a block. Weights and formats
# of the tiers are those of one engine, which has a secret of its own. Where the CPU tier is int8, blocks of one hash
# may differ in the bits that its codes lose: one that comes back from there holds elements made of codes.


class BlockHashes:
    """Makes the hashes of one engine's blocks of ``block_size`` tokens. :meth:`extend` may be called on any thread."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(32)

    def _root(self, salt: str | None) -> bytes:
        return sha256(self._secret + (b"" if salt is None else b"\0" + salt.encode("utf-8", "surrogatepass"))).digest()

    def extend(self, request: Request, num_blocks: int) -> None:
        """Add to ``request.block_hashes`` until there are so many. All tokens of these blocks must be known."""
        block_hashes, size = request.block_hashes, self._block_size
        assert block_hashes is not None, "a request that has no part in the cache"
        first = len(block_hashes)
        if first >= num_blocks:
            return
        tokens = memoryview(array("i", request.token_ids(first * size, num_blocks * size)).tobytes())
        num_bytes = 4 * size
        block_hash = block_hashes[-1] if block_hashes else self._root(request.cache_salt)
        for start in range(0, len(tokens), num_bytes):
            block_hash = sha256(block_hash + tokens[start : start + num_bytes]).digest()
            block_hashes.append(block_hash)


# -- block tables and prefix cache -------------------------------------------------------------------------------------

LEAST_COMPUTED = 2
"""Tokens of a request that are computed at least when it starts, so that it starts as a prompt and not as a decode."""


class KVCacheManager:
    """Block tables of all requests that hold KV cache. A block holds ``block_size`` tokens in all layers of a group.

    The CPU tier may have several pools: this host's, and other hosts'. All blocks of a request are in one pool.

    Attributes:
        groups: the layers by their attention window.
        block_tables: of each request, in its tier.
        hashes: of full blocks; None without a prefix cache.
        swaps: copies for the plan being made, in order.
        state_copies: the same of states. Those that save are noted when an iteration has ended, for the next plan.
        copying_pays: whether so many cached blocks of a plan should be copied from the tier, or be computed again.
    """

    copying_pays: Callable[[Tier, int], bool] = staticmethod(lambda source, num_blocks: True)

    def __init__(
        self,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        host_blocks: Sequence[int] = (),
        cached_tiers: Collection[Tier] = (),
        groups: LayerGroups | None = None,
        state_slots: StateSlots | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """``host_blocks``: the blocks of each other host; their ids follow those of this host. ``cached_tiers``: where
        prefixes are cached. ``groups``: by default one whose layers attend to all tokens. ``state_slots``: of requests'
        states, in models with linear attention; these have a prefix cache with ``snapshots`` alone."""
        self.groups = groups or LayerGroups(block_size)
        self.state_slots, self.snapshots = state_slots, snapshots
        assert self.groups.are_exact or not cached_tiers, "blocks of a ring are overwritten"
        has_states = state_slots is None or snapshots is not None
        assert has_states or not cached_tiers, "K and V are worth nothing without the state after them"
        self.block_size = block_size
        self.hashes = BlockHashes(block_size) if cached_tiers else None
        self.host_pools = HostPools((num_cpu_blocks, *host_blocks), caches=Tier.CPU in cached_tiers)
        self._gpu_pool = gpu = BlockPool(num_gpu_blocks, caches=Tier.GPU in cached_tiers)
        local = self.host_pools.pools[0]
        self.block_pools: dict[Tier, BlockPool | HostPools] = {
            Tier.GPU: gpu,
            Tier.CPU: self.host_pools if host_blocks else local,
        }
        self._caching = [pool for pool in (gpu, *self.host_pools.pools) if pool.caches]
        if gpu.caches and local.caches:
            gpu.on_evict = self._save_evicted
        self.block_tables: dict[str, list[int]] = {}
        self.state_copies: list[StateCopy] = []
        self._saved_at: dict[str, tuple[int, ...]] = {}  # by request, after how many tokens of its prompt
        self._saved_last: dict[str, bytes] = {}  # by request, the last snapshot that its output has made
        self.begin_plan()

    def begin_plan(self) -> None:
        self.swaps: list[Swap] = []
        self._num_saved = 0  # cached GPU blocks that this plan copies to the CPU tier before they are reused
        self._arriving: set[int] = set()  # GPU blocks that the swaps of this plan fill

    @property
    def moves(self) -> list[Swap]:
        """The swaps of the plan being made by which requests move, all in one direction."""
        return [swap for swap in self.swaps if swap.request is not None]

    @property
    def move_source(self) -> Tier | None:
        """The tier that they leave."""
        return self.moves[0].source if self.moves else None

    def blocks_for(self, num_tokens: int) -> int:
        return self.groups.blocks_for(num_tokens)

    def _slots_for(self, num_tokens: int) -> int:
        """The tokens that the blocks for so many can hold."""
        return -(-num_tokens // self.block_size) * self.block_size

    def capacity(self, tier: Tier) -> int:
        """Blocks that a tier always has. Other hosts may go away, so theirs do not count."""
        return self.host_pools.pools[0].num_blocks if tier is Tier.CPU else self.block_pools[tier].num_blocks

    def pools(self, tier: Tier) -> Sequence[BlockPool]:
        """The pools of a tier in the order in which they are filled: this host, then the host with most free blocks."""
        pool = self.block_pools[tier]
        return pool.by_preference() if isinstance(pool, HostPools) else (pool,)

    def pool_of(self, request: Request) -> BlockPool:
        """The pool of a request that holds blocks."""
        assert request.tier is not None, "a waiting request"
        pool = self.block_pools[request.tier]
        if isinstance(pool, HostPools):
            return pool.pool_of(self.block_tables[request.request_id][0])
        return pool

    def num_free(self, tier: Tier) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self.block_pools[tier].num_free

    def num_held(self, request: Request) -> int:
        return len(self.block_tables.get(request.request_id, ()))

    def num_freed_with(self, requests: Sequence[Request]) -> int:
        """Blocks that come free with all of these requests of one tier. Others may share some of theirs."""
        if not self._caching:
            return sum(map(self.num_held, requests))
        holders: dict[BlockPool, Counter[int]] = {}
        for request in requests:
            if table := self.block_tables.get(request.request_id):
                holders.setdefault(self.pool_of(request), Counter()).update(table)
        return sum(
            count == pool.num_holders(block) for pool, counts in holders.items() for block, count in counts.items()
        )

    # -- blocks of requests -------------------------------------------------------------------------------------------

    def start(self, request: Request, num_tokens: int) -> None:
        """Give a request that enters its tier, which has room, blocks for ``num_tokens``: cached ones for the longest
        prefix of its tokens, and others. Its ``num_uncomputed`` tells how many tokens are left to compute."""
        tier = request.tier
        assert tier is not None, "a request that enters no tier"
        block_hashes, num_blocks = self.hashes_to_find(request), self.blocks_for(num_tokens)
        pool = self._pool_with_room(tier, num_blocks, block_hashes)
        here, there = self._longest_prefix(block_hashes, pool)
        source = self._other_pool(pool) if there else None
        # Hold what was found before anything is allocated: a cached block that nobody holds may be given away by that.
        # In the other tier too, since allocating GPU blocks may save evicted ones there (:meth:`_save_evicted`).
        pool.hold(here.values())
        if source is not None:
            source.hold(there.values())
        others = iter(pool.allocate(num_blocks - len(here)))
        table = [here[i] if i in here else next(others) for i in range(num_blocks)]
        if source is not None:
            # Findable at once: whoever finds these blocks in this plan reads them after its swaps.
            for i in there:
                pool.add_hash(table[i], block_hashes[i])
            self._swap(None, tier.other, list(there.values()), [table[i] for i in there])
            source.free(list(there.values()))  # may be reused in this plan: by swaps that come after this one
        pool.num_tables += 1
        found = len(here) + len(there)
        if self.state_slots is not None:
            slot = self.state_slots.take(request.request_id)
            self._start_from_snapshot(request, slot, block_hashes, found)
        self.block_tables[request.request_id] = table
        request.num_kv_slots, request.num_hashed = self._slots_for(num_tokens), found
        request.num_uncomputed = request.num_tokens - found * self.block_size
        if not request.output_len:  # what its user is told is what its first start found, not one after a preemption
            by_tier = {tier: len(here) * self.block_size, tier.other: len(there) * self.block_size}
            request.cached_tokens = by_tier if found else None

    def allocate_slots(self, request: Request, num_tokens: int) -> bool:
        """Extend the request's table in its tier to ``num_tokens`` in total. False, and no change: too few blocks."""
        if num_tokens <= request.num_kv_slots:
            return True
        missing = self.blocks_for(num_tokens) - self.blocks_for(request.num_kv_slots)
        table = self.block_tables.get(request.request_id)
        if table is None:
            assert request.tier is not None, "a waiting request"
            pool = self._pool_with_room(request.tier, missing)
        else:
            pool = self.pool_of(request)
        if missing > pool.num_free:
            return False
        if table is None:
            table = self.block_tables[request.request_id] = []
            pool.num_tables += 1
        table.extend(pool.allocate(missing))
        request.num_kv_slots = self._slots_for(num_tokens)
        return True

    def allocate_block_each(self, requests: Sequence[Request], tier: Tier) -> bool:
        """Give each of these requests of a tier room for ``block_size`` more tokens. False, and no change: too few
        blocks."""
        pool = self.block_pools[tier]
        missing = [self._growth_of(request) for request in requests]
        if isinstance(pool, HostPools):
            counts: Counter[BlockPool] = Counter()
            for request, count in zip(requests, missing, strict=True):
                counts[self.pool_of(request)] += count
            if any(count > pool.num_free for pool, count in counts.items()):
                return False
            return all(self.allocate_slots(request, request.num_kv_slots + self.block_size) for request in requests)
        if sum(missing) > pool.num_free:
            return False
        blocks = iter(pool.allocate(sum(missing)))
        for request, count in zip(requests, missing, strict=True):
            self.block_tables[request.request_id] += islice(blocks, count)
            request.num_kv_slots += self.block_size
        return True

    def _growth_of(self, request: Request) -> int:
        """The blocks of its next ``block_size`` tokens."""
        if self.groups.are_exact:
            return 1
        return self.blocks_for(request.num_kv_slots + self.block_size) - self.blocks_for(request.num_kv_slots)

    def move_blocks(self, request: Request, target: Tier) -> None:
        """Move a request's blocks to the other tier, which must have room: those that are cached there are shared, the
        others copied by a swap of this plan.

        The source blocks are free at once, since an iteration runs its swaps first, in order.
        """
        self.publish(request)  # what decodes have filled is not findable yet, and may be in the other tier already
        old_blocks, old_pool = self.block_tables[request.request_id], self.pool_of(request)
        new_pool = self._pool_with_room(target, len(old_blocks))
        block_hashes = self._computed_hashes(request) if new_pool.caches else ()
        shared = {
            i: block for i, block_hash in enumerate(block_hashes) if (block := new_pool.find(block_hash)) is not None
        }
        # As in :meth:`start`: hold before allocating. The old blocks are freed last, still findable where they were.
        new_pool.hold(shared.values())
        others = iter(new_pool.allocate(len(old_blocks) - len(shared)))
        new_blocks = [shared[i] if i in shared else next(others) for i in range(len(old_blocks))]
        self.block_tables[request.request_id] = new_blocks
        old_pool.free(old_blocks)
        old_pool.num_tables -= 1
        new_pool.num_tables += 1
        copied = [i for i in range(len(old_blocks)) if i not in shared]
        self._swap(request, target.other, [old_blocks[i] for i in copied], [new_blocks[i] for i in copied])
        # Findable in the new tier, too: both copies of a block have one hash, and either may be reused first.
        request.tier, request.num_hashed = target, 0
        self.publish(request)

    def drop_move(self, request: Request) -> None:
        """The request is about to lose its blocks. A move of this plan is not carried out, unless others may find the
        blocks that it fills."""
        if self.hashes is None:
            self.swaps = [swap for swap in self.swaps if swap.request is not request]

    def may_move_out(self, request: Request) -> bool:
        """Whether the blocks of a GPU request can move to the CPU tier: not before the swaps that fill them."""
        return self._arriving.isdisjoint(self.block_tables[request.request_id])

    def free_blocks(self, request: Request) -> None:
        """Free all blocks of a request; no effect if it holds none."""
        if self.block_tables.get(request.request_id):
            self.publish(request)
            pool = self.pool_of(request)
            pool.free(self.block_tables.pop(request.request_id))
            pool.num_tables -= 1
        if self.state_slots is not None:
            self.state_slots.free(request.request_id)
            self._saved_at.pop(request.request_id, None)
            self._saved_last.pop(request.request_id, None)
        request.num_kv_slots = request.num_hashed = 0

    def free_all_blocks(self) -> None:
        """Free all blocks of both tiers, and drop all block tables, hashes and states."""
        self.block_tables.clear()
        if self.state_slots is not None:
            self.state_slots.free_all()
        if self.snapshots is not None:
            self.snapshots.free_all()
        for of_states in (self.state_copies, self._saved_at, self._saved_last):
            of_states.clear()
        for pool in self.block_pools.values():
            pool.free_all()

    def _pool_with_room(self, tier: Tier, num_blocks: int, block_hashes: Sequence[bytes] = ()) -> BlockPool:
        """Where a request that enters a tier gets its blocks: of the pools with room for it and the next token of each
        request there, the one with most of ``hashes``, by default the first; else of those with room. Without any, the
        one filled first."""
        pools = self.pools(tier)
        if len(pools) == 1:
            return pools[0]
        for spare in (self.groups.growth, 0):
            roomy = [pool for pool in pools if num_blocks + spare * pool.num_tables <= pool.num_free]
            if roomy:
                return (
                    max(roomy, key=lambda pool: len(self._longest_prefix(block_hashes, pool)[0]))
                    if block_hashes
                    else roomy[0]
                )
        return pools[0]

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def hash_prompt(self, request: Request) -> None:
        """Name the full blocks of a new request's prompt, if there is a prefix cache. Any thread."""
        if self.hashes is not None:
            request.block_hashes = []
            self.hashes.extend(request, request.prompt_len // self.block_size)

    def publish(self, request: Request) -> None:
        """Make the full blocks of a request findable, as far as their K and V are computed.

        Prompts' are after each chunk. What decodes fill is when the request moves or gives its blocks back: naming 60
        blocks an iteration of 1,000 decodes one by one takes half a millisecond.
        """
        if request.block_hashes is None or self.hashes is None:
            return
        num_full = request.num_computed_tokens // self.block_size
        if num_full <= request.num_hashed:
            return
        pool, table = self.pool_of(request), self.block_tables[request.request_id]
        if not pool.caches:
            return
        self.hashes.extend(request, num_full)
        for i in range(request.num_hashed, num_full):
            pool.add_hash(table[i], request.block_hashes[i])
        request.num_hashed = num_full

    def num_findable(self, request: Request) -> int:
        """The first blocks of a request's tokens that are cached, in whatever tier, and whose state is."""
        block_hashes = self.hashes_to_find(request)
        return self._num_resumable(block_hashes, self._num_cached(block_hashes))

    def _num_cached(self, block_hashes: Sequence[bytes]) -> int:
        count = 0
        for block_hash in block_hashes:
            if all(pool.find(block_hash) is None for pool in self._caching):
                break
            count += 1
        return count

    def _num_resumable(self, block_hashes: Sequence[bytes], num_cached: int) -> int:
        """Those of a request's first blocks, which are cached, with which it can begin."""
        return num_cached if self.snapshots is None else self.snapshots.num_resumable(block_hashes[:num_cached])

    def num_shared(self, request: Request, tier: Tier) -> int:
        """The blocks that others hold in a tier and a request would share there, so that they take no room, whether it
        starts or moves. Counts none in a tier of several pools."""
        (pool, *others), found = self.pools(tier), []
        block_hashes = self.hashes_to_find(request) if request.tier is None else self._computed_hashes(request)
        for block_hash in block_hashes if pool.caches and not others else ():
            block = pool.find(block_hash)
            if block is None:
                break
            found.append(block)
        if request.tier is None:
            del found[self._num_resumable(block_hashes, len(found)) :]
        return sum(pool.num_holders(block) > 0 for block in found)

    def hashes_to_find(self, request: Request) -> Sequence[bytes]:
        """The blocks that a request may find; those whose prompt is to be scored must compute all of it."""
        if not request.block_hashes or request.sampling.prompt_logprobs is not None:
            return ()
        return request.block_hashes[: max(0, request.num_tokens - LEAST_COMPUTED) // self.block_size]

    def _computed_hashes(self, request: Request) -> Sequence[bytes]:
        """The full blocks of a running request, as far as K and V are computed and hashes are made."""
        return (request.block_hashes or ())[: request.num_computed_tokens // self.block_size]

    def _other_pool(self, pool: BlockPool) -> BlockPool | None:
        """The pool of the other tier from which cached blocks are copied to this one; those of other hosts stay."""
        gpu, local = self._gpu_pool, self.host_pools.pools[0]
        return {gpu: local, local: gpu}.get(pool)

    def _longest_prefix(self, block_hashes: Sequence[bytes], pool: BlockPool) -> tuple[dict[int, int], dict[int, int]]:
        """The cached blocks of the longest prefix, by place: those of a pool, and those to be copied to it."""
        here: dict[int, int] = {}
        there: dict[int, int] = {}
        other = self._other_pool(pool)
        on_gpu = pool is self._gpu_pool
        too_early = () if on_gpu else self._arriving  # blocks of the GPU tier whose content is still on its way there
        for i, block_hash in enumerate(block_hashes if pool.caches else ()):
            if (block := pool.find(block_hash)) is not None:
                here[i] = block
            elif other is not None and (block := other.find(block_hash)) is not None and block not in too_early:
                there[i] = block
            else:
                break
        usable = self._num_resumable(block_hashes, len(here) + len(there))
        copied = sum(i < usable for i in there)
        if copied and not self.copying_pays(Tier.CPU if on_gpu else Tier.GPU, copied):
            # A prefix ends where a block is missing, whatever is cached behind.
            usable = self._num_resumable(block_hashes, min(there))
        if usable < len(here) + len(there):
            here, there = ({i: block for i, block in of.items() if i < usable} for of in (here, there))
        return here, there

    def _save_evicted(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Copy cached GPU blocks that are about to be reused to the CPU tier, as far as it has room and that pays; of
        too many the newest.

        A plan may evict a thousand blocks at once, for a single long prompt. They may belong to conversations whose
        next turns begin with them.

        A block that a swap of this plan fills cannot be the source of another one. The GPU pool calls this while it
        allocates: so the swap is in the plan before any that fills the blocks anew.
        """
        local = self.host_pools.pools[0]
        saved = [
            (block, block_hash)
            for block, block_hash in zip(blocks, block_hashes, strict=True)
            if block not in self._arriving and local.find(block_hash) is None
        ]
        # As many of a plan's blocks are copied as take less time than computing them again. Where that fails for a
        # number, it fails for every larger one.
        before, most = self._num_saved, min(len(saved), local.num_free)
        most = bisect_left(range(before + 1, before + most + 1), True, key=lambda n: not self.copying_pays(Tier.GPU, n))
        if not most:
            return
        saved = saved[len(saved) - most :]
        self._num_saved += most
        targets = local.allocate(len(saved))
        for target, (_, block_hash) in zip(targets, saved, strict=True):
            local.add_hash(target, block_hash)
        # Nobody holds them: they stay cached until the CPU tier needs them, and take no room from requests.
        local.free(targets[::-1])
        self._swap(None, Tier.GPU, [block for block, _ in saved], targets)

    def _swap(self, request: Request | None, source: Tier, blocks: Sequence[int], targets: Sequence[int]) -> None:
        self.swaps.append(Swap(request, source, tuple(blocks), tuple(targets)))
        if source is Tier.CPU:
            self._arriving.update(targets)

    def is_filled_by(self, swap: Swap, request: Request) -> bool:
        """Whether a swap fills blocks of a request that is in the tier where it goes."""
        return not set(swap.target_blocks).isdisjoint(self.block_tables[request.request_id])

    def forget_copies(self, swap: Swap) -> None:
        """Forget the blocks that a swap fills: it is not known whether it did."""
        for block in swap.target_blocks:
            pool = self.host_pools.pool_of(block) if swap.source is Tier.GPU else self._gpu_pool
            pool.forget([block])

    # -- snapshots of states ------------------------------------------------------------------------------------------

    def _start_from_snapshot(self, request: Request, slot: int, block_hashes: Sequence[bytes], num_found: int) -> None:
        """Bring the state after the blocks found into the slot of a request that starts, and note where its prompt
        makes snapshots: before its end, and where cached blocks end that it has no state for, since there a branch is
        likely to begin."""
        if self.snapshots is None or request.block_hashes is None:
            return
        if num_found:
            snapshot = self.snapshots.use(block_hashes[num_found - 1])
            self.state_copies.append(StateCopy(slot, snapshot, saves=False))
        ends = self._num_cached(block_hashes), (request.prompt_len - LEAST_COMPUTED) // self.block_size
        self._saved_at[request.request_id] = tuple(end * self.block_size for end in ends if end > num_found)

    def chunk_of(self, request: Request, num_tokens: int) -> int:
        """So many of a request's next tokens, or less: a chunk ends where a snapshot of its state is to be made."""
        start = request.num_computed_tokens
        ends = (end - start for end in self._saved_at.get(request.request_id, ()) if end > start)
        return min((num_tokens, *ends))

    def hashes_after(self, request: Request, start: int, end: int) -> Sequence[bytes]:
        """Of the blocks of a chunk those with which others can begin once it is computed."""
        own, size = request.block_hashes or (), self.block_size
        if self.snapshots is None:
            return own[start // size : end // size]
        return own[end // size - 1 : end // size] if end in self._saved_at.get(request.request_id, ()) else ()

    def save_state(self, request: Request, num_computed: int) -> None:
        """An iteration has ended that computed the tokens of a request up to this number. Let the next plan copy its
        state, if a snapshot is to be made here; one of an output takes the place of the last."""
        snapshots, request_id = self.snapshots, request.request_id
        if snapshots is None or self.hashes is None or request.block_hashes is None:
            return
        of_output = num_computed > request.prompt_len and num_computed % self._snapshot_interval == 0
        if not of_output and num_computed not in self._saved_at.get(request_id, ()):
            return
        if not self.pool_of(request).caches:  # its K and V will not be found
            return
        self.hashes.extend(request, num_computed // self.block_size)
        block_hash = request.block_hashes[num_computed // self.block_size - 1]
        if block_hash in snapshots:
            snapshots.use(block_hash)
            return
        if of_output:
            if (last := self._saved_last.get(request_id)) is not None:
                snapshots.forget(last)
            self._saved_last[request_id] = block_hash
        assert self.state_slots is not None
        slot = self.state_slots.of_request[request_id]
        self.state_copies.append(StateCopy(slot, snapshots.add(block_hash), saves=True))

    @property
    def _snapshot_interval(self) -> int:
        """Tokens of an output between two snapshots: whole blocks."""
        assert self.snapshots is not None
        return -(-self.snapshots.every // self.block_size) * self.block_size

    def take_state_copies(self) -> tuple[StateCopy, ...]:
        """What the plan that is made now copies. What saves comes first: a slot may have another request since."""
        copies = tuple(self.state_copies)
        self.state_copies.clear()
        return copies

    def forget_snapshots(self, copies: Sequence[StateCopy]) -> None:
        """Forget the snapshots that these copies save: it is not known whether they did."""
        if self.snapshots is not None:
            self.snapshots.forget_slots({copy.snapshot for copy in copies if copy.saves})

    def reset_cache(self) -> None:
        """Forget the hashes of all blocks."""
        for pool in self._caching:
            pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.free_all()

    @property
    def num_cached(self) -> dict[Tier, int]:
        """Blocks that no request holds and that are still findable."""
        return {tier: pool.num_cached for tier, pool in self.block_pools.items()}

    def check_blocks(self) -> None:
        """Assert that each block is free, cached, or in as many tables as it has holders."""
        held: Counter[int] = Counter()
        for pool in (self._gpu_pool, *self.host_pools.pools):
            held += pool.check()
        assert held == Counter(chain.from_iterable(self.block_tables.values())), "a block is lost"
        if self.state_slots is not None:
            self.state_slots.check()
            assert self.state_slots.of_request.keys() == self.block_tables.keys(), "a state without blocks"
        if self.snapshots is not None:
            self.snapshots.check()


def out_of_blocks(requests: Sequence[Request]) -> list[Request]:
    """The requests without a cache slot for their newest token."""
    return [request for request in requests if request.num_tokens > request.num_kv_slots]


# -- a CPU tier of several pools ---------------------------------------------------------------------------------------
# Room in a tier of several pools: a request has all of its blocks in one of them.


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
