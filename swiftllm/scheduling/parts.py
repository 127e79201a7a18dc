"""Parts of schedulers: functions that add requests of one service class to a plan builder, in order of arrival."""

from __future__ import annotations

from collections.abc import Callable

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.admission import can_hold
from swiftllm.scheduling.plan_builder import PlanBuilder
from swiftllm.scheduling.state import SchedulerState


def gpu_decodes(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """The GPU decodes, as many as the budget allows; younger requests are preempted for their blocks."""
    builder.add_decodes(builder.state.grow_on_gpu(service_class, builder.tokens_left))


def swap_in(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """Move the oldest CPU requests back to the GPU while there is room, and decode them in this iteration.

    One with CPU attention under way is recalled first, one of another host fetched; its GPU blocks are reserved.
    """
    state, kv = builder.state, builder.state.kv
    if Tier.GPU not in state.open_tiers or state.kv.move_source is Tier.GPU:  # pushed some out: the GPU is full
        return
    for request in state.running[Tier.CPU].of_class(service_class):
        if builder.tokens_left < 1 or not state.finds_room(Tier.GPU, request, num_blocks=1):
            break
        if not can_hold(kv, Tier.GPU, request):
            continue
        num_blocks = kv.blocks_for(request.num_tokens)
        if not state.finds_room(Tier.GPU, request, num_blocks):
            break
        if not state.recall_to_gpu(request, num_blocks):
            continue
        num_new = num_blocks - kv.num_shared(request, Tier.GPU)
        if not state.has_room(Tier.GPU, num_new):  # others make way first; it follows in the next iteration
            if state.kv.move_source is None:
                state.make_way(Tier.GPU, request, num_blocks)
            break
        state.move(request, Tier.GPU)
        kv.allocate_slots(request, request.num_tokens)
        if not request.is_prefilling:
            builder.add_decodes([request])


def running_prompts(builder: PlanBuilder, service_class: ServiceClass) -> None:
    """The next chunks of prompts that have blocks already, those of the preferred tier first."""
    state = builder.state
    by_chunk = state.rules.by_chunk
    for tier in state.open_tiers:
        for request in state.prefilling.of_class(service_class):
            if request.tier is not tier or request in state.fetches:  # or preempted for an older one meanwhile
                continue
            if not by_chunk or state.hold_on_gpu(request, builder.tokens_to_hold(request)):
                builder.add_prefill(request)


def new_prompts(
    builder: PlanBuilder, service_class: ServiceClass, made_way: Callable[[PlanBuilder], None] | None = None
) -> None:
    """Start waiting requests, oldest first. The first one without room blocks those behind it.

    ``made_way`` is called where others moved to the CPU tier for a request, before its prompt is added.
    """
    waiting = builder.state.waiting
    while waiting and waiting[0].service_class is service_class and start_prompt(builder, waiting[0], made_way):
        pass


def start_prompt(builder: PlanBuilder, request: Request, made_way: Callable[[PlanBuilder], None] | None = None) -> bool:
    """Start a waiting request with the first chunk of its prompt. False: it has no room, no token is left for it, or
    this plan computes blocks that the next one will find for it."""
    state = builder.state
    if builder.prompt_tokens_left <= 0 or not state.look_ahead.knows(request):
        return False
    num_found = state.kv.num_findable(request)
    if builder.computes_block(request, num_found):
        return False
    num_tokens = builder.tokens_to_hold(request, num_found)
    num_blocks = state.kv.blocks_for(request.num_tokens if state.rules.whole_prompts else num_tokens)
    tier = state.find_tier(request, num_blocks)
    if tier is None:
        return False
    num_moves = len(state.kv.moves)
    state.make_way(tier, request, num_blocks)
    if made_way is not None and len(state.kv.moves) > num_moves:
        made_way(builder)
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
    """Fill a plan builder of a system that decodes in both tiers. Returns the CPU requests that may start their next
    token.

    ``before_prompts`` is called once, before the first prompt is added.
    """
    ready: list[Request] = []
    for service_class in ServiceClass:
        gpu_decodes(builder, service_class)
        swap_in(builder, service_class)
        ready += builder.state.grow_on_cpu(service_class)
        if before_prompts is not None and service_class is ServiceClass.LATENCY_SENSITIVE:
            before_prompts(builder)
        running_prompts(builder, service_class)
        new_prompts(builder, service_class)
    return ready
