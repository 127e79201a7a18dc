"""OmniServe (SIGMOD'26, section 3.3): latency-sensitive requests first, best-effort requests in the time left.

An iteration is filled in the order of section 3.3.2: latency-sensitive decodes and prompts, then best-effort prompts
and decodes. Best-effort requests in the CPU tier decode in cohorts that ride the lane. Every iteration with best-effort
work is predicted to end within the target for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from apex.perf.lane_load import context_tokens
from apex.perf.model import PerfModel, total_s
from apex.schedulers.hybrid import Predicting
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.omniserve.admission import backlog_before, first_token_s
from apex.schedulers.omniserve.lane import BEST_EFFORT, URGENT, Lane, Riders, rows_by_boundary
from apex.schedulers.omniserve.share import IterationLength, Turns
from apex.schedulers.omniserve.times import riders_s
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE, HOP, CohortPlan, IterationPlan
from swiftllm.core.request import FinishReason, Request, RequestRefusedForNow, Tier
from swiftllm.core.slo import Slo
from swiftllm.scheduling.cohorts import Cohort
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import gpu_decodes
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules

GPU_ONLY = Rules(spills=())


class OmniServe(Predicting):
    """Two service classes on one GPU. The CPU tier holds best-effort requests only.

    A plan names those cohorts that may ride: with all of them the iteration is predicted to keep the target. A cohort
    rides at most one boundary an iteration. The oldest cohort comes first.
    """

    rules = Rules(tiers=(Tier.GPU, Tier.CPU), urgent_tiers=(Tier.GPU,), spills=(BEST_EFFORT,))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        if not config.overlaps:
            self.rules = GPU_ONLY
        self._slo = config.slo
        self.lengths = LengthsSeen()
        self._length = IterationLength()
        self._turns = Turns(config.max_wait_iterations)

    @property
    def slo(self) -> Slo:
        return self._slo

    def ended(self, request: Request) -> None:
        if request.service_class is URGENT and request.finish_reason is not FinishReason.ABORT:
            self.lengths.add_output(request.output_len)

    def check_targets(self, request: Request, residents: Residents) -> None:
        if request.service_class is not URGENT or self.config.disable_admission_control:
            return
        backlog = backlog_before(request, residents, self.lengths)
        waited_s = residents.now() - request.arrival_s
        budget = residents.limits.max_num_batched_tokens
        expected_s = waited_s + first_token_s(self.model, self.slo, backlog, budget)
        late_s = expected_s - self.slo.first_token_s
        if late_s > 0:
            expected = f"is expected after {expected_s:.1f} s" if isfinite(late_s) else "cannot be predicted now"
            raise RequestRefusedForNow(
                f"the first token {expected}, and the target of {self.slo.ttft_s:g} s less its margin is "
                f"{self.slo.first_token_s:g} s: try again later, or ask for best effort",
                retry_after_s=late_s if isfinite(late_s) else self.slo.ttft_s,
            )

    def plan(self, residents: Residents) -> IterationPlan:
        draft, target_s = Draft(residents), self.slo.iteration_s
        lane = Lane(draft, self.model)
        residents.may_swap_out = lambda request: lane.has_time_to_move(request, target_s)
        overdue = self._turns.overdue_decode(residents)
        reserved = overdue is not None or self._turns.prompts_are_overdue(residents.iteration)
        draft.tokens_left -= reserved
        gpu_decodes(draft, URGENT)
        lane.add_urgent_prompts(target_s)
        draft.tokens_left += reserved
        urgent_s = lane.iteration_s()
        limit_s = self._length.limit_s(residents, self.model, target_s, urgent_s)
        # Growing may swap, so best-effort decodes rest where others fill the time already.
        decodes = residents.grow_on_gpu(BEST_EFFORT, draft.tokens_left) if urgent_s <= limit_s else []
        if overdue is not None and overdue.tier is Tier.GPU:
            if residents.hold_on_gpu(overdue, overdue.num_tokens):
                draft.add_decodes([overdue])
            decodes = [request for request in decodes if request is not overdue and request.tier is Tier.GPU]
        ready = residents.grow_on_cpu(BEST_EFFORT)
        riding, starting = lane.choose_riders(ready, limit_s, self.most_cohorts, overdue)
        self.fill(lane, decodes, rows_by_boundary(riding, starting), limit_s)
        if lane.is_empty and not riding:
            starting = starting or ready[:1]  # nothing else goes on, so the least does, whatever the target
        return self._plan_cohorts(lane, riding, starting, limit_s)

    @property
    def most_cohorts(self) -> int:
        """Cohorts under way at once: one at each boundary."""
        return self.model.num_layers + 1

    def fill(self, lane: Lane, decodes: Sequence[Request], riders: Riders, limit_s: float) -> None:
        """Best-effort work of the lane beside ``riders``: prompts before decodes (section 3.3.2)."""
        self.add_prompts(lane, riders, limit_s)
        lane.add_decodes(decodes, riders, limit_s)
        lane.recall(riders, limit_s)

    def add_prompts(self, lane: Lane, riders: Riders, limit_s: float) -> None:
        """Best-effort prompts within the limit, or within the shares saved for them."""
        iteration = lane.residents.iteration
        saved_s = (1 + self._turns.saved_share(iteration)) * lane.iteration_s(riders)
        limit_s = max(limit_s, min(self.slo.iteration_s, saved_s))
        if lane.add_prompts(riders, limit_s, must=self._turns.prompts_are_overdue(iteration)):
            self._turns.last_prompt = iteration

    def cohort_plans(self, cohorts: Sequence[Cohort], spare_s: float) -> tuple[list[CohortPlan], float]:
        """How cohorts cross boundaries, and the seconds that this takes beside one ride of each.

        ``spare_s`` is the time left if each rides once.
        """
        return [cohort.plan(HOP) for cohort in cohorts], 0.0

    def _plan_cohorts(
        self, lane: Lane, riding: list[Cohort], starting: Sequence[Request], limit_s: float
    ) -> IterationPlan:
        residents, target_s = lane.residents, self.slo.iteration_s
        for request in lane.draft.decodes:
            request.last_served = residents.iteration
        recalled = {swap.request.request_id for swap in residents.kv.swaps if swap.request is not None}
        starting = [request for request in starting if request.request_id not in recalled]
        expected_s = lane.iteration_s(rows_by_boundary(riding, starting))
        cohorts = [*riding, residents.cohorts.start(starting)] if starting else riding
        plans, added_s = self.cohort_plans(cohorts, limit_s - expected_s)
        expected_s += added_s
        if lane.is_empty:
            expected_s = min(expected_s, target_s)
        self._length.add_iteration(expected_s, residents.iteration)
        # With an empty lane nothing else would end the iteration before the cohorts have their tokens.
        return lane.draft.plan(plans, {"iteration_s": expected_s}, time_limit_s=target_s)


class OmniServeStepping(OmniServe):
    """OmniServe with few large cohorts that run free, each as often as the target allows. This is not in a paper.

    A rider crosses one boundary in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the CPU
    is. A step costs the lane the weights of a layer once more. With large cohorts that is little for each request.

    Decodes are as many as requests are resident, but a backlog of prompts has no end. Where prompts come first, decodes
    wait until the tiers are full. So prompts get the time that decodes leave.
    """

    @property
    def most_cohorts(self) -> int:
        return self.config.max_cohorts

    def fill(self, lane: Lane, decodes: Sequence[Request], riders: Riders, limit_s: float) -> None:
        lane.add_decodes(decodes, riders, limit_s)
        lane.recall(riders, limit_s)
        self.add_prompts(lane, riders, limit_s - self._steps_s(lane.residents.cohorts.under_way(), limit_s))

    def _steps_s(self, cohorts: Sequence[Cohort], limit_s: float) -> float:
        """Seconds of the steps for which the worker can be ready in an iteration of ``limit_s``, beside one ride."""
        loads = [(len(cohort.members), context_tokens(cohort.members)) for cohort in cohorts]
        round_s = total_s(self.model.cpu_attention_s(*load) for load in loads)  # of the worker, for a layer of each
        rounds = limit_s / round_s if round_s else 0.0
        steps = [max(0.0, min(rounds, self.model.num_layers - cohort.boundary) - 1) for cohort in cohorts]
        each_s = [self.model.linear_s(rows) + self.model.hand_over_s(rows) for rows, _ in loads]
        return total_s(count * step_s for count, step_s in zip(steps, each_s, strict=True))

    def cohort_plans(self, cohorts: Sequence[Cohort], spare_s: float) -> tuple[list[CohortPlan], float]:
        plans, added_s = [], 0.0
        for cohort in sorted(cohorts, key=lambda cohort: -len(cohort.members)):
            rows, steps_s = len(cohort.members), [0.0]
            for boundary in range(cohort.boundary, self.model.num_layers):
                # A step is a ride beside an empty lane. Some crossings will be cheaper rides.
                seconds = steps_s[-1] + riders_s(self.model, 0, 0, {boundary: rows})
                if added_s + seconds > spare_s:
                    break
                steps_s.append(seconds)
            crossings = len(steps_s) - 1
            if crossings > 1:
                added_s += steps_s[-1]
                plans.append(cohort.plan(replace(FREE, most=crossings)))
            else:
                plans.append(cohort.plan(HOP))
        return plans, added_s
