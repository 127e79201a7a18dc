"""Schedulers that decode on the GPU only: SwiftLLM's, and that of vLLM's V1 engine, the baseline most people run.

Modelled of vLLM 0.19:

- Requests are served in order of arrival.
- One token budget serves decodes first, then prompt chunks.
- A prompt starts only where all of it has room. Blocks are allocated for the tokens of this step only.
- If blocks are missing, the newest request is preempted: its blocks are freed and it is computed again later.
- A step that preempts admits no request of the class that it preempts.

The papers' baselines are older and reserve nothing. A simulation can also plan ahead, use graphs and hide the host's
work, as vLLM does (``apex/simulator/virtual/runtime.py``). Its prefix cache is that of all
systems. Not modelled: speculative decoding, priorities. Service classes are
this project's own and the same in every scheduler.
"""

from __future__ import annotations

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import ServiceClass
from swiftllm.scheduling.parts import gpu_decodes, new_prompts, one_tier, running_prompts
from swiftllm.scheduling.plan_builder import PlanBuilder
from swiftllm.scheduling.rules import SchedulingRules
from swiftllm.scheduling.scheduler import Scheduler
from swiftllm.scheduling.state import SchedulerState


class SwiftLLM(Scheduler):
    """Continuous batching with chunked prefill. The CPU tier only stores preempted requests."""

    rules = SchedulingRules(stores_by_age=False)

    def plan(self, state: SchedulerState) -> IterationPlan:
        return one_tier(state)


class Vllm(Scheduler):
    """Continuous batching that never uses the CPU tier."""

    rules = SchedulingRules(spills=(), reserve=0, by_chunk=True, whole_prompts=True)

    def __init__(self, rules: SchedulingRules | None = None) -> None:
        """``rules``: in place of the usual ones."""
        if rules is not None:
            self.rules = rules

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder = PlanBuilder(state)
        for service_class in ServiceClass:
            gpu_decodes(builder, service_class)
            running_prompts(builder, service_class)
            if all(request.service_class is not service_class for request in state.recomputed):
                new_prompts(builder, service_class)
        return builder.plan()
