"""Parts of policies: functions that add requests of one service class to a draft, in order of arrival."""

from __future__ import annotations

from collections.abc import Callable

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.admission import can_hold
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.residents import Residents


def gpu_decodes(draft: Draft, service_class: ServiceClass) -> None:
    """The GPU decodes, as many as the budget allows; younger requests are preempted for their blocks."""
    draft.add_decodes(draft.residents.grow_on_gpu(service_class, draft.tokens_left))


def swap_in(draft: Draft, service_class: ServiceClass) -> None:
    """Move the oldest CPU requests back to the GPU while there is room, and decode them in this iteration.

    One with CPU attention under way is called back first, one of another host fetched; its GPU blocks are reserved.
    """
    residents, kv = draft.residents, draft.residents.kv
    if Tier.GPU not in residents.open_tiers or residents.kv.move_source is Tier.GPU:  # pushed some out: the GPU is full
        return
    for request in residents.running[Tier.CPU].of_class(service_class):
        if draft.tokens_left < 1 or not residents.finds_room(Tier.GPU, request, num_blocks=1):
            break
        if not can_hold(kv, Tier.GPU, request):
            continue
        num_blocks = kv.blocks_for(request.num_tokens)
        if not residents.finds_room(Tier.GPU, request, num_blocks):
            break
        if not residents.call_back(request, num_blocks):
            continue
        num_new = num_blocks - kv.num_shared(request, Tier.GPU)
        if not residents.has_room(Tier.GPU, num_new):  # others make way first; it follows in the next iteration
            if residents.kv.move_source is None:
                residents.make_way(Tier.GPU, request, num_blocks)
            break
        residents.move(request, Tier.GPU)
        kv.allocate_slots(request, request.num_tokens)
        if not request.is_prefilling:
            draft.add_decodes([request])


def running_prompts(draft: Draft, service_class: ServiceClass) -> None:
    """The next chunks of prompts that have blocks already, those of the preferred tier first."""
    residents = draft.residents
    by_chunk = residents.rules.by_chunk
    for tier in residents.open_tiers:
        for request in residents.prefilling.of_class(service_class):
            if request.tier is not tier or request in residents.fetches:  # or preempted for an older one meanwhile
                continue
            if not by_chunk or residents.hold_on_gpu(request, draft.tokens_to_hold(request)):
                draft.add_prefill(request)


def new_prompts(draft: Draft, service_class: ServiceClass, made_way: Callable[[Draft], None] | None = None) -> None:
    """Start waiting requests, oldest first. The first one without room blocks those behind it.

    ``made_way`` is called where others moved to the CPU tier for a request, before its prompt is added.
    """
    waiting = draft.residents.waiting
    while waiting and waiting[0].service_class is service_class and start_prompt(draft, waiting[0], made_way):
        pass


def start_prompt(draft: Draft, request: Request, made_way: Callable[[Draft], None] | None = None) -> bool:
    """Start a waiting request with the first chunk of its prompt. False: it has no room, no token is left for it, or
    this plan computes blocks that the next one will find for it."""
    residents = draft.residents
    if draft.prompt_tokens_left <= 0 or not residents.look_ahead.knows(request):
        return False
    num_found = residents.kv.num_findable(request)
    if draft.computes_block(request, num_found):
        return False
    num_tokens = draft.tokens_to_hold(request, num_found)
    num_blocks = residents.kv.blocks_for(request.num_tokens if residents.rules.whole_prompts else num_tokens)
    tier = residents.find_tier(request, num_blocks)
    if tier is None:
        return False
    num_moves = len(residents.kv.moves)
    residents.make_way(tier, request, num_blocks)
    if made_way is not None and len(residents.kv.moves) > num_moves:
        made_way(draft)
    residents.start(request, tier, num_tokens)
    draft.add_prefill(request, starts=True)
    return True


def one_tier(residents: Residents) -> IterationPlan:
    """A plan that decodes on the GPU only. The CPU tier stores preempted requests, which come back before others start:
    those of a class are older than its waiting ones."""
    draft = Draft(residents)
    for service_class in ServiceClass:
        gpu_decodes(draft, service_class)
        swap_in(draft, service_class)
        running_prompts(draft, service_class)
        stored = residents.running[Tier.CPU]
        if not stored or stored[0].service_class.rank > service_class.rank:
            new_prompts(draft, service_class)
    return draft.plan()


def two_tiers(draft: Draft, before_prompts: Callable[[Draft], None] | None = None) -> list[Request]:
    """Fill a draft of a system that decodes in both tiers. Returns the CPU requests that may start their next token.

    ``before_prompts`` is called once, before the first prompt is added.
    """
    ready: list[Request] = []
    for service_class in ServiceClass:
        gpu_decodes(draft, service_class)
        swap_in(draft, service_class)
        ready += draft.residents.grow_on_cpu(service_class)
        if before_prompts is not None and service_class is ServiceClass.LATENCY_SENSITIVE:
            before_prompts(draft)
        running_prompts(draft, service_class)
        new_prompts(draft, service_class)
    return ready
