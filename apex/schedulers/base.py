"""What all schedulers that decode on the CPU share: two tiers of decodes, cohorts under way, ageing, aborts."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.perf.online import OnlineCorrection
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import CohortPlan, IterationPlan, SteppingRule, StepResult, Strategy
from swiftllm.core.request import FinishReason, Request, ServiceClass, Tier
from swiftllm.kv.blocks import KVCacheManager, out_of_blocks
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import Scheduler, SchedulerLimits


@dataclass(eq=False)
class CohortState:
    """A cohort under way between iterations; ``layer`` is the boundary it crosses next.

    Batches that an iteration waits for end with it, so they have no such state.
    """

    cohort_id: int
    members: list[Request]
    layer: int = -1

    def to_plan(self, rule: SteppingRule, most_crossings: float = math.inf) -> CohortPlan:
        return CohortPlan(self.cohort_id, tuple(self.members), rule, most_crossings)


class OffloadScheduler(Scheduler, ABC):
    """Queues of hybrid schedulers. A subclass decides in :meth:`decide` what runs on the CPU, and how."""

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
        self._next_look = 0  # the iteration of the next search for a CPU request that was left out too long
        if not self._may_offload():
            self.decode_tiers = (Tier.GPU,)
        is_corrected = self._predicts and not config.disable_online_correction
        self._correction = OnlineCorrection(model) if is_corrected else None

    def _empty_queues(self) -> None:
        super()._empty_queues()
        self._cohorts: dict[int, CohortState] = {}
        self._leaving: dict[str, Request] = {}  # aborted or called back; a ticket may still use their blocks

    def _may_offload(self) -> bool:
        return self.config.strategy != "gpu-only"

    # -- predictions ------------------------------------------------------------------------------------------------

    @property
    def _predicts(self) -> bool:
        """Whether decisions rest on predicted times."""
        return self._may_offload()

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        return self._correction.factors if self._correction else {}

    def use_model(self, model: PerfModel) -> None:
        """Predict with another model from now on. Who keeps predictions must renew them here."""
        self.model = model

    def _learn_times(self, plan: IterationPlan, result: StepResult) -> None:
        layers = {cohort_id: cohort.layer for cohort_id, cohort in self._cohorts.items()}
        if self._correction.observe(plan, result, layers):
            self.use_model(self._correction.model)

    # -- one iteration ----------------------------------------------------------------------------------------------

    def schedule(self) -> IterationPlan:
        if not self._may_offload():
            return super().schedule()
        self._iteration += 1
        draft = self._new_draft()
        ready: list[Request] = []
        for service_class in ServiceClass:
            self._schedule_gpu_decodes(draft, service_class)
            self._swap_in(draft, service_class)
            ready += self._ready_cpu_decodes(draft, service_class)
            self._schedule_running_prefills(draft, service_class)
            self._admit(draft, service_class)
        return self.decide(draft, CpuDecodes(ready, self._overdue(ready)))

    @abstractmethod
    def decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        """Turn the draft and the CPU decodes that may start a token into a plan; it must serve ``ready.overdue``."""

    def apply_result(self, plan: IterationPlan, result: StepResult) -> list[Request]:
        if self._correction is not None:
            self._learn_times(plan, result)
        for request_id in result.left:
            self._come_to_rest(self._leaving.pop(request_id))
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
            if batch.rule.lane_waits:
                for request in batch.requests:
                    request.last_served = self._iteration
        return super().apply_result(plan, result)

    def _move(self, request: Request, target: Tier, draft: PlanDraft) -> None:
        super()._move(request, target, draft)
        request.last_served = self._iteration

    def _finish_cohort(self, cohort: CohortState) -> None:
        del self._cohorts[cohort.cohort_id]
        for request in [request for request in self._leaving.values() if request.cohort_id == cohort.cohort_id]:
            self._come_to_rest(self._leaving.pop(request.request_id))
        for request in cohort.members:
            request.cohort_id = None
            request.last_served = self._iteration

    # -- CPU decodes ------------------------------------------------------------------------------------------------

    def _ready_cpu_decodes(self, draft: PlanDraft, service_class: ServiceClass) -> list[Request]:
        """CPU requests of a class between two tokens with room for the next one, oldest first."""
        resting = self.decoding[Tier.CPU].of_class(service_class)
        if self._cohorts or self.fetches:
            resting = [r for r in resting if r.cohort_id is None and r not in self.fetches]
        growing = out_of_blocks(resting)
        if not self.kv.allocate_block_each(growing, Tier.CPU):
            for request in growing:
                if request.tier is Tier.CPU:  # growth of an older request may have evicted it
                    self._grow_on_cpu(request, draft)
            resting = [request for request in resting if request.num_tokens <= request.num_kv_slots]
        return resting

    def _grow_on_cpu(self, request: Request, draft: PlanDraft) -> None:
        """Give a CPU request its next block, evicting younger requests for it; without younger ones it waits."""
        while not self.kv.allocate_slots(request, request.num_tokens):
            pool = self.kv.pool_of(request)
            younger = [other for other in self._evictable_for(request) if self.kv.pool_of(other) is pool]
            if not younger:
                return
            self._recompute(younger[-1], draft)

    def _evictable_for(self, request: Request) -> list[Request]:
        """The younger requests of the CPU tier that are at rest, in order."""
        return [r for r in self.running[Tier.CPU].younger_than(request) if self._at_rest(r)]

    def _overdue(self, resting: Sequence[Request]) -> Request | None:
        """The CPU request that was left out longest, if for more than ``max_wait_iterations``: no rule may starve it.

        There is at most one in ``max_wait_iterations`` iterations. Otherwise a CPU that takes longer than that for a
        token of every request would be waited for in nearly every iteration.
        """
        if self._iteration < self._next_look or not resting:
            return None
        longest_waiting = min(resting, key=attrgetter("last_served"))
        patience = self.config.max_wait_iterations
        if self._iteration - longest_waiting.last_served > patience:
            self._next_look = self._iteration + patience
            return longest_waiting
        self._next_look = longest_waiting.last_served + patience + 1
        return None

    def forget_homes(self, homes: Sequence[int], unfinished_swaps: Sequence[Request]) -> list[Request]:
        for request in self._leaving.values():
            self._come_to_rest(request)
        for cohort in self._cohorts.values():  # each begins its token anew
            for request in cohort.members:
                request.cohort_id = None
        self._leaving.clear()
        self._cohorts.clear()
        return super().forget_homes(homes, unfinished_swaps)

    # -- plans ------------------------------------------------------------------------------------------------------

    def _start_cohort(self, requests: list[Request], rule: SteppingRule) -> CohortPlan:
        return self._open_cohort(requests).to_plan(rule)

    def _open_cohort(self, requests: list[Request]) -> CohortState:
        cohort = CohortState(next(self._cohort_ids), requests)
        self._cohorts[cohort.cohort_id] = cohort
        for request in requests:
            request.cohort_id = cohort.cohort_id
        return cohort

    def _under_way(self) -> list[CohortState]:
        """Cohorts that are part of the way through their token, the most advanced first."""
        alive = [c for c in self._cohorts.values() if any(r.request_id not in self._leaving for r in c.members)]
        return sorted(alive, key=lambda cohort: -cohort.layer)

    def pipelined_plan(
        self,
        draft: PlanDraft,
        pipeline: Pipeline,
        stepping: Sequence[CohortState] = (),
        predicted: dict[str, float] | None = None,
    ) -> IterationPlan:
        """Asymmetric pipelining: batch-0's CPU decodes ride the lane, batch-1 and ``stepping`` cohorts step."""
        cohorts = [cohort.to_plan(SteppingRule.STEP_AND_WAIT) for cohort in stepping]
        rules = (SteppingRule.RIDE_AND_WAIT, SteppingRule.STEP_AND_WAIT)
        cohorts += [
            CohortPlan(next(self._cohort_ids), tuple(batch.requests), rule)
            for batch, rule in zip(pipeline.batches, rules, strict=True)
            if batch.requests
        ]
        return self._plan(Strategy.ASYMMETRIC_PIPELINING, draft, cohorts, pipeline.iteration_s(), predicted)

    def gpu_only_plan(
        self, draft: PlanDraft, load: LaneLoad, predicted: dict[str, float] | None = None
    ) -> IterationPlan:
        return self._plan(Strategy.GPU_ONLY, draft, [], self._gpu_only_s(load), predicted)

    def _gpu_only_s(self, load: LaneLoad) -> float:
        layer_s = self.model.layer_s(self.model.linear_s(load.tokens) + load.gpu_attention_s(self.model))
        return self.model.num_layers * layer_s + self.model.outside_layers_s(load.requests)

    def _plan(
        self,
        strategy: Strategy,
        draft: PlanDraft,
        cohorts: Sequence[CohortPlan],
        iteration_s: float,
        predicted: dict[str, float] | None,
    ) -> IterationPlan:
        return draft.build_plan(strategy, cohorts, self._leaving, {"iteration_s": iteration_s, **(predicted or {})})

    # -- the end of a request ---------------------------------------------------------------------------------------

    def abort(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        if request is None or request.is_finished or self._at_rest(request):
            return super().abort(request_id)
        request.finish(FinishReason.ABORT, self.now())
        self._leave_running(request)
        self._leaving[request_id] = request  # keeps its id and blocks until no CPU attention can touch them
        return request

    def _call_back(self, request: Request) -> None:
        # The GPU starts its token anew: waiting for the cohort would take one iteration per remaining layer.
        self._leaving[request.request_id] = request

    def _come_to_rest(self, request: Request) -> None:
        """End the cohort membership of a request without work under way; release it if it is finished."""
        if request.is_finished:
            self.kv.free_blocks(request)
            del self.requests[request.request_id]
        else:
            request.cohort_id = None
