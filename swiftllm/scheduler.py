"""Continuous batching on the GPU alone, and the queue mechanics every scheduler shares. Plain Python, no torch.

Order is everywhere the order of arrival: the oldest request is served first and preempted last, so it always makes
progress and nobody starves. A request pushed out of the GPU moves to the CPU tier where that has room, else it gives
its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from swiftllm.kv_cache import KVCacheManager
from swiftllm.plan import IterationPlan, StepResult
from swiftllm.plan_draft import PlanDraft
from swiftllm.request import FinishReason, Request, RequestRefused, RequestStatus, Tier


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


arrival_order = attrgetter("arrival_index")


class ArrivalQueue(list[Request]):
    """Requests in the order of arrival."""

    def put(self, request: Request) -> None:
        insort(self, request, key=arrival_order)

    def take(self, request: Request) -> None:
        index = bisect_left(self, request.arrival_index, key=arrival_order)
        assert self[index] is request, f"{request.request_id} is not in this queue"
        del self[index]


class Scheduler:
    """GPU-only continuous batching with chunked prefill (SwiftLLM); the CPU tier only stores what was pushed out.

    Subclasses override :meth:`schedule` and :attr:`decode_tiers`.
    """

    decode_tiers: tuple[Tier, ...] = (Tier.GPU,)

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, now: Callable[[], float]) -> None:
        self.limits = limits
        self.kv = kv
        self.now = now
        self.waiting = ArrivalQueue()
        self.running = {Tier.GPU: ArrivalQueue(), Tier.CPU: ArrivalQueue()}
        self.prefilling = ArrivalQueue()  # those of the running requests that do not decode yet
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    # -- the door ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it could never be served; the message names the limit.
        """
        self._check(request)
        self.requests[request.request_id] = request
        self.waiting.put(request)
        self._note_tier(request)

    def _check(self, request: Request) -> None:
        if request.request_id in self.requests:
            raise RequestRefused(f"request id {request.request_id!r} is already in use; ids must be unique")
        if request.prompt_len == 0:
            raise RequestRefused("the prompt is empty; it needs at least one token")
        total = request.prompt_len + request.sampling.max_tokens
        if total > self.limits.max_model_len:
            raise RequestRefused(
                f"{request.prompt_len} prompt + {request.sampling.max_tokens} output tokens = {total} exceed "
                f"max_model_len={self.limits.max_model_len}"
            )
        if not any(self.can_hold(tier, request) for tier in self.decode_tiers):
            pools = " and ".join(
                f"{self.kv.capacity(tier) * self.kv.block_size} in the {tier.value.upper()} tier "
                f"({self.kv.capacity(tier)} blocks of {self.kv.block_size})"
                for tier in self.decode_tiers
            )
            raise RequestRefused(
                f"the request needs KV cache for {request.max_kv_tokens} tokens; there is room for {pools}: "
                "ask for fewer tokens or raise num_gpu_blocks / num_cpu_blocks"
            )

    def can_hold(self, tier: Tier, request: Request) -> bool:
        """Whether the tier, empty, could hold the request to its last token."""
        return self.kv.blocks_for(request.max_kv_tokens) <= self.kv.capacity(tier)

    def abort(self, request_id: str) -> Request | None:
        """End a request in whatever state it is; None if no such request is unfinished."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return None
        request.finish(FinishReason.ABORT, self.now())
        self._retire(request)
        return request

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    # -- one iteration ----------------------------------------------------------------------------------------------

    def schedule(self) -> IterationPlan:
        """Decide the next iteration. Blocks are taken and queues moved at once; the caller carries the plan out."""
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        self._schedule_gpu_decodes(draft)
        self._swap_in(draft)
        self._schedule_running_prefills(draft)
        if not self.running[Tier.CPU]:  # what was pushed out is older than what waits
            self._admit(draft)
        return draft.plan()

    def update(self, plan: IterationPlan, result: StepResult) -> list[Request]:
        """Take in what the plan gave; returns the requests that got a token."""
        now_s = self.now()
        for item in plan.prefills:
            item.request.num_computed_tokens = item.context_len
            if not item.request.is_prefilling:
                self.prefilling.take(item.request)
        touched = []
        requests = self.requests
        for request_id, token in result.tokens.items():
            request = requests.get(request_id)
            if request is not None and request.finish_reason is None:  # else aborted while its token was under way
                request.append_token(token, now_s)
                touched.append(request)
                if request.finish_reason is not None:
                    self._retire(request)
        return touched

    # -- GPU decodes and room for them ------------------------------------------------------------------------------

    def _decoding(self, tier: Tier) -> list[Request]:
        if not self.prefilling:
            return list(self.running[tier])
        prefilling = set(self.prefilling)
        return [request for request in self.running[tier] if request not in prefilling]

    def _schedule_gpu_decodes(self, draft: PlanDraft) -> None:
        decodes = self._decoding(Tier.GPU)[: draft.tokens_left]
        num_on_gpu = len(self.running[Tier.GPU])
        for request in out_of_blocks(decodes):
            if request.tier is Tier.GPU:  # not pushed out meanwhile
                self._make_gpu_room(request, request.num_tokens, draft)
        if len(self.running[Tier.GPU]) < num_on_gpu:
            decodes = [request for request in decodes if request.tier is Tier.GPU]
        draft.add_decodes(decodes)

    def _make_gpu_room(self, request: Request, num_tokens: int, draft: PlanDraft) -> bool:
        """Give a GPU request blocks for so many tokens, pushing out younger ones; False if it had to go itself."""
        while not self.kv.grow(request, num_tokens):
            victim = self.running[Tier.GPU][-1]
            self._push_out(victim, draft)
            if victim is request:
                return False
        return True

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        """Move a GPU request to the CPU tier, or give its blocks back where there is no room for it."""
        if self.can_hold(Tier.CPU, request) and self._make_cpu_room(request, draft):
            self._move(request, Tier.CPU, draft)
        else:
            self._recompute(request, draft)

    def _make_cpu_room(self, request: Request, draft: PlanDraft) -> bool:
        """Whether the CPU tier can take the blocks of a GPU request now."""
        return self.kv.num_held(request) <= self.kv.num_free(Tier.CPU)

    def _move(self, request: Request, target: Tier, draft: PlanDraft) -> None:
        self.running[request.tier].take(request)
        draft.swaps.append(self.kv.move(request, target))
        self.running[target].put(request)
        self._note_tier(request)

    def _recompute(self, request: Request, draft: PlanDraft) -> None:
        draft.swaps = [swap for swap in draft.swaps if swap.request is not request]  # it may have moved just now
        self._requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Back to the waiting queue, without blocks."""
        self.kv.release(request)
        self._leave_running(request)
        request.tier = None
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        self.waiting.put(request)
        self._note_tier(request)

    def _leave_running(self, request: Request) -> None:
        self.running[request.tier].take(request)
        if request.is_prefilling:
            self.prefilling.take(request)

    def _swap_in(self, draft: PlanDraft) -> None:
        """Bring the oldest CPU requests back while blocks are free, and decode them at once."""
        if draft.swaps:  # something was just pushed out: the GPU is full
            return
        for request in list(self.running[Tier.CPU]):
            if draft.tokens_left < 1 or not self._has_room(Tier.GPU, num_blocks=1):
                break
            if not self._at_rest(request) or not self.can_hold(Tier.GPU, request):
                continue
            if not self._has_room(Tier.GPU, self.kv.blocks_for(request.num_tokens)):
                break
            self._move(request, Tier.GPU, draft)
            self.kv.grow(request, request.num_tokens)
            if not request.is_prefilling:
                draft.add_decodes([request])

    def _at_rest(self, request: Request) -> bool:
        """Whether no CPU attention of the request is under way, so that its blocks may move."""
        return request.cohort_id is None

    def _has_room(self, tier: Tier, num_blocks: int) -> bool:
        """Room for a newcomer, and one more block for each request there, lest one of them be pushed out at once."""
        return num_blocks + len(self.running[tier]) <= self.kv.num_free(tier)

    # -- prefills ---------------------------------------------------------------------------------------------------

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        for tier in self.decode_tiers:
            for request in self.prefilling:
                if request.tier is tier:
                    draft.add_prefill(request)

    def _admit(self, draft: PlanDraft) -> None:
        """Start waiting requests, oldest first; one that finds no room keeps those behind it waiting."""
        num_running = sum(map(len, self.running.values()))
        while self.waiting and draft.tokens_left > 0 and num_running < self.limits.max_num_seqs:
            request = self.waiting[0]
            num_tokens = self._tokens_to_hold(request, draft)
            num_blocks = self.kv.blocks_for(num_tokens)
            tier = next((tier for tier in self.decode_tiers if self._may_start(tier, request, num_blocks)), None)
            if tier is None:
                break
            self.waiting.take(request)
            request.status, request.tier = RequestStatus.RUNNING, tier
            self.kv.grow(request, num_tokens)
            self.running[tier].put(request)
            self.prefilling.put(request)
            self._note_tier(request)
            draft.admitted.add(request.request_id)
            draft.add_prefill(request)
            num_running += 1

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        """For how many tokens a request takes blocks when it starts: for all it has."""
        return request.num_tokens

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        # A request may outgrow the GPU if the CPU tier can take it then; it may never outgrow the CPU tier.
        fits_later = any(self.can_hold(t, request) for t in self.decode_tiers if t in (tier, Tier.CPU))
        return fits_later and self._has_room(tier, num_blocks)

    # -- the end of a request ---------------------------------------------------------------------------------------

    def _retire(self, request: Request) -> None:
        """Take a finished request out of every queue and free its blocks."""
        if request.tier is None:
            self.waiting.take(request)
        else:
            self._leave_running(request)
            self.kv.release(request)
        del self.requests[request.request_id]

    def _note_tier(self, request: Request) -> None:
        request.tier_history.append((self.now(), request.tier.value if request.tier else "waiting"))


def out_of_blocks(requests: Sequence[Request]) -> list[Request]:
    """Those that have no cache slot for their newest token."""
    return [request for request in requests if request.num_tokens > request.num_kv_slots]
