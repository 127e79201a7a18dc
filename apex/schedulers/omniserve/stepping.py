"""OmniServe whose cohorts also step, and whose best-effort decodes come before prompts. This is not in a paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from apex.perf.lane_load import context_tokens
from apex.perf.model import total_s
from apex.schedulers.omniserve.lane import Lane, Riders
from apex.schedulers.omniserve.policy import OmniServe
from apex.schedulers.omniserve.times import riders_s
from swiftllm.core.plan import FREE, HOP, CohortPlan
from swiftllm.core.request import Request
from swiftllm.scheduling.cohorts import Cohort


class OmniServeStepping(OmniServe):
    """Few large cohorts that run free, each as often as the target allows; prompts get the time that decodes leave.

    A rider crosses one boundary in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the CPU
    is. A step costs the lane the weights of a layer once more. With large cohorts that is little for each request.

    Decodes are as many as requests are resident, but a backlog of prompts has no end. Where prompts come first, decodes
    wait until the tiers are full.
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
