"""OmniServe whose cohorts also step, and whose best-effort decodes come before prompts. This is not in a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apex.perf.lane_load import context_tokens
from apex.schedulers.base import CohortState
from apex.schedulers.omniserve.scheduler import REST, OmniServeScheduler
from swiftllm.core.plan import CohortPlan, SteppingRule
from swiftllm.core.request import Request
from swiftllm.scheduling.plan_draft import PlanDraft


class OmniServeSteppingScheduler(OmniServeScheduler):
    """Few large cohorts that run free, each as often as the target allows; prompts get the time that decodes leave.

    A rider crosses one boundary in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the CPU
    is. A step costs the lane the weights of a layer once more. With large cohorts that is little for each request.

    Decodes are as many as requests are resident, but a backlog of prompts has no end. Where prompts come first, decodes
    wait until the tiers are full.
    """

    @property
    def _most_cohorts(self) -> int:
        return self.config.max_cohorts

    def _fill(self, draft: PlanDraft, decodes: Sequence[Request], riders: Mapping[int, int], limit_s: float) -> None:
        self._add_decodes(draft, decodes, riders, limit_s)
        self._recall(draft, riders, limit_s)
        self._add_prompts(draft, REST, riders, limit_s - self._steps_s(limit_s))

    def _steps_s(self, limit_s: float) -> float:
        """Seconds of the steps for which the worker can be ready in an iteration of ``limit_s``, beside one ride."""
        cohorts = self._under_way()
        loads = [(len(cohort.members), context_tokens(cohort.members)) for cohort in cohorts]
        round_s = sum([self.model.cpu_attention_s(*load) for load in loads])  # of the worker, for a layer of each
        rounds = limit_s / round_s if round_s else 0.0
        steps = [max(0.0, min(rounds, self.model.num_layers - cohort.layer) - 1) for cohort in cohorts]
        return sum([count * self._step_s(rows) for count, (rows, _) in zip(steps, loads, strict=True)])

    def _cohort_plans(self, cohorts: Sequence[CohortState], spare_s: float) -> list[CohortPlan]:
        plans = []
        for cohort in sorted(cohorts, key=lambda cohort: -len(cohort.members)):
            step_s = self._step_s(len(cohort.members))
            steps = max(0, min(int(spare_s / step_s), self.model.num_layers - 1 - cohort.layer))
            spare_s -= steps * step_s
            plans.append(cohort.to_plan(SteppingRule.FREE_RUNNING, 1 + steps))
        return plans
