"""What every scheduler that decodes on the CPU shares: two tiers of decodes, cohorts under way, ageing, aborts."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apex.config import StrategyConfig
from apex.perf_model import PerfModel
from apex.planner.pipeline import CpuDecodes, LaneLoad, Pipeline
from swiftllm.kv_cache import KVCacheManager
from swiftllm.plan import CohortPlan, IterationPlan, SteppingRule, StepResult, Strategy
from swiftllm.plan_draft import PlanDraft
from swiftllm.request import FinishReason, Request, Tier
from swiftllm.scheduler import Scheduler, SchedulerLimits, arrival_order, out_of_blocks


@dataclass(eq=False)
class CohortState:
    """A cohort under way between iterations; ``layer`` is the boundary it crosses next. Batches that an iteration waits
    for are never under way."""

    cohort_id: int
    members: list[Request]
    layer: int = -1


class OffloadScheduler(Scheduler, ABC):
    """Queue mechanics of hybrid schedulers. A subclass decides in :meth:`_decide` what runs on the CPU, and how."""

    decode_tiers = (Tier.GPU, Tier.CPU)

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        now: Callable[[], float],
        model: PerfModel,
        config: StrategyConfig,
    ) -> None:
        super().__init__(limits, kv, now)
        self.model = model
        self.config = config
        self._cohort_ids = itertools.count()
        self._iteration = 0
        self._oldest_served = 0  # no CPU request at rest was last served before this iteration
        if not self._may_offload():
            self.decode_tiers = (Tier.GPU,)

    def _empty_queues(self) -> None:
        super()._empty_queues()
        self._cohorts: dict[int, CohortState] = {}
        self._leaving: dict[str, Request] = {}  # aborted while a ticket may still use their blocks

    def _may_offload(self) -> bool:
        return self.config.strategy != "gpu-only"

    # -- one iteration ----------------------------------------------------------------------------------------------

    def schedule(self) -> IterationPlan:
        if not self._may_offload():
            return super().schedule()
        self._iteration += 1
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        self._schedule_gpu_decodes(draft)
        self._swap_in(draft)
        ready = self._ready_cpu_decodes(draft)
        self._schedule_running_prefills(draft)
        self._admit(draft)
        return self._decide(draft, ready)

    @abstractmethod
    def _decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        """Turn the draft and the CPU decodes that may start a token into a plan."""

    def update(self, plan: IterationPlan, result: StepResult) -> list[Request]:
        for request_id in result.left:
            self._let_go(self._leaving.pop(request_id))
        for cohort_id, cohort in list(self._cohorts.items()):
            if result.left:
                cohort.members = [request for request in cohort.members if request.request_id not in result.left]
            if cohort_id in result.cohort_layers:
                cohort.layer = result.cohort_layers[cohort_id]
            else:
                self._finish_cohort(cohort)
        for item in plan.prefills:
            item.request.last_served = self._iteration
        for batch in plan.cohorts:
            if batch.rule is not SteppingRule.RIDE_IF_READY:  # waited for, so its token is done
                for request in batch.requests:
                    request.last_served = self._iteration
        return super().update(plan, result)

    def _move(self, request: Request, target: Tier, draft: PlanDraft) -> None:
        super()._move(request, target, draft)
        request.last_served = self._iteration

    def _finish_cohort(self, cohort: CohortState) -> None:
        del self._cohorts[cohort.cohort_id]
        for request in [request for request in self._leaving.values() if request.cohort_id == cohort.cohort_id]:
            self._let_go(self._leaving.pop(request.request_id))
        for request in cohort.members:
            request.cohort_id = None
            request.last_served = self._iteration

    # -- CPU decodes ------------------------------------------------------------------------------------------------

    def _ready_cpu_decodes(self, draft: PlanDraft) -> CpuDecodes:
        """CPU requests at a token boundary with room for their next token, oldest first."""
        queue = self.decoding[Tier.CPU]
        resting = [request for request in queue if request.cohort_id is None] if self._cohorts else list(queue)
        growing = out_of_blocks(resting)
        if not self.kv.grow_by_one(growing, Tier.CPU):
            for request in growing:
                if request.tier is Tier.CPU:  # not evicted meanwhile
                    self._grow_on_cpu(request, draft)
            resting = [request for request in resting if request.num_tokens <= request.num_kv_slots]
        return CpuDecodes(resting)

    def _grow_on_cpu(self, request: Request, draft: PlanDraft) -> None:
        """Give a CPU request its next block, evicting younger ones for it; without any of those it has to wait."""
        while not self.kv.grow(request, request.num_tokens):
            younger = self._younger_cpu_requests(request)
            if not younger:
                return
            self._recompute(younger[-1], draft)

    def _make_cpu_room(self, request: Request, draft: PlanDraft) -> bool:
        """Give a GPU request room in the CPU tier, at the cost of younger ones there if that suffices."""
        missing = self.kv.num_held(request) - self.kv.num_free(Tier.CPU)
        victims = []
        for victim in reversed(self._younger_cpu_requests(request)):
            if missing <= 0:
                break
            victims.append(victim)
            missing -= self.kv.num_held(victim)
        if missing > 0:
            return False
        for victim in victims:
            self._recompute(victim, draft)
        return True

    def _younger_cpu_requests(self, request: Request) -> list[Request]:
        queue = self.running[Tier.CPU]
        first_younger = bisect_right(queue, request.arrival_index, key=arrival_order)
        return [r for r in queue[first_younger:] if self._at_rest(r)]

    def _starving(self, ready: CpuDecodes) -> bool:
        """Whether a CPU request has been left out for too long: a rule that predicts no gain must not starve it."""
        earliest = self._iteration - self.config.max_wait_iterations
        if self._oldest_served >= earliest:  # spares a look at a thousand requests until somebody may have waited
            return False
        resting = [request for request in self.decoding[Tier.CPU] if self._at_rest(request)]
        self._oldest_served = min([request.last_served for request in resting], default=self._iteration)
        return self._oldest_served < earliest and any(r.last_served < earliest for r in ready.requests)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _start_cohort(self, requests: list[Request], rule: SteppingRule) -> CohortPlan:
        cohort = CohortState(next(self._cohort_ids), requests)
        self._cohorts[cohort.cohort_id] = cohort
        for request in requests:
            request.cohort_id = cohort.cohort_id
        return self._continue_cohort(cohort, rule)

    def _continue_cohort(self, cohort: CohortState, rule: SteppingRule) -> CohortPlan:
        return CohortPlan(cohort.cohort_id, tuple(cohort.members), rule)

    def _under_way(self) -> list[CohortState]:
        """Cohorts part of the way through their token, the most advanced first."""
        alive = [c for c in self._cohorts.values() if any(r.request_id not in self._leaving for r in c.members)]
        return sorted(alive, key=lambda cohort: -cohort.layer)

    def _pipelined_plan(
        self, draft: PlanDraft, pipeline: Pipeline, under_way: Sequence[CohortState], predicted: dict[str, float]
    ) -> IterationPlan:
        """Asymmetric pipelining: batch-0's CPU decodes ride the lane, batch-1 and cohorts under way step."""
        cohorts = [self._continue_cohort(cohort, SteppingRule.STEP_AND_WAIT) for cohort in under_way]
        rules = (SteppingRule.RIDE_AND_WAIT, SteppingRule.STEP_AND_WAIT)
        cohorts += [
            CohortPlan(next(self._cohort_ids), tuple(batch.requests), rule)
            for batch, rule in zip(pipeline.batches, rules, strict=True)
            if batch.requests
        ]
        return self._plan(Strategy.ASYMMETRIC_PIPELINING, draft, cohorts, predicted)

    def _gpu_only_plan(
        self, draft: PlanDraft, load: LaneLoad, predicted: dict[str, float] | None = None
    ) -> IterationPlan:
        iteration_s = self._gpu_only_s(load)
        return self._plan(Strategy.GPU_ONLY, draft, [], {"iteration_s": iteration_s, **(predicted or {})})

    def _gpu_only_s(self, load: LaneLoad) -> float:
        layer_s = self.model.linear_s(load.tokens) + load.gpu_attention_s(self.model)
        return self.model.num_layers * layer_s + self.model.ends_s(load.requests)

    def _plan(
        self, strategy: Strategy, draft: PlanDraft, cohorts: Sequence[CohortPlan], predicted: dict[str, float]
    ) -> IterationPlan:
        return draft.plan(strategy, cohorts, self._leaving, predicted)

    # -- the end of a request ---------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        if request is None or request.is_finished or self._at_rest(request):
            return super().abort(request_id)
        request.finish(FinishReason.ABORT, self.now())
        self._leave_running(request)
        self._leaving[request_id] = request  # its id and blocks stay taken until no CPU attention can touch them
        return request

    def _let_go(self, request: Request) -> None:
        self.kv.release(request)
        del self.requests[request.request_id]
