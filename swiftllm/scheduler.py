"""Continuous batching on the GPU alone, and the queue mechanics every scheduler shares. Plain Python, no torch.

Order is everywhere the order of arrival: the oldest request is served first and preempted last, so it always makes
progress and nobody starves. A request pushed out of the GPU moves to the CPU tier where that has room, else it gives
its blocks back and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from swiftllm.kv_cache import KVCacheManager
from swiftllm.plan import IterationPlan, LaneItem, StepResult, Strategy, Swap
from swiftllm.request import FinishReason, Request, RequestRefused, RequestStatus, Tier


@dataclass(frozen=True)
class SchedulerLimits:
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


class PlanDraft:
    """A plan in the making."""

    def __init__(self, token_budget: int) -> None:
        self.lane: list[LaneItem] = []
        self.swaps: list[Swap] = []
        self.tokens_left = token_budget
        self.admitted: set[str] = set()  # requests that left the waiting queue for this plan

    def add(self, request: Request, num_tokens: int, *, is_prefill: bool) -> None:
        self.lane.append(LaneItem(request, request.num_computed_tokens, num_tokens, request.tier, is_prefill))
        self.tokens_left -= num_tokens

    def remove(self, item: LaneItem) -> None:
        self.lane.remove(item)
        self.tokens_left += item.num_tokens


def arrival_order(request: Request) -> int:
    return request.arrival_index


class Scheduler:
    """GPU-only continuous batching with chunked prefill (SwiftLLM); the CPU tier only stores what was pushed out.

    Subclasses override :meth:`schedule` and :attr:`decode_tiers`.
    """

    decode_tiers: tuple[Tier, ...] = (Tier.GPU,)

    def __init__(self, limits: SchedulerLimits, kv: KVCacheManager, now: Callable[[], float]) -> None:
        self.limits = limits
        self.kv = kv
        self.now = now
        self.waiting: list[Request] = []
        self.running: dict[Tier, list[Request]] = {Tier.GPU: [], Tier.CPU: []}
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
        insort(self.waiting, request, key=arrival_order)
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
        return IterationPlan(Strategy.GPU_ONLY, tuple(draft.lane), (), tuple(draft.swaps))

    def update(self, plan: IterationPlan, result: StepResult) -> list[Request]:
        """Take in what the plan gave; returns the requests that got a token."""
        now_s = self.now()
        for item in plan.lane:
            item.request.num_computed_tokens = item.context_len
        touched = []
        for request_id, token in result.tokens.items():
            request = self.requests.get(request_id)
            if request is None or request.is_finished:  # aborted while its token was under way
                continue
            request.append_token(token, now_s)
            if request.is_finished:
                self._retire(request)
            touched.append(request)
        return touched

    # -- GPU decodes and room for them ------------------------------------------------------------------------------

    def _schedule_gpu_decodes(self, draft: PlanDraft) -> None:
        for request in list(self.running[Tier.GPU]):
            if request.tier is not Tier.GPU or request.is_prefilling:  # pushed out meanwhile, or not there yet
                continue
            if draft.tokens_left < 1:
                break
            if self._make_gpu_room(request, draft):
                draft.add(request, 1, is_prefill=False)

    def _make_gpu_room(self, request: Request, draft: PlanDraft) -> bool:
        """Grow a GPU request by its next token, pushing out younger ones; False if it had to go itself."""
        while not self.kv.grow(request, request.num_tokens):
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
        self.running[request.tier].remove(request)
        draft.swaps.append(self.kv.move(request, target))
        insort(self.running[target], request, key=arrival_order)
        self._note_tier(request)

    def _recompute(self, request: Request, draft: PlanDraft) -> None:
        draft.swaps = [swap for swap in draft.swaps if swap.request is not request]  # it may have moved just now
        self._requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        """Back to the waiting queue, without blocks."""
        self.kv.release(request)
        self.running[request.tier].remove(request)
        request.tier = None
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        insort(self.waiting, request, key=arrival_order)
        self._note_tier(request)

    def _swap_in(self, draft: PlanDraft) -> None:
        """Bring the oldest CPU requests back while blocks are free, and decode them at once."""
        if draft.swaps:  # something was just pushed out: the GPU is full
            return
        for request in list(self.running[Tier.CPU]):
            if not self._at_rest(request) or self.kv.blocks_for(request.max_kv_tokens) > self.kv.capacity(Tier.GPU):
                continue
            if draft.tokens_left < 1 or not self._has_room(Tier.GPU, request):
                break
            self._move(request, Tier.GPU, draft)
            self.kv.grow(request, request.num_tokens)
            if not request.is_prefilling:
                draft.add(request, 1, is_prefill=False)

    def _at_rest(self, request: Request) -> bool:
        """Whether no CPU attention of the request is under way, so that its blocks may move."""
        return request.cohort_id is None

    def _has_room(self, tier: Tier, request: Request) -> bool:
        """Room for all known tokens, and one more block for each request there, lest it be pushed out at once."""
        reserve = len(self.running[tier])
        return self.kv.blocks_for(request.num_tokens) + reserve <= self.kv.num_free(tier)

    # -- prefills ---------------------------------------------------------------------------------------------------

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        for tier in self.decode_tiers:
            for request in self.running[tier]:
                if request.is_prefilling:
                    self._add_prefill_chunk(request, draft)

    def _admit(self, draft: PlanDraft) -> None:
        """Start waiting requests, oldest first; one that finds no room keeps those behind it waiting."""
        while self.waiting and draft.tokens_left > 0:
            request = self.waiting[0]
            num_running = sum(len(queue) for queue in self.running.values())
            tier = next((tier for tier in self.decode_tiers if self._may_start(tier, request)), None)
            if tier is None or num_running >= self.limits.max_num_seqs:
                break
            self.waiting.pop(0)
            request.status, request.tier = RequestStatus.RUNNING, tier
            self.kv.grow(request, request.num_tokens)
            insort(self.running[tier], request, key=arrival_order)
            self._note_tier(request)
            draft.admitted.add(request.request_id)
            self._add_prefill_chunk(request, draft)

    def _may_start(self, tier: Tier, request: Request) -> bool:
        # A request may outgrow the GPU if the CPU tier can take it then; it may never outgrow the CPU tier.
        fits_later = any(self.can_hold(t, request) for t in self.decode_tiers if t in (tier, Tier.CPU))
        return fits_later and self._has_room(tier, request)

    def _add_prefill_chunk(self, request: Request, draft: PlanDraft) -> None:
        num_tokens = min(request.num_tokens - request.num_computed_tokens, draft.tokens_left)
        if num_tokens > 0:
            draft.add(request, num_tokens, is_prefill=True)

    # -- the end of a request ---------------------------------------------------------------------------------------

    def _retire(self, request: Request) -> None:
        """Take a finished request out of every queue and free its blocks."""
        if request.tier is None:
            self.waiting.remove(request)
        else:
            self.running[request.tier].remove(request)
            self.kv.release(request)
        del self.requests[request.request_id]

    def _note_tier(self, request: Request) -> None:
        request.tier_history.append((self.now(), request.tier.value if request.tier else "waiting"))
