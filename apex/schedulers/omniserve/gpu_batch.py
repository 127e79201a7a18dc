"""The GPU batch of an iteration that should end in time: what is added to it, as far as predictions allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import longest_run
from apex.schedulers.omniserve.times import (
    PromptLeft,
    chunk_of_no_cost,
    iteration_s,
    joined_rows_s,
    most_prompt_tokens,
    urgent_chunk_tokens,
    with_decodes,
)
from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.admission import can_hold
from swiftllm.scheduling.cpu_batches import CpuBatch
from swiftllm.scheduling.parts import new_prompts, running_prompts
from swiftllm.scheduling.plan_builder import PlanBuilder

URGENT, BEST_EFFORT = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
PROMPTS_LOOKED_AT = 32
"""Waiting requests whose prompts are considered for an iteration."""

RowsByStage = Mapping[int, int]
"""Rows that join, by stage."""


class GpuBatch:
    """A plan builder, and how long it takes. Limits are the longest iteration, in seconds."""

    def __init__(self, builder: PlanBuilder, model: PerfModel) -> None:
        self.builder = builder
        self.model = model
        self.state = builder.state
        self._counted, self._load = (-1, -1), GpuBatchLoad(0, 0, 0, 0, ())

    @property
    def load(self) -> GpuBatchLoad:
        """Made anew where something was added since; nothing is ever taken out."""
        counts = len(self.builder.decodes), len(self.builder.prefills)
        if counts != self._counted:
            self._counted, self._load = counts, GpuBatchLoad.from_builder(self.builder)
        return self._load

    @property
    def swapped(self) -> int:
        """Blocks that move between the tiers before the GPU batch can end."""
        return sum([len(swap.source_blocks) for swap in self.state.kv.swaps])

    @property
    def is_empty(self) -> bool:
        return not (self.builder.decodes or self.builder.prefills)

    def iteration_s(self, joined_rows: RowsByStage | None = None) -> float:
        return iteration_s(self.model, self.load, joined_rows, self.swapped)

    def has_time_to_move(self, request: Request, limit_s: float) -> bool:
        """Whether the GPU batch may wait for the blocks of a request, if there is latency-sensitive work in it."""
        load = self.load
        if not self.builder.decodes:  # they are growing, and come into the plan builder when all have grown
            decodes = self.state.decoding[Tier.GPU].of_class(URGENT)
            load = with_decodes(load, len(decodes), context_tokens(decodes))
        swapped = self.swapped + self.state.kv.num_held(request)
        return not load.requests or iteration_s(self.model, load, swapped=swapped) <= limit_s

    # -- prompts (section 3.3.4) ------------------------------------------------------------------------------------

    def _prompts(self, service_class: ServiceClass) -> list[PromptLeft]:
        """The prompts of a class, in order of service."""
        running = self.state.prefilling.of_class(service_class)
        waiting = self.state.waiting.of_class(service_class, PROMPTS_LOOKED_AT)
        return prompt_lengths([*sorted(running, key=lambda request: request.tier is Tier.CPU), *waiting])

    def add_urgent_prompts(self, limit_s: float) -> None:
        """Latency-sensitive prompts go on by as many tokens as cost little more than one, whatever the limit. Else none
        would ever end."""
        prompts, most = self._prompts(URGENT), self.builder.tokens_left
        tokens = urgent_chunk_tokens(self.model, self.load, prompts, limit_s, most, self.swapped)

        def made_way(builder: PlanBuilder) -> None:
            # The GPU batch waits for the requests that are swapped out, so prompts get the time that they leave.
            waiting = prompt_lengths(self.state.waiting.of_class(URGENT, PROMPTS_LOOKED_AT))
            size = most_prompt_tokens if builder.prefills else urgent_chunk_tokens
            most = builder.prompt_tokens_left
            builder.prompt_limit = size(self.model, self.load, waiting, limit_s, most, swapped=self.swapped)

        self.builder.prompt_limit = tokens
        running_prompts(self.builder, URGENT)
        new_prompts(self.builder, URGENT, made_way)

    def add_prompts(self, joined_rows: RowsByStage, limit_s: float, *, must: bool) -> bool:
        """Best-effort prompts. If they ``must``, or if there is nothing else, they go on by a few tokens where not even
        one fits. False: none goes on, although there are some."""
        builder, load, most = self.builder, self.load, self.builder.tokens_left
        prompts, num_chunks = self._prompts(BEST_EFFORT), len(builder.prefills)
        tokens = most_prompt_tokens(self.model, load, prompts, limit_s, most, joined_rows, self.swapped)
        if not tokens and (must or (self.is_empty and not joined_rows)):
            tokens = chunk_of_no_cost(self.model, load, most)
        builder.prompt_limit = tokens
        running_prompts(builder, BEST_EFFORT)
        new_prompts(builder, BEST_EFFORT)
        return not prompts or len(builder.prefills) > num_chunks

    # -- decodes (section 3.3.5) ------------------------------------------------------------------------------------

    def add_decodes(self, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort decodes on the GPU, as many as the limit allows; the others are idle."""
        decodes = decodes[: self.builder.tokens_left]
        load, swapped = self.load, self.swapped
        contexts = [0, *accumulate([request.num_tokens for request in decodes])]
        count = longest_run(
            lambda count: iteration_s(self.model, with_decodes(load, count, contexts[count]), joined_rows, swapped),
            limit_s,
            len(decodes),
        )
        if not load.requests and not joined_rows:
            count = max(count, 1)
        self.builder.add_decodes(decodes[:count])

    def recall(self, joined_rows: RowsByStage, limit_s: float) -> None:
        """Move best-effort requests back to the GPU where memory and limit allow it.

        Only those between two tokens, since a token that is under way would be lost (section 3.2.4).
        """
        state, kv = self.state, self.state.kv
        if state.kv.moves or Tier.GPU not in state.open_tiers:
            return
        for request in state.decoding[Tier.CPU].of_class(BEST_EFFORT):
            if not state.is_idle(request) or not can_hold(kv, Tier.GPU, request):
                continue
            num_blocks = kv.blocks_for(request.num_tokens)
            if self.builder.tokens_left < 1 or not state.finds_room(Tier.GPU, request, num_blocks):
                break
            load = with_decodes(self.load, 1, request.num_tokens)
            if iteration_s(self.model, load, joined_rows, self.swapped + kv.num_held(request)) > limit_s:
                break
            state.move(request, Tier.GPU)
            kv.allocate_slots(request, request.num_tokens)
            self.builder.add_decodes([request])

    # -- piggybacking (section 3.3.6) -------------------------------------------------------------------------------

    def choose_joining(
        self, ready: Sequence[Request], limit_s: float, most_cpu_batches: int, overdue: Request | None
    ) -> tuple[list[CpuBatch], list[Request]]:
        """CPU batches that may join their next stage within the limit, oldest first, and members of a new CPU batch.

        The request that is overdue comes first, alone or with its CPU batch, whatever the limit. (The paper begins with
        the lowest layer, where CPU batches that have come far would starve behind those that start.)
        """
        load, joined_rows, joining = self.load, Counter[int](), []
        spare_s = limit_s - self.iteration_s()
        under_way = self.state.cpu_batches.under_way()
        for cpu_batch in sorted(
            under_way, key=lambda cpu_batch: (overdue not in cpu_batch.members, cpu_batch.cpu_batch_id)
        ):
            cost_s = self._added_s(load, joined_rows[cpu_batch.stage], len(cpu_batch.members), cpu_batch.stage)
            if cost_s <= spare_s or not load.requests or overdue in cpu_batch.members:
                spare_s -= cost_s
                joined_rows[cpu_batch.stage] += len(cpu_batch.members)
                joining.append(cpu_batch)
        starting = []
        if len(under_way) < most_cpu_batches:
            before = joined_rows[-1]
            count = longest_run(lambda rows: self._added_s(load, before, rows, -1), spare_s, len(ready))
            starting = list(ready[:count])
        if overdue in ready and overdue not in starting:
            starting = [*starting[:-1], overdue]
        return joining, starting

    def _added_s(self, load: GpuBatchLoad, rows_before: int, rows: int, stage: int) -> float:
        """What more rows at a stage add to the iteration, in seconds."""
        after_s = joined_rows_s(self.model, load.tokens, load.sampled, {stage: rows_before + rows})
        if not rows_before:
            return after_s
        return after_s - joined_rows_s(self.model, load.tokens, load.sampled, {stage: rows_before})


def rows_by_stage(joining: Sequence[CpuBatch], starting: Sequence[Request]) -> RowsByStage:
    rows = Counter({-1: len(starting)} if starting else {})
    for cpu_batch in joining:
        rows[cpu_batch.stage] += len(cpu_batch.members)
    return rows


def prompt_lengths(requests: Sequence[Request]) -> list[PromptLeft]:
    return [PromptLeft(request.num_uncomputed, request.num_computed_tokens, request.tier) for request in requests]
