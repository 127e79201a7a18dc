"""The requests that an engine holds: their queues, blocks and CPU batches, and what moves for the plan being made.

All queues are in order of arrival. The oldest request is served first and preempted last, so it always makes progress
and no request starves. A request preempted on the GPU moves to the CPU tier if the rules and the room there allow it.
Else its blocks are freed, and it is computed again later.

Best-effort requests count as younger than all latency-sensitive ones. A plan serves the latency-sensitive requests
first, as if there were no others: those are preempted where they hold blocks or seats that are needed. Then it serves
the best-effort requests, with what is left.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from swiftllm.core.plan import CpuBatchMode, CpuBatchPlan, IterationPlan, StateCopy, StepResult, Swap
from swiftllm.core.request import (
    FinishReason,
    Request,
    RequestRefused,
    RequestStatus,
    ServiceClass,
    Tier,
    append_tokens,
)
from swiftllm.kv.kv_cache_manager import Fetches, KVCacheManager, out_of_blocks, pool_has_room, victims_for
from swiftllm.scheduling.validation import SchedulerLimits, can_hold, check_tiers

# -- rules of a system -------------------------------------------------------------------------------------------------
# Where the requests of a system decode, and who may be preempted for whom: data, which never changes.


@dataclass(frozen=True)
class SchedulingRules:
    """What a system lets its requests do. Their order is the same in all systems: by class, then by arrival."""

    tiers: tuple[Tier, ...] = (Tier.GPU,)
    """Where requests start and decode, the preferred tier first."""
    urgent_tiers: tuple[Tier, ...] | None = None
    """Where latency-sensitive requests do; None: in all of ``tiers``."""
    spills: tuple[ServiceClass, ...] = tuple(ServiceClass)
    """Classes whose requests move to the CPU tier when they are preempted on the GPU. Others are computed again."""
    stores_by_age: bool = True
    """Whether the blocks of younger requests in the CPU tier make way for older ones; else only of less urgent ones."""
    reserve: int = 1
    """How often ``block_size`` tokens are left to each request of a tier, in all layers, when another one enters.
    Without them a decode of the next iteration could preempt the request just added."""
    withheld: float = 0.0
    """Share of a tier's blocks that best-effort requests leave free when they start."""
    by_chunk: bool = False
    """Whether prompts get blocks chunk by chunk; else for all of their tokens when they start."""
    whole_prompts: bool = False
    """With ``by_chunk``: whether a prompt starts only where all of its tokens have room. vLLM 0.19 reserves so."""
    plans_ahead: bool = False
    """Whether an iteration is planned while the one before it runs, as vLLM's asynchronous scheduler does: it starts no
    request that arrives meanwhile, and what ends meanwhile keeps its blocks and its seat."""

    def tiers_of(self, service_class: ServiceClass) -> tuple[Tier, ...]:
        is_urgent = service_class is ServiceClass.LATENCY_SENSITIVE
        return self.urgent_tiers if is_urgent and self.urgent_tiers is not None else self.tiers


# -- requests in order of arrival --------------------------------------------------------------------------------------
# Requests in order of arrival, the latency-sensitive before the best-effort ones.
#
# All schedulers serve in this order and preempt in the reverse order.

arrival_order = attrgetter("arrival_order")


class ArrivalQueue(list[Request]):
    """A list of requests, sorted by class and arrival."""

    def insert_request(self, request: Request) -> None:
        insort(self, request, key=arrival_order)

    def remove_request(self, request: Request) -> None:
        index = bisect_left(self, request.arrival_order, key=arrival_order)
        assert self[index] is request, f"{request.request_id} is not in this queue"
        del self[index]

    def younger_than(self, request: Request) -> list[Request]:
        return self[bisect_right(self, request.arrival_order, key=arrival_order) :]

    def of_class(self, service_class: ServiceClass, most: int | None = None) -> list[Request]:
        """The requests of one class, in order; of these the first ``most``."""
        if most is None and (not self or self[0].service_class is self[-1].service_class is service_class):
            return self[:]
        start, stop = self._range_of(service_class)
        return self[start : stop if most is None else min(stop, start + most)]

    def num_of_class(self, service_class: ServiceClass) -> int:
        """The number of requests of one class, without a copy of them."""
        start, stop = self._range_of(service_class)
        return stop - start

    def _range_of(self, service_class: ServiceClass) -> tuple[int, int]:
        rank = service_class.rank
        start = bisect_left(self, (rank,), key=arrival_order)
        return start, bisect_left(self, (rank + 1,), start, key=arrival_order)

    def above_class(self, service_class: ServiceClass) -> list[Request]:
        """The requests of more urgent classes, in order."""
        return self[: bisect_left(self, (service_class.rank,), key=arrival_order)] if service_class.rank else []

    def below_class(self, service_class: ServiceClass) -> list[Request]:
        """The requests of less urgent classes, in order."""
        if not self or self[-1].arrival_order[0] <= service_class.rank:  # the usual case: there are none
            return []
        return self[bisect_left(self, (service_class.rank + 1,), key=arrival_order) :]


# -- CPU batches between iterations ------------------------------------------------------------------------------------
# CPU batches between iterations: CPU requests that are part of the way through their token.


@dataclass(eq=False)
class CpuBatch:
    """Requests that move together; ``stage`` is the one they run next (-1 is the embedding)."""

    cpu_batch_id: int
    members: list[Request]
    stage: int = -1

    def plan(self, mode: CpuBatchMode) -> CpuBatchPlan:
        return CpuBatchPlan(self.cpu_batch_id, tuple(self.members), mode)


class CpuBatches:
    """Those under way, and the requests that leave theirs: aborted, or recalled to the GPU.

    An attention task may still use the blocks of a request that leaves. Ids are never used twice, not even after a
    failure.
    """

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._by_id: dict[int, CpuBatch] = {}
        self.leaving: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def start(self, requests: list[Request]) -> CpuBatch:
        """A CPU batch that may take several iterations."""
        cpu_batch = CpuBatch(next(self._ids), requests)
        self._by_id[cpu_batch.cpu_batch_id] = cpu_batch
        for request in requests:
            request.cpu_batch_id = cpu_batch.cpu_batch_id
        return cpu_batch

    def batch(self, requests: Sequence[Request], mode: CpuBatchMode) -> CpuBatchPlan:
        """A CPU batch that the GPU batch waits for, so that it ends with the iteration."""
        return CpuBatchPlan(next(self._ids), tuple(requests), mode)

    def under_way(self) -> list[CpuBatch]:
        """Those with a member that stays, the most advanced first."""
        alive = [c for c in self._by_id.values() if any(r.request_id not in self.leaving for r in c.members)]
        return sorted(alive, key=lambda cpu_batch: -cpu_batch.stage)

    def stages(self) -> Mapping[int, int]:
        """The stage that each CPU batch runs next, by its id."""
        return {cpu_batch_id: cpu_batch.stage for cpu_batch_id, cpu_batch in self._by_id.items()}

    def detach(self, request: Request) -> None:
        """Let a request leave its CPU batch as soon as its blocks may be moved. The work on its token is lost: waiting
        for the CPU batch would take an iteration for each layer that remains."""
        self.leaving[request.request_id] = request

    def advance(self, result: StepResult) -> tuple[list[Request], list[Request]]:
        """Move on. Returns the members of CPU batches that have their token, and the requests that left, which are
        idle.

        Whoever is to leave is out before the CPU batch's next stage, so none of them is a member at the end.
        """
        # a set's order differs by process
        left = [self.leaving.pop(request_id) for request_id in sorted(result.detached)]
        done: list[Request] = []
        for cpu_batch_id, cpu_batch in list(self._by_id.items()):
            if result.detached:
                cpu_batch.members = [
                    request for request in cpu_batch.members if request.request_id not in result.detached
                ]
            if cpu_batch_id in result.stages:
                cpu_batch.stage = result.stages[cpu_batch_id]
                continue
            del self._by_id[cpu_batch_id]
            done += cpu_batch.members
        return done, left

    def dissolve(self) -> list[Request]:
        """End all CPU batches; each begins its token anew. Returns the requests that were leaving, which are idle."""
        left = list(self.leaving.values())
        for cpu_batch in self._by_id.values():
            for request in cpu_batch.members:
                request.cpu_batch_id = None
        self._by_id.clear()
        self.leaving.clear()
        return left


# -- plans made one iteration ahead ------------------------------------------------------------------------------------
# What a plan does not know that is made while the iteration before it runs, as vLLM's asynchronous scheduler does.


class LookAhead:
    """Requests that arrive or end during an iteration: the plan of the next one begins without knowing it.

    So what arrives starts one iteration later, and what ends keeps its blocks and its seat for one more iteration. An
    idle engine knows all.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._arriving: set[str] = set()  # since the last plan
        self._arrived: set[str] = set()  # since the one before it
        self._ending: list[Request] = []
        self._ended: list[Request] = []

    @property
    def num_seats(self) -> int:
        """Seats of requests that have ended, and are not known to."""
        return len(self._ended)

    def arrives(self, request: Request) -> None:
        """A request is queued while others run."""
        self._arriving.add(request.request_id)

    def ends(self, request: Request) -> None:
        """A request ends; its blocks are freed later."""
        self._ending.append(request)

    def begin_plan(self, *, is_running: bool) -> None:
        """A plan begins; ``is_running``: beside an iteration, since there are running requests."""
        gone, self._ended, self._ending = self._ended, self._ending, []
        self._arrived, self._arriving = self._arriving, set()
        if not is_running:
            gone, self._ended = gone + self._ended, []
            self._arrived.clear()
        for request in gone:
            self._kv.free_blocks(request)

    def knows(self, request: Request) -> bool:
        """Whether the plan being made can start the request."""
        return request.request_id not in self._arrived


# -- the state ---------------------------------------------------------------------------------------------------------


class SchedulerState:
    """Plain Python, no torch. Attributes that plans read:

    - ``requests`` by id, and the queues: ``waiting``; ``running`` by tier, which hold blocks; of these ``prefilling``,
      and ``decoding`` by tier. ``cpu_batches``: CPU requests part of the way through their token, which stay in
      ``running`` and ``decoding``.
    - ``iteration`` counts plans, and goes on after a failure.
    - requests ``recomputed`` because they lost their blocks to others, in the plan being made.
    """

    confined_to: Tier | None = None
    """The one tier where requests may start and decode for now; None: all of the rules' tiers, which never change."""

    def __init__(
        self, limits: SchedulerLimits, kv: KVCacheManager, now: Callable[[], float], rules: SchedulingRules
    ) -> None:
        """Raises ValueError: no tier that decodes has a block, so every request would be refused."""
        check_tiers(kv, rules.tiers)
        self.limits = limits
        self.kv = kv
        self.now = now
        self.rules = rules
        self.num_preemptions = self.iteration = 0
        self.recomputed: list[Request] = []
        self._gpu_blocks_promised = 0  # in the plan being made, to CPU requests that move back once they are idle
        self.cpu_batches = CpuBatches()
        self.may_swap_out: Callable[[Request], bool] = lambda request: True
        """Whether the plan being made has time to move a request to the CPU tier; a scheduler may set it."""
        self._empty_queues()

    def _empty_queues(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = ArrivalQueue()
        self.running = {Tier.GPU: ArrivalQueue(), Tier.CPU: ArrivalQueue()}
        self.prefilling = ArrivalQueue()  # the running requests that do not decode yet
        self.decoding = {Tier.GPU: ArrivalQueue(), Tier.CPU: ArrivalQueue()}  # the running requests that decode
        self.fetches = Fetches(self.kv)
        self.look_ahead = LookAhead(self.kv)

    # -- adding and removing requests -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that :class:`RequestLimits` has let pass. Raises RequestRefused: its id is in use."""
        if request.request_id in self.requests:
            raise RequestRefused(f"request id {request.request_id!r} is already in use; ids must be unique")
        self.requests[request.request_id] = request
        self.waiting.insert_request(request)
        self._note_tier(request)
        if self.rules.plans_ahead and any(self.running.values()):
            self.look_ahead.arrives(request)

    @property
    def open_tiers(self) -> tuple[Tier, ...]:
        """The tiers where requests may start and decode now."""
        return self.rules.tiers if self.confined_to is None else (self.confined_to,)

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request, whatever its state. None: there is no unfinished request with this id."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return None
        request.finish(FinishReason.ABORT, self.now())
        if self.is_idle(request):
            self._retire(request)
        else:  # it keeps its id and blocks until no CPU attention can touch them
            self._leave_running(request)
            self.cpu_batches.detach(request)
        return request

    def _retire(self, request: Request) -> None:
        """Remove a finished request from all queues and free its blocks."""
        if request.tier is None:
            self.waiting.remove_request(request)
        else:
            self._leave_running(request)
            if self.rules.plans_ahead:
                self.look_ahead.ends(request)
            else:
                self.kv.free_blocks(request)
        del self.requests[request.request_id]

    def remove_all(self) -> list[Request]:
        """Empty all queues and free all blocks, whatever state a failed iteration has left.

        No attention task may use blocks any more. Returns the unfinished requests, oldest first, for :meth:`add`.
        """
        # Of ``requests``, not of the queues: a step that raised in between may have left those inconsistent.
        requests = sorted((r for r in self.requests.values() if not r.is_finished), key=arrival_order)
        self.kv.free_all_blocks()
        self.cpu_batches.dissolve()
        self._empty_queues()
        for request in requests:
            request.start_over()
        return requests

    def forget_hosts(
        self,
        hosts: Sequence[int],
        unfinished_swaps: Sequence[Swap],
        begun: Sequence[Request] = (),
        unfinished_copies: Sequence[StateCopy] = (),
    ) -> list[Request]:
        """Requeue the requests whose K and V were on hosts that are gone, and withdraw their blocks.

        No attention task may use any block, and no CPU batch is under way any more. Requests with blocks that
        ``unfinished_swaps`` fill are requeued too: their K and V may be incomplete. So are, in models with linear
        attention, all whose states may have part of a token: the members of CPU batches, and the requests of the
        iteration that was ``begun`` and not ended. ``unfinished_copies`` of states may not have been made. Returns the
        requests, which are computed again.
        """
        members = [request for cpu_batch in self.cpu_batches.under_way() for request in cpu_batch.members]
        # First: aborted requests give their blocks back before the pools of hosts are withdrawn.
        for request in self.cpu_batches.dissolve():
            self._become_idle(request)
        pools = [self.kv.host_pools.pools[host] for host in hosts]
        lost = [request for request in self.running[Tier.CPU] if self.kv.pool_of(request) in pools]
        for swap in unfinished_swaps:
            lost += [r for r in self.running[swap.source.other] if self.kv.is_filled_by(swap, r) and r not in lost]
        if self.kv.state_slots is not None:
            restored, slots = {c.slot for c in unfinished_copies if not c.saves}, self.kv.state_slots.of_request
            begun = (*begun, *(self.requests[request_id] for request_id, slot in slots.items() if slot in restored))
            have_blocks = (r for r in dict.fromkeys((*members, *begun)) if r.tier is not None and not r.is_finished)
            lost += [request for request in have_blocks if request not in lost]
        for request in lost:
            self.requeue(request)
            request.num_preemptions += 1
        # Freed blocks stay findable in the prefix cache. What these swaps were to fill must not be found.
        for swap in unfinished_swaps:
            self.kv.forget_copies(swap)
        self.kv.forget_snapshots(unfinished_copies)
        for host in hosts:
            self.kv.host_pools.withdraw(host)
        return lost

    # -- from plan to plan ------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """Forget what the last plan has moved, promised and recomputed: those hold for one plan.

        Promises are made anew by each plan that still wants the request on the GPU. Else blocks would stay promised to
        one that was aborted or has lost its turn.
        """
        self.iteration += 1
        self.kv.begin_plan()
        self.recomputed, self._gpu_blocks_promised = [], 0
        self.fetches.begin_plan()
        if self.rules.plans_ahead:
            self.look_ahead.begin_plan(is_running=any(self.running.values()))

    def apply(self, plan: IterationPlan, result: StepResult) -> tuple[list[Request], list[Request]]:
        """Apply the result of a plan. Returns the requests that got a token, and those of them that end with it."""
        now_s, iteration, tokens = self.now(), self.iteration, result.tokens
        done, left = self.cpu_batches.advance(result)
        for request in left:
            self._become_idle(request)
        for request in done:
            request.cpu_batch_id, request.last_served = None, iteration
        # Those that began and ended with this iteration were never under way, so they are not among ``done``.
        for cpu_batch in plan.cpu_batches:
            if cpu_batch.mode.waits:
                for request in cpu_batch.requests:
                    request.last_served = iteration
        for item in plan.prefills:
            request = item.request
            request.last_served = iteration
            request.num_uncomputed -= item.num_tokens
            self.kv.publish(request)  # only now are K and V of the chunk computed
            self.kv.save_state(request, item.context_len)
            if request.num_uncomputed <= 1:  # one is left; or none, and the result has a new one
                request.num_uncomputed = 1
                self.prefilling.remove_request(request)
                self.decoding[item.tier].insert_request(request)
        touched = [self.requests[request_id] for request_id in tokens]
        ended = append_tokens(touched, tokens.values(), now_s)
        if self.kv.snapshots is not None:
            for request in touched:
                self.kv.save_state(request, request.num_tokens - 1)
        for request in ended:
            self._retire(request)
        return touched, ended

    def _become_idle(self, request: Request) -> None:
        """End the CPU batch membership of a request without work under way; release it if it is finished.

        In models with linear attention it is computed again, since its state has part of a token.
        """
        if request.is_finished:
            self.kv.free_blocks(request)
            del self.requests[request.request_id]
            return
        request.cpu_batch_id = None
        if self.kv.state_slots is not None:
            self.requeue(request)
            request.num_preemptions += 1

    # -- blocks for tokens ------------------------------------------------------------------------------------------

    def grow_on_gpu(self, service_class: ServiceClass, most: int) -> list[Request]:
        """The first GPU decodes of a class, with room for their next token; younger ones are preempted for it."""
        decodes = self.decoding[Tier.GPU].of_class(service_class)[:most]
        growing = out_of_blocks(decodes)
        # All at once in the usual case. One by one, oldest first, only where somebody must be preempted.
        if not self.kv.allocate_block_each(growing, Tier.GPU):
            for request in growing:
                if request.tier is Tier.GPU:  # not preempted for an older one meanwhile
                    self.hold_on_gpu(request, request.num_tokens)
            decodes = [request for request in decodes if request.tier is Tier.GPU]
        return decodes

    def hold_on_gpu(self, request: Request, num_tokens: int) -> bool:
        """Give a GPU request blocks for ``num_tokens``, preempting younger ones. False: it was preempted itself."""
        while not self.kv.allocate_slots(request, num_tokens):
            # The youngest of all, prompts included, and the request itself if it is that one: an older one never yields
            # to it, so the oldest always makes progress.
            victim = self.running[Tier.GPU][-1]
            self.push_out(victim)
            if victim is request:
                return False
        return True

    def grow_on_cpu(self, service_class: ServiceClass) -> list[Request]:
        """CPU requests of a class between two tokens with room for the next one, oldest first."""
        idle = self.decoding[Tier.CPU].of_class(service_class)
        if self.cpu_batches or self.fetches:
            idle = [r for r in idle if r.cpu_batch_id is None and r not in self.fetches]
        growing = out_of_blocks(idle)
        if not self.kv.allocate_block_each(growing, Tier.CPU):
            for request in growing:
                if request.tier is Tier.CPU:  # growth of an older request may have evicted it
                    self._hold_on_cpu(request)
            idle = [request for request in idle if request.num_tokens <= request.num_kv_slots]
        return idle

    def _hold_on_cpu(self, request: Request) -> None:
        """Give a CPU request its next block, evicting younger requests for it; without younger ones it waits."""
        while not self.kv.allocate_slots(request, request.num_tokens):
            pool = self.kv.pool_of(request)  # blocks of other hosts would not help: a request is in one pool
            younger = [other for other in self._evictable_for(request) if self.kv.pool_of(other) is pool]
            if not younger:
                return
            self.recompute(younger[-1])

    # -- requests that lose their place -----------------------------------------------------------------------------

    def push_out(self, request: Request) -> None:
        """Preempt a GPU request: move it to the CPU tier if that has room, else recompute it later."""
        # Not where this plan has moved requests in: all of its moves go in one direction.
        moves = request.service_class in self.rules.spills and self.kv.move_source is not Tier.CPU
        moves = moves and can_hold(self.kv, Tier.CPU, request) and self.kv.may_move_out(request)
        if moves and self.may_swap_out(request):
            num_blocks = self.kv.num_held(request)
            for victim in victims_for(self.kv, num_blocks, self._evictable_for(request)) or ():
                self.recompute(victim)
            if any(pool.num_free >= num_blocks for pool in self.kv.pools(Tier.CPU)):  # they may have shared blocks
                self.move(request, Tier.CPU)
                return
        self.recompute(request)

    def _evictable_for(self, request: Request) -> list[Request]:
        """Requests of the CPU tier that may lose their blocks to this one, in order."""
        if not self.rules.stores_by_age:
            return self.preemptible(Tier.CPU, request)
        return [other for other in self.running[Tier.CPU].younger_than(request) if self.is_idle(other)]

    def move(self, request: Request, target: Tier) -> None:
        source = target.other
        self.kv.move_blocks(request, target)
        # ``prefilling`` has the requests of both tiers.
        for queues in (self.running,) if request.is_prefilling else (self.running, self.decoding):
            queues[source].remove_request(request)
            queues[target].insert_request(request)
        request.last_served = self.iteration
        self._note_tier(request)

    def recompute(self, request: Request) -> None:
        self.kv.drop_move(request)  # this plan may have moved it
        self.recomputed.append(request)
        self.requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def requeue(self, request: Request) -> None:
        """Free the request's blocks and put it back into the waiting queue."""
        self.fetches.give_up(request)
        self.kv.free_blocks(request)
        self._leave_running(request)  # while it still has its tier, which names the queues
        request.tier = None
        request.status = RequestStatus.WAITING
        request.num_uncomputed = request.num_tokens
        self.waiting.insert_request(request)
        self._note_tier(request)

    def _leave_running(self, request: Request) -> None:
        tier = request.tier
        assert tier is not None, "a waiting request"
        self.running[tier].remove_request(request)
        (self.prefilling if request.is_prefilling else self.decoding[tier]).remove_request(request)

    def is_idle(self, request: Request) -> bool:
        """Whether no CPU attention of the request is under way, so that its blocks may be moved."""
        return request.cpu_batch_id is None

    def recall_to_gpu(self, request: Request, num_blocks: int) -> bool:
        """Whether a CPU request can move to the GPU at once.

        If not, it is detached of its CPU batch, or its blocks are fetched from their host. ``num_blocks`` of the GPU
        are kept for it until then.
        """
        if not self.is_idle(request):
            # An attention task may still read and write its CPU blocks, so the move waits for a later plan. Where a
            # state has part of the token already, it waits for the token, which is not begun anew.
            if self.kv.state_slots is None:
                self.cpu_batches.detach(request)
        elif self.fetches.are_here(request):
            return True
        # Without the promise other requests would take the room until then, and it would be recalled for nothing.
        self._gpu_blocks_promised += num_blocks + self.kv.groups.growth
        return False

    # -- room for a request that enters a tier ----------------------------------------------------------------------

    def has_room(self, tier: Tier, num_blocks: int, without: Sequence[Request] = ()) -> bool:
        """Whether the tier, once requests ``without`` are gone, can take ``num_blocks`` and the reserve."""
        pools = self.kv.pools(tier)
        if len(pools) > 1:
            return any(pool_has_room(self.kv, pool, num_blocks, without) for pool in pools)
        reserved = self.rules.reserve * self.kv.groups.growth * (len(self.running[tier]) - len(without))
        reserved += self._gpu_blocks_promised if tier is Tier.GPU else 0
        return num_blocks + reserved <= self.kv.num_free(tier) + self.kv.num_freed_with(without)

    def preemptible(self, tier: Tier, request: Request) -> list[Request]:
        """The requests of the tier that can make way at once for a request of a more urgent class, in order."""
        return [other for other in self.running[tier].below_class(request.service_class) if self.is_idle(other)]

    def can_allocate(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        """Whether a request may enter the tier, once the requests that yield to it have made way."""
        preemptible = self.preemptible(tier, request)
        num_shared = 0 if preemptible else self.kv.num_shared(request, tier)
        if not self.has_room(tier, num_blocks - num_shared, preemptible):
            return False
        return tier is not Tier.GPU or not self._gpu_is_wanted_before(request.service_class)

    def _gpu_is_wanted_before(self, service_class: ServiceClass) -> bool:
        """Whether a request of a more urgent class is waiting or could move back to the GPU."""
        wanting = (*self.waiting[:1], *self.running[Tier.CPU].above_class(service_class))
        return any(r.service_class.rank < service_class.rank and can_hold(self.kv, Tier.GPU, r) for r in wanting)

    def preempt_for(self, tier: Tier, request: Request, num_blocks: int) -> None:
        """Preempt requests that yield, the youngest first, until the blocks are free. ``can_allocate`` must hold."""
        for victim in reversed(self.preemptible(tier, request)):
            if self.has_room(tier, num_blocks - self.kv.num_shared(request, tier)):
                break
            (self.push_out if tier is Tier.GPU else self.recompute)(victim)

    def find_tier(self, request: Request, num_blocks: int) -> Tier | None:
        """The tier where a waiting request may start with so many blocks; a seat is freed for it. None: it waits."""
        tier = next((tier for tier in self.open_tiers if self.may_start(tier, request, num_blocks)), None)
        return tier if tier is not None and self._take_seat(request) else None

    def find_growth_room(self, request: Request, num_blocks: int) -> Tier | None:
        """The CPU tier, if so many blocks and one to grow are free there, even if others keep them for their next
        token; a seat is freed for the request. None: it waits. Where some would be preempted for it, it waits, too: a
        plan that has them already cannot lose them."""
        fits = Tier.CPU in self.open_tiers and Tier.CPU in self.rules.tiers_of(request.service_class)
        fits = fits and can_hold(self.kv, Tier.CPU, request) and not any(self.preemptible(t, request) for t in Tier)
        num_blocks += self.kv.groups.growth
        fits = fits and any(pool.num_free >= num_blocks for pool in self.kv.pools(Tier.CPU))
        return Tier.CPU if fits and self._take_seat(request) else None

    def may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        """Whether a waiting request may start there with so many blocks, if there is a seat for it."""
        if tier not in self.rules.tiers_of(request.service_class):
            return False
        if request.service_class is ServiceClass.BEST_EFFORT:
            num_blocks += int(self.rules.withheld * self.kv.capacity(tier))
        # A request may outgrow the GPU tier if the CPU tier can hold it then. It must never outgrow the CPU tier.
        fits_later = any(can_hold(self.kv, t, request) for t in self.open_tiers if t in (tier, Tier.CPU))
        return fits_later and self.can_allocate(tier, request, num_blocks)

    def _take_seat(self, request: Request) -> bool:
        """Whether fewer than ``max_num_seqs`` requests hold blocks. One that yields is preempted for it.

        One with CPU attention under way is detached first. Its seat comes free as soon as it is idle.
        """
        if sum(map(len, self.running.values())) + self.look_ahead.num_seats < self.limits.max_num_seqs:
            # An aborted request has no seat, and keeps its state until no CPU attention can touch its blocks.
            return self.kv.state_slots is None or self.kv.state_slots.num_free > 0
        preemptible = [other for tier in Tier for other in self.preemptible(tier, request)]
        if preemptible:
            self.recompute(max(preemptible, key=arrival_order))
        elif below := self.running[Tier.CPU].below_class(request.service_class):
            self.cpu_batches.detach(below[-1])
        return bool(preemptible)

    def start(self, request: Request, tier: Tier, num_tokens: int) -> None:
        """Move a waiting request into a tier that has room, with blocks for ``num_tokens``, cached ones among them."""
        self.waiting.remove_request(request)
        request.status, request.tier = RequestStatus.RUNNING, tier
        self.kv.start(request, num_tokens)
        self.running[tier].insert_request(request)
        self.prefilling.insert_request(request)
        self._note_tier(request)

    def _note_tier(self, request: Request) -> None:
        request.tier_history.append((self.now(), request.tier.value if request.tier else "waiting"))
