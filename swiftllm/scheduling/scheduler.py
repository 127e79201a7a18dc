"""Continuous batching on the GPU alone, and the queue mechanics that all schedulers share. Plain Python, no torch.

All queues are in order of arrival. The oldest request is served first and preempted last, so it always makes progress
and no request starves. A request preempted on the GPU moves to the CPU tier if that has room. Else its blocks are
freed, and it is computed again later.

Best-effort requests count as younger than all latency-sensitive ones. An iteration is planned for the latency-sensitive
requests first, as if there were no others: those are preempted where they hold blocks or seats that are needed. Then it
is planned for the best-effort requests, with what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import (
    FinishReason,
    Request,
    RequestRefused,
    RequestStatus,
    ServiceClass,
    Tier,
    append_tokens,
)
from swiftllm.core.slo import Slo
from swiftllm.kv.blocks import KVCacheManager, out_of_blocks
from swiftllm.scheduling.admission import SchedulerLimits, can_hold, check_servable, check_tiers
from swiftllm.scheduling.arrival_queue import ArrivalQueue, arrival_order
from swiftllm.scheduling.homes import Fetches, pool_has_room, victims_for
from swiftllm.scheduling.plan_draft import PlanDraft


class Scheduler:
    """GPU-only continuous batching with chunked prefill (SwiftLLM). The CPU tier only stores preempted requests."""

    decode_tiers: tuple[Tier, ...] = (Tier.GPU,)
    slo: Slo | None = None
    """The targets that plans keep, in schedulers that have any."""
    confined_to: Tier | None = None
    """The one tier where requests may start and decode for now; None: all of ``decode_tiers``, which never change."""

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, now: Callable[[], float]) -> None:
        """Raises ValueError: no tier that decodes has a block, so every request would be refused."""
        check_tiers(kv, self.decode_tiers)
        self.limits = limits
        self.kv = kv
        self.now = now
        self.num_preemptions = 0
        self._empty_queues()

    def _empty_queues(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = ArrivalQueue()
        self.running = {Tier.GPU: ArrivalQueue(), Tier.CPU: ArrivalQueue()}
        self.prefilling = ArrivalQueue()  # the running requests that do not decode yet
        self.decoding = {Tier.GPU: ArrivalQueue(), Tier.CPU: ArrivalQueue()}  # the running requests that decode
        self.fetches = Fetches(self.kv)
        self._gpu_blocks_promised = 0  # to CPU requests that move back as soon as they are at rest

    def remove_all_requests(self) -> list[Request]:
        """Empty all queues and free all blocks, whatever state a failed iteration has left.

        No ticket may use blocks any more. Returns the unfinished requests, oldest first, for :meth:`add_request`.
        """
        requests = sorted((r for r in self.requests.values() if not r.is_finished), key=arrival_order)
        self.kv.free_all_blocks()
        self._empty_queues()
        for request in requests:
            request.start_over()
        return requests

    def forget_homes(self, homes: Sequence[int], unfinished_swaps: Sequence[Request]) -> list[Request]:
        """Requeue the requests whose K and V were on hosts that are gone, and withdraw the blocks of these homes.

        No ticket may use any block, and no cohort is under way any more. The same holds for ``unfinished_swaps``,
        requests whose K and V may be incomplete. Returns the requests, which are computed again.
        """
        pools = [self.kv.homes.pools[home] for home in homes]
        lost = [request for request in self.running[Tier.CPU] if self.kv.pool_of(request) in pools]
        lost += [r for r in unfinished_swaps if r.status is RequestStatus.RUNNING and r not in lost]
        for request in lost:
            self._requeue(request)
            request.num_preemptions += 1
        for home in homes:
            self.kv.homes.withdraw(home)
        return lost

    # -- adding and aborting requests -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed :meth:`check_request`.

        Raises:
            RequestRefused: its id is in use.
        """
        if request.request_id in self.requests:
            raise RequestRefused(f"request id {request.request_id!r} is already in use; ids must be unique")
        self.requests[request.request_id] = request
        self.waiting.insert_request(request)
        self._note_tier(request)

    def check_request(self, request: Request) -> None:
        """Check that a request can be served if it is alone. Thread-safe.

        Raises:
            RequestRefused: it can never be served; the message names the limit.
        """
        check_servable(request, self.limits.max_model_len, self.kv, self.decode_tiers)

    def check_targets(self, request: Request) -> None:
        """Check that a request that arrives now can keep its targets, if the scheduler has any.

        Raises:
            RequestRefusedForNow: it cannot; the message names the target.
        """

    @property
    def open_tiers(self) -> tuple[Tier, ...]:
        """The tiers where requests may start and decode now."""
        return self.decode_tiers if self.confined_to is None else (self.confined_to,)

    @property
    def longest_request(self) -> int:
        """Prompt and output tokens of the longest request that passes :meth:`check_request`. Constant."""
        largest_tier = max(self.kv.capacity(tier) for tier in self.decode_tiers) * self.kv.block_size
        return min(self.limits.max_model_len, largest_tier + 1)  # K and V of the last token are never stored

    def abort(self, request_id: str) -> Request | None:
        """End an unfinished request, whatever its state. None: there is no unfinished request with this id."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return None
        request.finish(FinishReason.ABORT, self.now())
        self._retire(request)
        return request

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        """Measured over profiled time of each operation, by name; empty for schedulers that predict nothing."""
        return {}

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- one iteration ----------------------------------------------------------------------------------------------

    def schedule(self) -> IterationPlan:
        """Plan the next iteration. Allocates its blocks and updates the queues; the caller must run the plan."""
        draft = self._new_draft()
        for service_class in ServiceClass:
            self._schedule_gpu_decodes(draft, service_class)
            self._swap_in(draft, service_class)
            self._schedule_running_prefills(draft, service_class)
            stored = self.running[Tier.CPU]
            if not stored or stored[0].service_class.rank > service_class.rank:
                self._admit(draft, service_class)  # preempted requests of a class are older than its waiting ones
        return draft.build_plan()

    def _new_draft(self) -> PlanDraft:
        self._gpu_blocks_promised = 0
        self.fetches.begin_plan()
        return PlanDraft(self.limits.max_num_batched_tokens)

    def apply_result(self, plan: IterationPlan, result: StepResult) -> list[Request]:
        """Apply the result of a plan. Returns the requests that got a token."""
        now_s = self.now()
        for item in plan.prefills:
            request = item.request
            request.num_uncomputed -= item.num_tokens
            if request.num_uncomputed <= 1:  # one is left; or none, and the result has a new one
                request.num_uncomputed = 1
                self.prefilling.remove_request(request)
                self.decoding[request.tier].insert_request(request)
        tokens = result.tokens
        touched = list(filter(None, map(self.requests.get, tokens)))
        if len(touched) < len(tokens):  # requests were aborted after the plan was made
            tokens = {request.request_id: tokens[request.request_id] for request in touched}
        for request in append_tokens(touched, tokens.values(), now_s):
            self._retire(request)
        return touched

    # -- GPU decodes and their blocks -------------------------------------------------------------------------------

    def _schedule_gpu_decodes(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        draft.add_decodes(self._grown_gpu_decodes(draft, service_class))

    def _grown_gpu_decodes(self, draft: PlanDraft, service_class: ServiceClass) -> list[Request]:
        """The GPU decodes of a class with room for their next token; younger ones are preempted for it."""
        decodes = self.decoding[Tier.GPU].of_class(service_class)[: draft.tokens_left]
        growing = out_of_blocks(decodes)
        if not self.kv.allocate_block_each(growing, Tier.GPU):
            for request in growing:
                if request.tier is Tier.GPU:  # not preempted for an older one meanwhile
                    self._make_gpu_room(request, request.num_tokens, draft)
            decodes = [request for request in decodes if request.tier is Tier.GPU]
        return decodes

    def _make_gpu_room(self, request: Request, num_tokens: int, draft: PlanDraft) -> bool:
        """Allocate GPU blocks for ``num_tokens``, preempting younger requests. False: it was preempted itself."""
        while not self.kv.allocate_slots(request, num_tokens):
            victim = self.running[Tier.GPU][-1]
            self._push_out(victim, draft)
            if victim is request:
                return False
        return True

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        """Preempt a GPU request: move it to the CPU tier if that has room, else recompute it later."""
        may_move = draft.swap_source is not Tier.CPU and can_hold(self.kv, Tier.CPU, request)
        if may_move and self._make_cpu_room(request, draft):
            self._move(request, Tier.CPU, draft)
        else:
            self._recompute(request, draft)

    def _make_cpu_room(self, request: Request, draft: PlanDraft) -> bool:
        """Give a GPU request room in the CPU tier, evicting requests there if that suffices."""
        victims = victims_for(self.kv, self.kv.num_held(request), self._evictable_for(request))
        for victim in victims or ():
            self._recompute(victim, draft)
        return victims is not None

    def _evictable_for(self, request: Request) -> list[Request]:
        """Requests of the CPU tier that may lose their blocks to a GPU request that is pushed out."""
        return self._yielding(Tier.CPU, request)

    def _move(self, request: Request, target: Tier, draft: PlanDraft) -> None:
        source = request.tier
        draft.swaps.append(self.kv.move_blocks(request, target))
        for queues in (self.running,) if request.is_prefilling else (self.running, self.decoding):
            queues[source].remove_request(request)
            queues[target].insert_request(request)
        self._note_tier(request)

    def _recompute(self, request: Request, draft: PlanDraft) -> None:
        draft.swaps = [swap for swap in draft.swaps if swap.request is not request]  # this plan may have moved it
        draft.recomputed.append(request)
        self._requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Free the request's blocks and put it back into the waiting queue."""
        self.fetches.give_up(request)
        self.kv.free_blocks(request)
        self._leave_running(request)
        request.tier = None
        request.status = RequestStatus.WAITING
        request.num_uncomputed = request.num_tokens
        self.waiting.insert_request(request)
        self._note_tier(request)

    def _leave_running(self, request: Request) -> None:
        self.running[request.tier].remove_request(request)
        (self.prefilling if request.is_prefilling else self.decoding[request.tier]).remove_request(request)

    def _swap_in(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        """Move the oldest CPU requests of a class back while there is room, and decode them in this iteration.

        One with CPU attention under way is called back first, one of another home fetched; its GPU blocks are reserved.
        """
        if Tier.GPU not in self.open_tiers or draft.swap_source is Tier.GPU:  # pushed some out: the GPU is full
            return
        for request in self.running[Tier.CPU].of_class(service_class):
            if draft.tokens_left < 1 or not self._finds_room(Tier.GPU, request, num_blocks=1):
                break
            if not can_hold(self.kv, Tier.GPU, request):
                continue
            num_blocks = self.kv.blocks_for(request.num_tokens)
            if not self._finds_room(Tier.GPU, request, num_blocks):
                break
            if not self._at_rest(request):
                self._call_back(request)
            if not (self._at_rest(request) and self.fetches.are_here(request)):
                self._gpu_blocks_promised += num_blocks + 1
                continue
            if not self._has_room(Tier.GPU, num_blocks):  # others make way first; it follows in the next iteration
                if not draft.swaps:
                    self._make_way(Tier.GPU, request, num_blocks, draft)
                break
            self._move(request, Tier.GPU, draft)
            self.kv.allocate_slots(request, request.num_tokens)
            if not request.is_prefilling:
                draft.add_decodes([request])

    def _at_rest(self, request: Request) -> bool:
        """Whether no CPU attention of the request is under way, so that its blocks may be moved."""
        return request.cohort_id is None

    def _call_back(self, request: Request) -> None:
        """Take a request out of its cohort as soon as its blocks may be moved. The work on its next token is lost."""
        raise NotImplementedError("a GPU-only scheduler has no CPU attention under way between iterations")

    # -- room for a request that enters a tier ----------------------------------------------------------------------

    def _has_room(self, tier: Tier, num_blocks: int, without: Sequence[Request] = ()) -> bool:
        """Whether the tier, once requests ``without`` are gone, can take ``num_blocks`` and one more block for each
        request in it.

        Without that reserve, a decode of the next iteration could preempt the request just added.
        """
        pools = self.kv.pools(tier)
        if len(pools) > 1:
            return any(pool_has_room(self.kv, pool, num_blocks, without) for pool in pools)
        promised = self._gpu_blocks_promised if tier is Tier.GPU else 0
        reserved = len(self.running[tier]) - len(without) + promised
        return num_blocks + reserved <= self._num_free(tier, without)

    def _num_free(self, tier: Tier, without: Sequence[Request]) -> int:
        return self.kv.num_free(tier) + sum(map(self.kv.num_held, without))

    def _yielding(self, tier: Tier, request: Request) -> list[Request]:
        """The requests of the tier that can make way at once for a request of a more urgent class, in order."""
        return [other for other in self.running[tier].below_class(request.service_class) if self._at_rest(other)]

    def _finds_room(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        """Whether a request may enter the tier, once the requests that yield to it have made way."""
        if not self._has_room(tier, num_blocks, self._yielding(tier, request)):
            return False
        return tier is not Tier.GPU or not self._gpu_is_wanted_before(request.service_class)

    def _gpu_is_wanted_before(self, service_class: ServiceClass) -> bool:
        """Whether a request of a more urgent class is waiting or could move back to the GPU."""
        wanting = (*self.waiting[:1], *self.running[Tier.CPU].above_class(service_class))
        return any(r.service_class.rank < service_class.rank and can_hold(self.kv, Tier.GPU, r) for r in wanting)

    def _make_way(self, tier: Tier, request: Request, num_blocks: int, draft: PlanDraft) -> None:
        """Preempt requests that yield, the youngest first, until a request that ``_finds_room`` has it."""
        for victim in reversed(self._yielding(tier, request)):
            if self._has_room(tier, num_blocks):
                break
            (self._push_out if tier is Tier.GPU else self._recompute)(victim, draft)

    def _take_seat(self, request: Request, draft: PlanDraft) -> bool:
        """Whether fewer than ``max_num_seqs`` requests hold blocks. One that yields is preempted for it.

        One with CPU attention under way is called back first. Its seat comes free as soon as it is at rest.
        """
        if sum(map(len, self.running.values())) < self.limits.max_num_seqs:
            return True
        yielding = [other for tier in Tier for other in self._yielding(tier, request)]
        if yielding:
            self._recompute(max(yielding, key=arrival_order), draft)
        elif below := self.running[Tier.CPU].below_class(request.service_class):
            self._call_back(below[-1])
        return bool(yielding)

    # -- prefills ---------------------------------------------------------------------------------------------------

    def _schedule_running_prefills(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        for tier in self.open_tiers:
            for request in self.prefilling.of_class(service_class):
                if request.tier is tier and request not in self.fetches:
                    draft.add_prefill(request)

    def _admit(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        """Start waiting requests of a class, oldest first. The first one without room blocks those behind it."""
        while self.waiting and draft.prompt_tokens_left > 0:
            request = self.waiting[0]
            if request.service_class is not service_class:
                break
            num_tokens = self._tokens_to_hold(request, draft)
            num_blocks = self.kv.blocks_for(num_tokens)
            tier = next((tier for tier in self.open_tiers if self._may_start(tier, request, num_blocks)), None)
            if tier is None or not self._take_seat(request, draft):
                break
            self._make_way(tier, request, num_blocks, draft)
            self.waiting.remove_request(request)
            request.status, request.tier = RequestStatus.RUNNING, tier
            self.kv.allocate_slots(request, num_tokens)
            self.running[tier].insert_request(request)
            self.prefilling.insert_request(request)
            self._note_tier(request)
            draft.admitted.add(request.request_id)
            draft.add_prefill(request)

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        """Tokens for which a starting request gets blocks: all of its tokens."""
        return request.num_tokens

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        # A request may outgrow the GPU tier if the CPU tier can hold it then. It must never outgrow the CPU tier.
        fits_later = any(can_hold(self.kv, t, request) for t in self.open_tiers if t in (tier, Tier.CPU))
        return fits_later and self._finds_room(tier, request, num_blocks)

    # -- the end of a request ---------------------------------------------------------------------------------------

    def _retire(self, request: Request) -> None:
        """Remove a finished request from all queues and free its blocks."""
        if request.tier is None:
            self.waiting.remove_request(request)
        else:
            self._leave_running(request)
            self.kv.free_blocks(request)
        del self.requests[request.request_id]

    def _note_tier(self, request: Request) -> None:
        request.tier_history.append((self.now(), request.tier.value if request.tier else "waiting"))
