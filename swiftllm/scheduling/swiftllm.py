"""The scheduler of SwiftLLM: decodes on the GPU only; the CPU tier stores preempted requests."""

from __future__ import annotations

from swiftllm.core.plan import IterationPlan
from swiftllm.scheduling.parts import one_tier
from swiftllm.scheduling.policy import Policy
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules


class SwiftLLM(Policy):
    """Continuous batching with chunked prefill. What is stored is evicted for a more urgent class only."""

    rules = Rules(stores_by_age=False)

    def plan(self, residents: Residents) -> IterationPlan:
        return one_tier(residents)
