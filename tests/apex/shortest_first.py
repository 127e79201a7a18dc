"""A policy from outside the tree: GPU only, and the shortest prompt of a class starts first."""

from __future__ import annotations

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import ServiceClass
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import gpu_decodes, running_prompts, start_prompt
from swiftllm.scheduling.policy import Policy
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules


class ShortestFirst(Policy):
    """What is preempted is computed again."""

    rules = Rules(spills=())

    def plan(self, residents: Residents) -> IterationPlan:
        draft = Draft(residents)
        for service_class in ServiceClass:
            gpu_decodes(draft, service_class)
            running_prompts(draft, service_class)
            waiting = residents.waiting.of_class(service_class)
            for request in sorted(waiting, key=lambda request: request.num_tokens):
                if not start_prompt(draft, request):
                    break
        return draft.plan()
