"""A scheduler from outside the tree: GPU only, and the shortest prompt of a class starts first."""

from __future__ import annotations

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import ServiceClass
from swiftllm.scheduling.scheduler import PlanBuilder, Scheduler, gpu_decodes, running_prompts, start_prompt
from swiftllm.scheduling.state import SchedulerState, SchedulingRules


class ShortestFirst(Scheduler):
    """What is preempted is computed again."""

    rules = SchedulingRules(spills=())

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder = PlanBuilder(state)
        for service_class in ServiceClass:
            gpu_decodes(builder, service_class)
            running_prompts(builder, service_class)
            waiting = state.waiting.of_class(service_class)
            for request in sorted(waiting, key=lambda request: request.num_tokens):
                if not start_prompt(builder, request):
                    break
        return builder.plan()
