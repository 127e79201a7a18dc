"""OmniServe (SIGMOD'26, section 3.3): latency-sensitive requests first, best-effort requests in the time left.

An iteration is filled in the order of section 3.3.2: latency-sensitive decodes and prompts, then best-effort prompts
and decodes. Best-effort requests in the CPU tier decode in cohorts that ride the lane. Every iteration with best-effort
work is predicted to end within the target for a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from operator import attrgetter

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.base import CohortState, OffloadScheduler
from apex.schedulers.cpu_decodes import CpuDecodes, longest_run
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.omniserve.admission import Backlog, first_token_s
from apex.schedulers.omniserve.times import (
    chunk_of_no_cost,
    iteration_s,
    most_prompt_tokens,
    riders_s,
    urgent_chunk_tokens,
    with_decodes,
)
from apex.strategy import StrategyConfig
from swiftllm.core.plan import CohortPlan, IterationPlan, SteppingRule, Strategy
from swiftllm.core.request import FinishReason, Request, RequestRefusedForNow, ServiceClass, Tier
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.admission import can_hold, check_servable
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import SchedulerLimits

ONE_ROW = LaneLoad(1, 1, 0, 0, ())
"""A lane that only reads the weights, which prompts pay for in any case."""
URGENT, REST = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
PROMPTS_LOOKED_AT = 32
"""Waiting requests whose prompts are considered for an iteration."""
OCCUPANCY = 0.3
"""Best-effort work lengthens iterations while latency-sensitive requests hold less than this share of the GPU pool."""
DECODES_SHARE = 0.2
"""And while the decodes of latency-sensitive requests take less than this share of the longest iteration."""
RESIDENCE = 256
"""Iterations over which their length, and what is held, are averaged: about as many as a request is resident."""
LEAST_SHARE = 0.03
"""Best-effort work may lengthen an iteration by this share of its latency-sensitive work whatever else, within the
target. So it goes on where latency-sensitive requests fill the pool."""


class OmniServeScheduler(OffloadScheduler):
    """Two service classes on one GPU. The CPU tier holds best-effort requests only.

    A plan names those cohorts that may ride: with all of them the iteration is predicted to keep the target. A cohort
    rides at most one boundary an iteration. The oldest cohort comes first. (The paper begins with the lowest layer,
    where cohorts that have come far would starve behind those that start.)
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        now: Callable[[], float],
        model: PerfModel,
        config: StrategyConfig,
    ) -> None:
        super().__init__(limits, kv, now, model, config)
        self.slo = config.slo
        self.lengths = LengthsSeen()
        self._mean_iteration_s = self._mean_wanted = 0.0
        self._last_prompt = 0  # the iteration in which best-effort prompts went on, or in which there were none

    def _may_offload(self) -> bool:
        config = self.config
        return config.strategy in ("auto", "asynchronous-overlap") and not config.disable_asynchronous_overlap

    @property
    def _predicts(self) -> bool:
        return True

    # -- what is refused --------------------------------------------------------------------------------------------

    def check_request(self, request: Request) -> None:
        tiers = (Tier.GPU,) if request.service_class is URGENT else self.decode_tiers
        check_servable(request, self.limits.max_model_len, self.kv, tiers)

    def check_targets(self, request: Request) -> None:
        if request.service_class is not URGENT or self.config.disable_admission_control:
            return
        decodes = [r for tier in Tier for r in self.decoding[tier].of_class(URGENT)]
        prompts = [*self.prefilling.of_class(URGENT), *self.waiting.of_class(URGENT)]
        backlog = Backlog(
            decodes=len(decodes),
            decode_context=context_tokens(decodes),
            prompts=[(r.num_uncomputed, r.num_computed_tokens) for r in (*prompts, request)],
            missing_blocks=self._missing_blocks(request),
            missing_seats=max(0, len(decodes) + len(prompts) + 1 - self.limits.max_num_seqs),
            prompt_blocks=sum([self.kv.blocks_for(r.prompt_len) for r in decodes]),
            mean_output=self.lengths.mean_output([r.output_len for r in decodes]),
        )
        waited_s = self.now() - request.arrival_s
        expected_s = waited_s + first_token_s(self.model, self.slo, backlog, self.limits.max_num_batched_tokens)
        late_s = expected_s - self.slo.first_token_s
        if late_s > 0:
            expected = f"is expected after {expected_s:.1f} s" if isfinite(late_s) else "cannot be predicted now"
            raise RequestRefusedForNow(
                f"the first token {expected}, and the target of {self.slo.ttft_s:g} s less its margin is "
                f"{self.slo.first_token_s:g} s: try again later, or ask for best effort",
                retry_after_s=late_s if isfinite(late_s) else self.slo.ttft_s,
            )

    def _missing_blocks(self, request: Request) -> int:
        """GPU blocks that this request and those before it lack, if all best-effort requests made way.

        Every running request is left room to grow by one, as in ``_has_room``.
        """
        queue, running = [*self.waiting.of_class(URGENT), request], self.running[Tier.GPU]
        wanted = sum([self.kv.blocks_for(r.num_tokens) + 1 for r in queue]) + len(running.of_class(URGENT))
        yielded = sum(map(self.kv.num_held, running.of_class(REST)))
        return max(0, wanted - yielded - self.kv.num_free(Tier.GPU))

    def _retire(self, request: Request) -> None:
        super()._retire(request)
        if request.service_class is URGENT and request.finish_reason is not FinishReason.ABORT:
            self.lengths.add_output(request.output_len)

    # -- placement: latency-sensitive requests never enter the CPU tier ---------------------------------------------

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        if request.service_class is URGENT and tier is not Tier.GPU:
            return False
        return super()._may_start(tier, request, num_blocks)

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        if request.service_class is REST and self._may_offload() and self._has_time_to_move(request, draft):
            super()._push_out(request, draft)
        else:
            self._recompute(request, draft)

    def _has_time_to_move(self, request: Request, draft: PlanDraft) -> bool:
        """Whether the lane may wait for the blocks of a request, if there is latency-sensitive work in it."""
        load = LaneLoad.from_draft(draft)
        if not draft.decodes:  # they are growing, and come into the draft when all have grown
            decodes = self.decoding[Tier.GPU].of_class(URGENT)
            load = with_decodes(load, len(decodes), context_tokens(decodes))
        swapped = _swapped_blocks(draft) + self.kv.num_held(request)
        return not load.requests or iteration_s(self.model, load, swapped=swapped) <= self.slo.iteration_s

    def _make_way(self, tier: Tier, request: Request, num_blocks: int, draft: PlanDraft) -> None:
        num_swaps = len(draft.swaps)
        super()._make_way(tier, request, num_blocks, draft)
        if len(draft.swaps) > num_swaps:  # the lane waits for them, so prompts get the time that they leave
            prompts = _prompts(self.waiting.of_class(URGENT, PROMPTS_LOOKED_AT))
            size = most_prompt_tokens if draft.prefills else urgent_chunk_tokens
            load, most, swapped = LaneLoad.from_draft(draft), draft.prompt_tokens_left, _swapped_blocks(draft)
            draft.prompt_limit = size(self.model, load, prompts, self.slo.iteration_s, most, swapped=swapped)

    # -- one iteration ----------------------------------------------------------------------------------------------

    def schedule(self) -> IterationPlan:
        self._iteration += 1
        draft, overdue = self._new_draft(), self._overdue_decode()
        reserved = overdue is not None or self._prompts_are_overdue
        draft.tokens_left -= reserved
        self._schedule_gpu_decodes(draft, URGENT)
        self._add_prompts(draft, URGENT, {}, self.slo.iteration_s)
        draft.tokens_left += reserved
        urgent_s = self._iteration_s(draft, {})
        limit_s = self._best_effort_limit_s(urgent_s)
        # Growing may swap, so best-effort decodes rest where others fill the time already.
        decodes = self._grown_gpu_decodes(draft, REST) if urgent_s <= limit_s else []
        if overdue is not None and overdue.tier is Tier.GPU:
            if self._make_gpu_room(overdue, overdue.num_tokens, draft):
                draft.add_decodes([overdue])
            decodes = [request for request in decodes if request is not overdue and request.tier is Tier.GPU]
        ready = self._ready_cpu_decodes(draft, REST) if self._may_offload() else []
        riding, starting = self._choose_riders(draft, ready, limit_s, overdue)
        self._fill(draft, decodes, _rows(riding, starting), limit_s)
        if not (draft.decodes or draft.prefills or riding):
            starting = starting or ready[:1]  # nothing else goes on, so the least does, whatever the target
        return self._finish(draft, riding, starting, limit_s)

    def _fill(self, draft: PlanDraft, decodes: Sequence[Request], riders: Mapping[int, int], limit_s: float) -> None:
        """Best-effort work of the lane beside ``riders``: prompts before decodes (section 3.3.2)."""
        self._add_prompts(draft, REST, riders, limit_s)
        self._add_decodes(draft, decodes, riders, limit_s)
        self._recall(draft, riders, limit_s)

    def _overdue_decode(self) -> Request | None:
        """The best-effort decode of either tier that waited longest for its token, if too long.

        It goes on whatever the limit, until it has its token; then the next one may be overdue. Those that wait for
        blocks of older ones do not count.
        """
        if self._iteration < self._next_look:
            return None
        on_cpu, can_grow = self.decoding[Tier.CPU].of_class(REST), self.kv.num_free(Tier.CPU) > 0
        decodes = [r for r in on_cpu if can_grow or r.num_tokens <= r.num_kv_slots]
        decodes += self.decoding[Tier.GPU].of_class(REST)
        if not decodes:
            return None
        longest_waiting = min(decodes, key=attrgetter("last_served"))
        self._next_look = longest_waiting.last_served + self.config.max_wait_iterations + 1
        return longest_waiting if self._next_look <= self._iteration else None

    @property
    def _prompts_are_overdue(self) -> bool:
        return self._iteration - self._last_prompt > self.config.max_wait_iterations

    def _best_effort_limit_s(self, urgent_s: float) -> float:
        """The longest iteration with best-effort work, in seconds: the target, or less where that costs others theirs.

        Latency-sensitive requests stay as long as their tokens take, so longer iterations keep more of them on the GPU
        (Little's law). Where the target alone decided, they would fill the pool, and arrivals would wait for blocks.
        Or their decodes would fill the iterations, and the prompts of arrivals would get small chunks. So the mean
        iteration may grow only as far as either share allows. (Not in the paper.)

        Args:
            urgent_s: the latency-sensitive work of this iteration.
        """
        urgent = [*self.running[Tier.GPU].of_class(URGENT), *self.waiting.of_class(URGENT)]
        wanted = context_tokens(urgent)
        self._mean_wanted += (wanted - self._mean_wanted) / min(self._iteration, RESIDENCE)
        if not wanted:
            return self.slo.iteration_s
        # No less than the mean: when few are there by chance, more will come.
        growth = OCCUPANCY * self.kv.capacity(Tier.GPU) * self.kv.block_size / max(wanted, self._mean_wanted)
        if (decodes_s := self._added_by_decodes_s()) > 0:
            growth = min(growth, DECODES_SHARE * self.slo.iteration_s / decodes_s)
        longest_s = max(self._mean_iteration_s * growth, (1 + LEAST_SHARE) * urgent_s)
        return min(self.slo.iteration_s, longest_s)

    def _added_by_decodes_s(self) -> float:
        """Seconds that the resident latency-sensitive decodes take of an iteration: what prompts beside them lose."""
        decodes = self.decoding[Tier.GPU].of_class(URGENT)
        load = with_decodes(ONE_ROW, len(decodes), context_tokens(decodes))
        return iteration_s(self.model, load) - iteration_s(self.model, ONE_ROW)

    def decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        raise NotImplementedError("schedule() decides, in the order of the service classes")

    def _iteration_s(self, draft: PlanDraft, riders: Mapping[int, int]) -> float:
        return iteration_s(self.model, LaneLoad.from_draft(draft), riders, _swapped_blocks(draft))

    def _add_prompts(
        self, draft: PlanDraft, service_class: ServiceClass, riders: Mapping[int, int], limit_s: float
    ) -> None:
        """Prompt chunks of a class within the target (section 3.3.4).

        Those of the most urgent class that is there go on by a few tokens in any case, or none would ever end:
        latency-sensitive ones by as many as cost little more than one, best-effort ones where not even one fits. So do
        best-effort ones that have not gone on for too long.
        """
        waiting = self.waiting.of_class(service_class, PROMPTS_LOOKED_AT)
        running = self.prefilling.of_class(service_class)
        prompts = _prompts([*sorted(running, key=lambda request: request.tier is Tier.CPU), *waiting])
        load, most, swapped = LaneLoad.from_draft(draft), draft.tokens_left, _swapped_blocks(draft)
        if service_class is URGENT:
            tokens = urgent_chunk_tokens(self.model, load, prompts, limit_s, most, swapped)
        else:
            # Even one token may take more than an iteration's share, so that shares of several are saved for it.
            saved = LEAST_SHARE * (self._iteration - self._last_prompt - 1)
            saved_s = (1 + saved) * iteration_s(self.model, load, riders, swapped)
            limit_s = max(limit_s, min(self.slo.iteration_s, saved_s))
            tokens = most_prompt_tokens(self.model, load, prompts, limit_s, most, riders, swapped)
            nothing_else = not (draft.decodes or draft.prefills or riders)
            if not tokens and (nothing_else or self._prompts_are_overdue):
                tokens = chunk_of_no_cost(self.model, load, most)
        draft.prompt_limit = tokens
        self._schedule_running_prefills(draft, service_class)
        self._admit(draft, service_class)
        if service_class is REST and (not prompts or len(draft.prefills) > len(load.chunks)):
            self._last_prompt = self._iteration

    def _add_decodes(
        self, draft: PlanDraft, decodes: Sequence[Request], riders: Mapping[int, int], limit_s: float
    ) -> None:
        """Best-effort decodes on the GPU, as many as the target allows (section 3.3.5); the others rest."""
        decodes = decodes[: draft.tokens_left]
        load, swapped = LaneLoad.from_draft(draft), _swapped_blocks(draft)
        contexts = [0, *accumulate([request.num_tokens for request in decodes])]
        count = longest_run(
            lambda count: iteration_s(self.model, with_decodes(load, count, contexts[count]), riders, swapped),
            limit_s,
            len(decodes),
        )
        if not load.requests and not riders:
            count = max(count, 1)
        draft.add_decodes(decodes[:count])

    def _recall(self, draft: PlanDraft, riders: Mapping[int, int], limit_s: float) -> None:
        """Move best-effort requests back to the GPU where memory and target allow it (section 3.3.5).

        Only those between two tokens, since a token that is under way would be lost (section 3.2.4).
        """
        if draft.swaps or not self._may_offload() or Tier.GPU not in self.open_tiers:
            return
        for request in self.decoding[Tier.CPU].of_class(REST):
            if not self._at_rest(request) or not can_hold(self.kv, Tier.GPU, request):
                continue
            num_blocks = self.kv.blocks_for(request.num_tokens)
            if draft.tokens_left < 1 or not self._finds_room(Tier.GPU, request, num_blocks):
                break
            load = with_decodes(LaneLoad.from_draft(draft), 1, request.num_tokens)
            swapped = _swapped_blocks(draft) + self.kv.num_held(request)
            if iteration_s(self.model, load, riders, swapped) > limit_s:
                break
            self._move(request, Tier.GPU, draft)
            self.kv.allocate_slots(request, request.num_tokens)
            draft.add_decodes([request])

    # -- piggybacking (section 3.3.6) -------------------------------------------------------------------------------

    def _choose_riders(
        self, draft: PlanDraft, ready: Sequence[Request], limit_s: float, overdue: Request | None
    ) -> tuple[list[CohortState], list[Request]]:
        """Cohorts that may ride their next boundary within the target, oldest first, and members of a new cohort.

        The request that is overdue comes first, alone or with its cohort, whatever the target.
        """
        load, riders, riding = LaneLoad.from_draft(draft), Counter[int](), []
        spare_s = limit_s - self._iteration_s(draft, {})
        under_way = sorted(self._under_way(), key=lambda cohort: (overdue not in cohort.members, cohort.cohort_id))
        for cohort in under_way:
            cost_s = self._added_s(load, riders[cohort.layer], len(cohort.members), cohort.layer)
            if cost_s <= spare_s or not load.requests or overdue in cohort.members:
                spare_s -= cost_s
                riders[cohort.layer] += len(cohort.members)
                riding.append(cohort)
        starting = []
        if len(under_way) < self._most_cohorts:
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

    @property
    def _most_cohorts(self) -> int:
        """Cohorts under way at once: one at each boundary."""
        return self.model.num_layers + 1

    def _cohort_plans(self, cohorts: Sequence[CohortState], spare_s: float) -> tuple[list[CohortPlan], float]:
        """How cohorts cross boundaries, and the seconds that this takes beside one ride of each.

        ``spare_s`` is the time left if each rides once.
        """
        return [cohort.to_plan(SteppingRule.RIDE_IF_READY) for cohort in cohorts], 0.0

    def _finish(
        self, draft: PlanDraft, riding: list[CohortState], starting: Sequence[Request], limit_s: float
    ) -> IterationPlan:
        for request in draft.decodes:
            request.last_served = self._iteration
        recalled = {swap.request.request_id for swap in draft.swaps}
        starting = [request for request in starting if request.request_id not in recalled]
        expected_s = self._iteration_s(draft, _rows(riding, starting))
        cohorts = [*riding, self._open_cohort(starting)] if starting else riding
        plans, added_s = self._cohort_plans(cohorts, limit_s - expected_s)
        # With an empty lane nothing else would end the iteration before the cohorts have their tokens.
        time_limit_s = self.slo.iteration_s
        expected_s += added_s
        if not (draft.decodes or draft.prefills):
            expected_s = min(expected_s, time_limit_s)
        self._mean_iteration_s += (expected_s - self._mean_iteration_s) / min(self._iteration, RESIDENCE)
        strategy = Strategy.ASYNCHRONOUS_OVERLAP if plans else Strategy.GPU_ONLY
        return draft.build_plan(strategy, plans, self._leaving, {"iteration_s": expected_s}, time_limit_s)


def _prompts(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Tokens left and tokens cached of each."""
    return [(request.num_uncomputed, request.num_computed_tokens) for request in requests]


def _rows(riding: Sequence[CohortState], starting: Sequence[Request]) -> Mapping[int, int]:
    """Rows by the boundary that they are to ride."""
    rows = Counter({-1: len(starting)} if starting else {})
    for cohort in riding:
        rows[cohort.layer] += len(cohort.members)
    return rows


def _swapped_blocks(draft: PlanDraft) -> int:
    return sum([len(swap.source_blocks) for swap in draft.swaps])
