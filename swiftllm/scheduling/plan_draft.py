"""The draft of a plan: what the next iteration contains so far, and the token budget left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swiftllm.core.plan import CohortPlan, IterationPlan, LaneItem, Strategy, Swap
from swiftllm.core.request import Request


class PlanDraft:
    """An iteration plan that a scheduler is still adding to."""

    def __init__(self, token_budget: int) -> None:
        self.decodes: list[Request] = []
        self.prefills: list[LaneItem] = []
        self.swaps: list[Swap] = []
        self.tokens_left = token_budget
        self.admitted: set[str] = set()  # requests that left the waiting queue for this plan

    def add_decodes(self, requests: Sequence[Request]) -> None:
        self.decodes += requests
        self.tokens_left -= len(requests)

    def add_prefill(self, request: Request) -> None:
        """Add a chunk: all uncomputed tokens of the request, or as many as the budget allows."""
        num_tokens = min(request.num_uncomputed, self.tokens_left)
        if num_tokens > 0:
            self.prefills.append(LaneItem(request, request.num_computed_tokens, num_tokens, request.tier, True))
            self.tokens_left -= num_tokens

    def remove_prefill(self, item: LaneItem) -> None:
        self.prefills.remove(item)
        self.tokens_left += item.num_tokens

    def build_plan(
        self,
        strategy: Strategy = Strategy.GPU_ONLY,
        cohorts: Sequence[CohortPlan] = (),
        leaving: Iterable[str] = (),
        predicted: dict[str, float] | None = None,
    ) -> IterationPlan:
        return IterationPlan(
            strategy,
            tuple(self.decodes),
            tuple(self.prefills),
            tuple(cohorts),
            tuple(self.swaps),
            frozenset(leaving),
            predicted or {},
        )
