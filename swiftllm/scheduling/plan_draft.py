"""The draft of a plan: what the next iteration contains so far, and the token budget left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swiftllm.core.plan import CohortPlan, IterationPlan, LaneItem, Strategy, Swap
from swiftllm.core.request import Request, Tier


class PlanDraft:
    """An iteration plan that a scheduler is still adding to.

    ``tokens_left`` limits what is added. ``prompt_limit`` limits prompt tokens beside that; schedulers may lower it.
    """

    def __init__(self, token_budget: int) -> None:
        self.decodes: list[Request] = []
        self.prefills: list[LaneItem] = []
        self.swaps: list[Swap] = []
        self.tokens_left = self.prompt_limit = token_budget
        self.admitted: set[str] = set()  # requests that left the waiting queue for this plan
        self.recomputed: list[Request] = []  # requests that lost their blocks to others
        self._decode_context = self._num_counted = 0

    def add_decodes(self, requests: Sequence[Request]) -> None:
        self.decodes += requests
        self.tokens_left -= len(requests)

    @property
    def decode_context(self) -> int:
        """Tokens that the decodes attend to. Each decode is counted once, since there may be a thousand of them."""
        self._decode_context += sum([request.num_tokens for request in self.decodes[self._num_counted :]])
        self._num_counted = len(self.decodes)
        return self._decode_context

    @property
    def prompt_tokens_left(self) -> int:
        return min(self.tokens_left, self.prompt_limit)

    def add_prefill(self, request: Request) -> None:
        """Add a chunk: all uncomputed tokens of the request, or as many as the budget allows."""
        num_tokens = min(request.num_uncomputed, self.prompt_tokens_left)
        if num_tokens > 0:
            self.prefills.append(LaneItem(request, request.num_computed_tokens, num_tokens, request.tier, True))
            self.tokens_left -= num_tokens
            self.prompt_limit -= num_tokens

    def remove_prefill(self, item: LaneItem) -> None:
        self.prefills.remove(item)
        self.tokens_left += item.num_tokens
        self.prompt_limit += item.num_tokens

    @property
    def swap_source(self) -> Tier | None:
        """The tier that the swaps leave. All go in one direction, so that a backend may copy them at once."""
        return self.swaps[0].source if self.swaps else None

    def build_plan(
        self,
        strategy: Strategy = Strategy.GPU_ONLY,
        cohorts: Sequence[CohortPlan] = (),
        leaving: Iterable[str] = (),
        predicted: dict[str, float] | None = None,
        time_limit_s: float | None = None,
    ) -> IterationPlan:
        return IterationPlan(
            strategy,
            tuple(self.decodes),
            tuple(self.prefills),
            tuple(cohorts),
            tuple(self.swaps),
            frozenset(leaving),
            predicted or {},
            time_limit_s,
        )
