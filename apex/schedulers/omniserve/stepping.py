"""OmniServe whose cohorts also step, in the time that best-effort prompts leave. This is not in a paper."""

from __future__ import annotations

from collections.abc import Sequence

from apex.schedulers.base import CohortState
from apex.schedulers.omniserve.scheduler import OmniServeScheduler
from apex.schedulers.omniserve.times import riders_s
from swiftllm.core.plan import CohortPlan, SteppingRule


class OmniServeSteppingScheduler(OmniServeScheduler):
    """Few large cohorts that run free, each as often as the target allows.

    A rider crosses one boundary in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the CPU
    is. A step costs the lane the weights of a layer once more. With large cohorts that is little for each request.
    """

    @property
    def _most_cohorts(self) -> int:
        return self.config.max_cohorts

    def _cohort_plans(self, cohorts: Sequence[CohortState], spare_s: float) -> tuple[list[CohortPlan], float]:
        plans, added_s = [], 0.0
        for cohort in sorted(cohorts, key=lambda cohort: -len(cohort.members)):
            rows, steps_s = len(cohort.members), [0.0]
            for boundary in range(cohort.layer, self.model.num_layers):
                # A step is a ride beside an empty lane. Some crossings will be cheaper rides.
                seconds = steps_s[-1] + riders_s(self.model, 0, 0, {boundary: rows})
                if added_s + seconds > spare_s:
                    break
                steps_s.append(seconds)
            crossings = len(steps_s) - 1
            if crossings > 1:
                added_s += steps_s[-1]
                plans.append(cohort.to_plan(SteppingRule.FREE_RUNNING, crossings))
            else:
                plans.append(cohort.to_plan(SteppingRule.RIDE_IF_READY))
        return plans, added_s
