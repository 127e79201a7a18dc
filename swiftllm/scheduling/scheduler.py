"""Continuous batching on the GPU alone, and the queue mechanics that all schedulers share. Plain Python, no torch.

All queues are in order of arrival. The oldest request is served first and preempted last, so it always makes progress
and no request starves. A request preempted on the GPU moves to the CPU tier if that has room. Else its blocks are
freed, and it is computed again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import FinishReason, Request, RequestRefused, RequestStatus, Tier, append_tokens
from swiftllm.kv.blocks import KVCacheManager, out_of_blocks
from swiftllm.scheduling.admission import can_hold, check_servable
from swiftllm.scheduling.arrival_queue import ArrivalQueue, arrival_order
from swiftllm.scheduling.plan_draft import PlanDraft


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class Scheduler:
    """GPU-only continuous batching with chunked prefill (SwiftLLM). The CPU tier only stores preempted requests.

    Subclasses override :meth:`schedule` and :attr:`decode_tiers`.
    """

    decode_tiers: tuple[Tier, ...] = (Tier.GPU,)

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, now: Callable[[], float]) -> None:
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
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        self._schedule_gpu_decodes(draft)
        self._swap_in(draft)
        self._schedule_running_prefills(draft)
        if not self.running[Tier.CPU]:  # preempted requests are older than waiting ones
            self._admit(draft)
        return draft.build_plan()

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

    def _schedule_gpu_decodes(self, draft: PlanDraft) -> None:
        queue = self.decoding[Tier.GPU]
        decodes = queue[: draft.tokens_left]
        growing = out_of_blocks(decodes)
        if not self.kv.allocate_block_each(growing, Tier.GPU):
            for request in growing:
                if request.tier is Tier.GPU:  # not preempted for an older one meanwhile
                    self._make_gpu_room(request, request.num_tokens, draft)
            decodes = [request for request in decodes if request.tier is Tier.GPU]
        draft.add_decodes(decodes)

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
        if can_hold(self.kv, Tier.CPU, request) and self._make_cpu_room(request, draft):
            self._move(request, Tier.CPU, draft)
        else:
            self._recompute(request, draft)

    def _make_cpu_room(self, request: Request, draft: PlanDraft) -> bool:
        """Whether the CPU tier has room for the blocks of a GPU request now."""
        return self.kv.num_held(request) <= self.kv.num_free(Tier.CPU)

    def _move(self, request: Request, target: Tier, draft: PlanDraft) -> None:
        source = request.tier
        draft.swaps.append(self.kv.move_blocks(request, target))
        for queues in (self.running,) if request.is_prefilling else (self.running, self.decoding):
            queues[source].remove_request(request)
            queues[target].insert_request(request)
        self._note_tier(request)

    def _recompute(self, request: Request, draft: PlanDraft) -> None:
        draft.swaps = [swap for swap in draft.swaps if swap.request is not request]  # this plan may have moved it
        self._requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Free the request's blocks and put it back into the waiting queue."""
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

    def _swap_in(self, draft: PlanDraft) -> None:
        """Move the oldest CPU requests back while GPU blocks are free, and decode them in this iteration.

        A request with CPU attention under way is called back first. Its GPU blocks are reserved for it until then.
        """
        self._gpu_blocks_promised = 0
        if draft.swaps or Tier.GPU not in self.decode_tiers:  # this plan preempted a request: the GPU is full
            return
        for request in list(self.running[Tier.CPU]):
            if draft.tokens_left < 1 or not self._has_room(Tier.GPU, num_blocks=1):
                break
            if not can_hold(self.kv, Tier.GPU, request):
                continue
            num_blocks = self.kv.blocks_for(request.num_tokens)
            if not self._has_room(Tier.GPU, num_blocks):
                break
            if not self._at_rest(request):
                self._call_back(request)
                self._gpu_blocks_promised += num_blocks + 1
                continue
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

    def _has_room(self, tier: Tier, num_blocks: int) -> bool:
        """Whether the tier can take ``num_blocks`` and keep one more block for each request in it.

        Without that reserve, a decode of the next iteration could preempt the request just added.
        """
        promised = self._gpu_blocks_promised if tier is Tier.GPU else 0
        return num_blocks + len(self.running[tier]) + promised <= self.kv.num_free(tier)

    # -- prefills ---------------------------------------------------------------------------------------------------

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        for tier in self.decode_tiers:
            for request in self.prefilling:
                if request.tier is tier:
                    draft.add_prefill(request)

    def _admit(self, draft: PlanDraft) -> None:
        """Start waiting requests, oldest first. The first one without room blocks those behind it."""
        num_running = sum(map(len, self.running.values()))
        while self.waiting and draft.tokens_left > 0 and num_running < self.limits.max_num_seqs:
            request = self.waiting[0]
            num_tokens = self._tokens_to_hold(request, draft)
            num_blocks = self.kv.blocks_for(num_tokens)
            tier = next((tier for tier in self.decode_tiers if self._may_start(tier, request, num_blocks)), None)
            if tier is None:
                break
            self.waiting.remove_request(request)
            request.status, request.tier = RequestStatus.RUNNING, tier
            self.kv.allocate_slots(request, num_tokens)
            self.running[tier].insert_request(request)
            self.prefilling.insert_request(request)
            self._note_tier(request)
            draft.admitted.add(request.request_id)
            draft.add_prefill(request)
            num_running += 1

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        """Tokens for which a starting request gets blocks: all of its tokens."""
        return request.num_tokens

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        # A request may outgrow the GPU tier if the CPU tier can hold it then. It must never outgrow the CPU tier.
        fits_later = any(can_hold(self.kv, t, request) for t in self.decode_tiers if t in (tier, Tier.CPU))
        return fits_later and self._has_room(tier, num_blocks)

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
