"""What a scheduler is, the plan builder and parts it is made of, and the schedulers that decode on the GPU only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from swiftllm.core.plan import CpuBatchPlan, GpuBatchItem, IterationPlan, StepResult
from swiftllm.core.request import Request, ServiceClass, Slo, Tier
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.state import SchedulerState, SchedulingRules
from swiftllm.scheduling.validation import can_hold

# -- the plan builder --------------------------------------------------------------------------------------------------
# It holds what the next iteration contains so far, and the token budget left.


class PlanBuilder:
    """An iteration plan that a scheduler is still adding to.

    ``tokens_left`` limits what is added. ``prompt_limit`` limits prompt tokens beside that; schedulers may lower it.
    """

    def __init__(self, state: SchedulerState) -> None:
        """Begins a plan: what ``state`` moves from now on is part of it."""
        state.begin_plan()
        self.state = state
        self.decodes: list[Request] = []
        self.prefills: list[GpuBatchItem] = []
        self.tokens_left = self.prompt_limit = state.limits.max_num_batched_tokens
        self._started: set[str] = set()  # ids of requests that waited until this plan
        self._computed_blocks: set[bytes] = set()  # hashes of the blocks that are full after this plan
        self._decode_context = self._num_counted = 0

    def add_decodes(self, requests: Sequence[Request]) -> None:
        self.decodes += requests
        self.tokens_left -= len(requests)

    def take_out_preempted(self) -> None:
        """Take out decodes that have lost their blocks since they were added."""
        kept = [request for request in self.decodes if request.tier is Tier.GPU]
        self.tokens_left += len(self.decodes) - len(kept)
        self.decodes, self._decode_context, self._num_counted = kept, 0, 0

    @property
    def decode_context(self) -> int:
        """Tokens that the decodes attend to. Each decode is counted once, since there may be a thousand of them."""
        self._decode_context += sum([request.num_tokens for request in self.decodes[self._num_counted :]])
        self._num_counted = len(self.decodes)
        return self._decode_context

    @property
    def prompt_tokens_left(self) -> int:
        return min(self.tokens_left, self.prompt_limit)

    def tokens_to_hold(self, request: Request, num_found: int = 0) -> int:
        """Tokens for which a prompt needs blocks: all, or with ``by_chunk`` as many as the budget allows, beside those
        in ``num_found`` cached blocks."""
        if not self.state.rules.by_chunk:
            return request.num_tokens
        num_computed = request.num_computed_tokens + num_found * self.state.kv.block_size
        return min(request.num_tokens, num_computed + self.prompt_tokens_left)

    def computes_block(self, request: Request, index: int) -> bool:
        """Whether this plan computes this block of a request's tokens for another request."""
        if not self._computed_blocks:
            return False
        if self.state.kv.snapshots is not None:  # the state after any later block is worth the wait
            return not self._computed_blocks.isdisjoint(self.state.kv.hashes_to_find(request)[index:])
        hashes = request.block_hashes or ()
        return index < len(hashes) and hashes[index] in self._computed_blocks

    def add_prefill(self, request: Request, *, starts: bool = False) -> None:
        """Add a chunk: all uncomputed tokens of the request, or as many as the budget and its snapshots allow.

        ``starts``: the request waited until this plan.
        """
        num_tokens, tier = min(request.num_uncomputed, self.prompt_tokens_left), request.tier
        assert tier is not None, "a prompt without blocks"
        if num_tokens > 0:
            num_tokens, start = self.state.kv.chunk_of(request, num_tokens), request.num_computed_tokens
            self.prefills.append(GpuBatchItem(request, start, num_tokens, tier, True))
            if request.block_hashes is not None:
                self._computed_blocks.update(self.state.kv.hashes_after(request, start, start + num_tokens))
            self.tokens_left -= num_tokens
            self.prompt_limit -= num_tokens
        if starts:
            self._started.add(request.request_id)

    def put_off(self, item: GpuBatchItem) -> None:
        """Take a chunk out again. A request that starts with it goes back to those that wait."""
        self.prefills.remove(item)
        self.tokens_left += item.num_tokens
        self.prompt_limit += item.num_tokens
        if item.request.request_id in self._started:
            self.state.requeue(item.request)

    def plan(
        self,
        cpu_batches: Sequence[CpuBatchPlan] = (),
        predicted: Mapping[str, float] | None = None,
        time_limit_s: float | None = None,
    ) -> IterationPlan:
        state = self.state
        return IterationPlan(
            tuple(self.decodes),
            tuple(self.prefills),
            tuple(cpu_batches),
            tuple(state.kv.swaps),
            frozenset(state.cpu_batches.leaving),
            dict(predicted or {}),
            time_limit_s,
            state.kv.take_state_copies(),
        )


# -- the interface -----------------------------------------------------------------------------------------------------


class Scheduler:
    """Decides what the next iteration computes. It keeps what it learns, and no request: the state has those."""

    rules = SchedulingRules()

    @property
    def slo(self) -> Slo | None:
        """The targets that plans keep, in schedulers that have any."""
        return None

    def plan(self, state: SchedulerState) -> IterationPlan:
        """Plan the next iteration. Its blocks are allocated and the queues updated; the caller must run the plan."""
        raise NotImplementedError

    def manage_copies(self, kv: KVCacheManager) -> None:
        """Limit the copies of cached prefixes between the tiers, if the scheduler can tell what they cost, by
        ``kv.copying_pays``. Called once, by the engine. Requests that move are no such copies."""

    def added(self, request: Request) -> None:
        """A request was queued, for the first time or after a failure."""

    def ended(self, request: Request) -> None:
        """A request has finished, or was aborted."""

    def observe(self, plan: IterationPlan, result: StepResult, stages: Mapping[int, int]) -> None:
        """A plan was carried out. Its tokens are not added yet, and ``stages`` are those that CPU batches were at
        before."""

    def emptied(self) -> None:
        """All requests were removed after a failure; they may be added again."""

    def check_targets(self, request: Request, state: SchedulerState) -> None:
        """Check that a request that arrives now can keep its targets, if the scheduler has any.

        Raises:
            RequestRefusedForNow: it cannot; the message names the target.
        """

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        """Measured seconds over profiled seconds of each operation, by name; empty for schedulers that predict
        nothing."""
        return {}


# -- parts of schedulers -----------------------------------------------------------------------------------------------
# Functions that add requests of one service class to a plan builder, in order of arrival. They allocate and move blocks
# at once, so a plan that is made is also run.


def gpu_decodes(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """The GPU decodes, as many as the budget allows; younger requests are preempted for their blocks."""
    builder.add_decodes(builder.state.grow_on_gpu(service_class, builder.tokens_left))


def swap_in(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """Move the oldest CPU requests back to the GPU while there is room, and decode them in this iteration.

    One with CPU attention under way is recalled first, one of another host fetched; its GPU blocks are reserved.
    """
    state, kv = builder.state, builder.state.kv
    # Where this plan has moved requests out, the GPU is full. All moves of a plan go in one direction.
    if Tier.GPU not in state.open_tiers or state.kv.move_source is Tier.GPU:
        return
    for request in state.running[Tier.CPU].of_class(service_class):
        # Asked for one block first: where the GPU is full, nobody else need be looked at.
        if builder.tokens_left < 1 or not state.can_allocate(Tier.GPU, request, num_blocks=1):
            break
        if not can_hold(kv, Tier.GPU, request):  # it never moves, so it must not keep the others from moving
            continue
        num_blocks = kv.blocks_for(request.num_tokens)
        if not state.can_allocate(Tier.GPU, request, num_blocks):  # no younger one may overtake it
            break
        if not state.recall_to_gpu(request, num_blocks):
            continue
        num_new = num_blocks - kv.num_shared(request, Tier.GPU)
        if not state.has_room(Tier.GPU, num_new):  # others make way first; it follows in the next iteration
            if state.kv.move_source is None:
                state.preempt_for(Tier.GPU, request, num_blocks)
            break
        state.move(request, Tier.GPU)
        kv.allocate_slots(request, request.num_tokens)
        if not request.is_prefilling:  # else its next chunk comes with the running prompts
            builder.add_decodes([request])


def running_prompts(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """The next chunks of prompts that have blocks already, those of the preferred tier first."""
    state = builder.state
    by_chunk = state.rules.by_chunk
    for tier in state.open_tiers:
        for request in state.prefilling.of_class(service_class):
            # Not one that is on its way to the GPU, nor one that an older prompt of this loop has preempted.
            if request.tier is not tier or request in state.fetches:
                continue
            if not by_chunk:
                builder.add_prefill(request)
                continue
            num_recomputed = len(state.recomputed)
            if state.hold_on_gpu(request, builder.tokens_to_hold(request)):
                builder.add_prefill(request)
            # Younger ones decode already if a chunk of this prompt ended where a snapshot was made.
            if len(state.recomputed) > num_recomputed:
                builder.take_out_preempted()


def new_prompts(
    builder: PlanBuilder, service_class: ServiceClass, on_preempt: Callable[[PlanBuilder], None] | None = None
) -> None:
    """Start waiting requests, oldest first. The first one without room blocks those behind it.

    ``on_preempt`` is called where others moved to the CPU tier for a request, before its prompt is added.
    """
    waiting = builder.state.waiting
    while waiting and waiting[0].service_class is service_class and start_prompt(builder, waiting[0], on_preempt):
        pass


def start_prompt(
    builder: PlanBuilder,
    request: Request,
    on_preempt: Callable[[PlanBuilder], None] | None = None,
    find_tier: Callable[[Request, int], Tier | None] | None = None,
) -> bool:
    """Start a waiting request with the first chunk of its prompt. False: it has no room, no token is left for it, or
    this plan computes blocks that the next one will find for it. ``find_tier`` looks for room, by default the state's.
    """
    state = builder.state
    if builder.prompt_tokens_left <= 0 or not state.look_ahead.knows(request):
        return False
    num_found = state.kv.num_findable(request)
    if builder.computes_block(request, num_found):  # the next plan shares it; this one would compute it twice
        return False
    num_tokens = builder.tokens_to_hold(request, num_found)
    # With ``whole_prompts`` room is asked for all tokens, though blocks are held for this chunk alone: a prompt that
    # starts without room for its end could be preempted half-way.
    num_blocks = state.kv.blocks_for(request.num_tokens if state.rules.whole_prompts else num_tokens)
    tier = (find_tier or state.find_tier)(request, num_blocks)
    if tier is None:
        return False
    # Only now that it is sure to start: nobody is preempted for a prompt that then has to wait.
    num_moves = len(state.kv.moves)
    state.preempt_for(tier, request, num_blocks)
    if on_preempt is not None and len(state.kv.moves) > num_moves:
        on_preempt(builder)
    # Who was preempted may have left more of its blocks than were found before. Those take room beside the chunk.
    if state.rules.by_chunk and (num_now := state.kv.num_findable(request)) > num_found:
        num_tokens = builder.tokens_to_hold(request, num_now)
        num_new = state.kv.blocks_for(num_tokens) - state.kv.num_shared(request, tier)
        if not state.has_room(tier, num_new):
            return False
    state.start(request, tier, num_tokens)
    builder.add_prefill(request, starts=True)
    return True


def one_tier(state: SchedulerState) -> IterationPlan:
    """A plan that decodes on the GPU only. The CPU tier stores preempted requests, which come back before others start:
    those of a class are older than its waiting ones."""
    builder = PlanBuilder(state)
    for service_class in ServiceClass:
        gpu_decodes(builder, service_class)
        swap_in(builder, service_class)
        running_prompts(builder, service_class)
        stored = state.running[Tier.CPU]
        if not stored or stored[0].service_class.rank > service_class.rank:
            new_prompts(builder, service_class)
    return builder.plan()


def two_tiers(builder: PlanBuilder, before_prompts: Callable[[PlanBuilder], None] | None = None) -> list[Request]:
    """Fill a plan builder of a system that decodes in both tiers. Returns the *startable* CPU requests: those between
    two tokens that have room for the next one. What they do is left to the scheduler.

    ``before_prompts`` is called once, before the first prompt is added.
    """
    startable: list[Request] = []
    for service_class in ServiceClass:
        # Whoever holds blocks before whoever waits, and first those who may preempt others for their next token. What
        # they preempt is then no part of the plan yet.
        gpu_decodes(builder, service_class)
        swap_in(builder, service_class)
        # After the swap-in, so that requests that move to the GPU are not among them.
        startable += builder.state.grow_on_cpu(service_class)
        if before_prompts is not None and service_class is ServiceClass.LATENCY_SENSITIVE:
            before_prompts(builder)
        running_prompts(builder, service_class)
        new_prompts(builder, service_class)
    return startable


# -- GPU only: SwiftLLM and vLLM ---------------------------------------------------------------------------------------
# Schedulers that decode on the GPU only: SwiftLLM's, and that of vLLM's V1 engine, the baseline most people run.
#
# Modelled of vLLM 0.19:
#
# - Requests are served in order of arrival.
# - One token budget serves decodes first, then prompt chunks.
# - A prompt starts only where all of it has room. Blocks are allocated for the tokens of this step only.
# - If blocks are missing, the newest request is preempted: its blocks are freed and it is computed again later.
# - A step that preempts admits no request of the class that it preempts.
#
# The papers' baselines are older and reserve nothing. A simulation can also plan ahead, use graphs and hide the host's
# work, as vLLM does (``apex/simulator/backend.py``). Its prefix cache is that of all systems. Not modelled:
# speculative decoding, priorities. Service classes are this project's own and the same in every scheduler.


class SwiftLLM(Scheduler):
    """Continuous batching with chunked prefill. The CPU tier only stores preempted requests."""

    rules = SchedulingRules(stores_by_age=False)

    def plan(self, state: SchedulerState) -> IterationPlan:
        return one_tier(state)


class Vllm(Scheduler):
    """Continuous batching that never uses the CPU tier."""

    rules = SchedulingRules(spills=(), reserve=0, by_chunk=True, whole_prompts=True)

    def __init__(self, rules: SchedulingRules | None = None) -> None:
        """``rules``: in place of the usual ones."""
        if rules is not None:
            self.rules = rules

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder = PlanBuilder(state)
        for service_class in ServiceClass:
            gpu_decodes(builder, service_class)
            running_prompts(builder, service_class)
            if all(request.service_class is not service_class for request in state.recomputed):
                new_prompts(builder, service_class)
        return builder.plan()
