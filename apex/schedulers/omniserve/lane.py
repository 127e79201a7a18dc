"""The lane of an iteration that should end in time: what is added to it, as far as predictions allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import longest_run
from apex.schedulers.omniserve.times import (
    PromptLeft,
    chunk_of_no_cost,
    iteration_s,
    most_prompt_tokens,
    riders_s,
    urgent_chunk_tokens,
    with_decodes,
)
from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.admission import can_hold
from swiftllm.scheduling.cohorts import Cohort
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import new_prompts, running_prompts

URGENT, BEST_EFFORT = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
PROMPTS_LOOKED_AT = 32
"""Waiting requests whose prompts are considered for an iteration."""

Riders = Mapping[int, int]
"""Rows that ride, by boundary."""


class Lane:
    """A draft, and how long it takes. Limits are the longest iteration, in seconds."""

    def __init__(self, draft: Draft, model: PerfModel) -> None:
        self.draft = draft
        self.model = model
        self.residents = draft.residents
        self._counted, self._load = (-1, -1), LaneLoad(0, 0, 0, 0, ())

    @property
    def load(self) -> LaneLoad:
        """Made anew where something was added since; nothing is ever taken out."""
        counts = len(self.draft.decodes), len(self.draft.prefills)
        if counts != self._counted:
            self._counted, self._load = counts, LaneLoad.from_draft(self.draft)
        return self._load

    @property
    def swapped(self) -> int:
        """Blocks that move between the tiers before the lane can end."""
        return sum([len(swap.source_blocks) for swap in self.residents.kv.swaps])

    @property
    def is_empty(self) -> bool:
        return not (self.draft.decodes or self.draft.prefills)

    def iteration_s(self, riders: Riders | None = None) -> float:
        return iteration_s(self.model, self.load, riders, self.swapped)

    def has_time_to_move(self, request: Request, limit_s: float) -> bool:
        """Whether the lane may wait for the blocks of a request, if there is latency-sensitive work in it."""
        load = self.load
        if not self.draft.decodes:  # they are growing, and come into the draft when all have grown
            decodes = self.residents.decoding[Tier.GPU].of_class(URGENT)
            load = with_decodes(load, len(decodes), context_tokens(decodes))
        swapped = self.swapped + self.residents.kv.num_held(request)
        return not load.requests or iteration_s(self.model, load, swapped=swapped) <= limit_s

    # -- prompts (section 3.3.4) ------------------------------------------------------------------------------------

    def _prompts(self, service_class: ServiceClass) -> list[PromptLeft]:
        """The prompts of a class, in order of service."""
        running = self.residents.prefilling.of_class(service_class)
        waiting = self.residents.waiting.of_class(service_class, PROMPTS_LOOKED_AT)
        return prompt_lengths([*sorted(running, key=lambda request: request.tier is Tier.CPU), *waiting])

    def add_urgent_prompts(self, limit_s: float) -> None:
        """Latency-sensitive prompts go on by as many tokens as cost little more than one, whatever the limit. Else none
        would ever end."""
        prompts, most = self._prompts(URGENT), self.draft.tokens_left
        tokens = urgent_chunk_tokens(self.model, self.load, prompts, limit_s, most, self.swapped)

        def made_way(draft: Draft) -> None:
            # The lane waits for the requests that are swapped out, so prompts get the time that they leave.
            waiting = prompt_lengths(self.residents.waiting.of_class(URGENT, PROMPTS_LOOKED_AT))
            size = most_prompt_tokens if draft.prefills else urgent_chunk_tokens
            most = draft.prompt_tokens_left
            draft.prompt_limit = size(self.model, self.load, waiting, limit_s, most, swapped=self.swapped)

        self.draft.prompt_limit = tokens
        running_prompts(self.draft, URGENT)
        new_prompts(self.draft, URGENT, made_way)

    def add_prompts(self, riders: Riders, limit_s: float, *, must: bool) -> bool:
        """Best-effort prompts. If they ``must``, or if there is nothing else, they go on by a few tokens where not even
        one fits. False: none goes on, although there are some."""
        draft, load, most = self.draft, self.load, self.draft.tokens_left
        prompts, num_chunks = self._prompts(BEST_EFFORT), len(draft.prefills)
        tokens = most_prompt_tokens(self.model, load, prompts, limit_s, most, riders, self.swapped)
        if not tokens and (must or (self.is_empty and not riders)):
            tokens = chunk_of_no_cost(self.model, load, most)
        draft.prompt_limit = tokens
        running_prompts(draft, BEST_EFFORT)
        new_prompts(draft, BEST_EFFORT)
        return not prompts or len(draft.prefills) > num_chunks

    # -- decodes (section 3.3.5) ------------------------------------------------------------------------------------

    def add_decodes(self, decodes: Sequence[Request], riders: Riders, limit_s: float) -> None:
        """Best-effort decodes on the GPU, as many as the limit allows; the others rest."""
        decodes = decodes[: self.draft.tokens_left]
        load, swapped = self.load, self.swapped
        contexts = [0, *accumulate([request.num_tokens for request in decodes])]
        count = longest_run(
            lambda count: iteration_s(self.model, with_decodes(load, count, contexts[count]), riders, swapped),
            limit_s,
            len(decodes),
        )
        if not load.requests and not riders:
            count = max(count, 1)
        self.draft.add_decodes(decodes[:count])

    def recall(self, riders: Riders, limit_s: float) -> None:
        """Move best-effort requests back to the GPU where memory and limit allow it.

        Only those between two tokens, since a token that is under way would be lost (section 3.2.4).
        """
        residents, kv = self.residents, self.residents.kv
        if residents.kv.moves or Tier.GPU not in residents.open_tiers:
            return
        for request in residents.decoding[Tier.CPU].of_class(BEST_EFFORT):
            if not residents.at_rest(request) or not can_hold(kv, Tier.GPU, request):
                continue
            num_blocks = kv.blocks_for(request.num_tokens)
            if self.draft.tokens_left < 1 or not residents.finds_room(Tier.GPU, request, num_blocks):
                break
            load = with_decodes(self.load, 1, request.num_tokens)
            if iteration_s(self.model, load, riders, self.swapped + kv.num_held(request)) > limit_s:
                break
            residents.move(request, Tier.GPU)
            kv.allocate_slots(request, request.num_tokens)
            self.draft.add_decodes([request])

    # -- piggybacking (section 3.3.6) -------------------------------------------------------------------------------

    def choose_riders(
        self, ready: Sequence[Request], limit_s: float, most_cohorts: int, overdue: Request | None
    ) -> tuple[list[Cohort], list[Request]]:
        """Cohorts that may ride their next boundary within the limit, oldest first, and members of a new cohort.

        The request that is overdue comes first, alone or with its cohort, whatever the limit. (The paper begins with
        the lowest layer, where cohorts that have come far would starve behind those that start.)
        """
        load, riders, riding = self.load, Counter[int](), []
        spare_s = limit_s - self.iteration_s()
        under_way = self.residents.cohorts.under_way()
        for cohort in sorted(under_way, key=lambda cohort: (overdue not in cohort.members, cohort.cohort_id)):
            cost_s = self._added_s(load, riders[cohort.boundary], len(cohort.members), cohort.boundary)
            if cost_s <= spare_s or not load.requests or overdue in cohort.members:
                spare_s -= cost_s
                riders[cohort.boundary] += len(cohort.members)
                riding.append(cohort)
        starting = []
        if len(under_way) < most_cohorts:
            before = riders[-1]
            count = longest_run(lambda rows: self._added_s(load, before, rows, -1), spare_s, len(ready))
            starting = list(ready[:count])
        if overdue in ready and overdue not in starting:
            starting = [*starting[:-1], overdue]
        return riding, starting

    def _added_s(self, load: LaneLoad, rows_before: int, rows: int, boundary: int) -> float:
        """What more rows at a boundary add to the iteration, in seconds."""
        after_s = riders_s(self.model, load.tokens, load.sampled, {boundary: rows_before + rows})
        if not rows_before:
            return after_s
        return after_s - riders_s(self.model, load.tokens, load.sampled, {boundary: rows_before})


def rows_by_boundary(riding: Sequence[Cohort], starting: Sequence[Request]) -> Riders:
    rows = Counter({-1: len(starting)} if starting else {})
    for cohort in riding:
        rows[cohort.boundary] += len(cohort.members)
    return rows


def prompt_lengths(requests: Sequence[Request]) -> list[PromptLeft]:
    return [PromptLeft(request.num_uncomputed, request.num_computed_tokens, request.tier) for request in requests]
