"""OmniServe whose cohorts also step, in the time that best-effort prompts leave. This is not in a paper."""

from __future__ import annotations

from collections.abc import Sequence

from apex.schedulers.base import CohortState
from apex.schedulers.omniserve.scheduler import OmniServeScheduler
from swiftllm.core.plan import CohortPlan, SteppingRule


class OmniServeSteppingScheduler(OmniServeScheduler):
    """Few large cohorts that run free, each as often as the target allows.

    A rider crosses one boundary in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the CPU
    is. A step costs the lane the weights of a layer once more. With large cohorts that is little for each request.
    """

    @property
    def _most_cohorts(self) -> int:
        return self.config.max_cohorts

    def _cohort_plans(self, cohorts: Sequence[CohortState], spare_s: float) -> list[CohortPlan]:
        plans = []
        for cohort in sorted(cohorts, key=lambda cohort: -len(cohort.members)):
            step_s = self._step_s(len(cohort.members))
            steps = max(0, min(int(spare_s / step_s), self.model.num_layers - 1 - cohort.layer))
            spare_s -= steps * step_s
            plans.append(cohort.to_plan(SteppingRule.FREE_RUNNING, 1 + steps))
        return plans
