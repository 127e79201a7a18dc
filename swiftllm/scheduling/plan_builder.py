"""The plan builder of a plan: what the next iteration contains so far, and the token budget left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swiftllm.core.plan import CpuBatchPlan, GpuBatchItem, IterationPlan
from swiftllm.core.request import Request
from swiftllm.scheduling.state import SchedulerState


class PlanBuilder:
    """An iteration plan that a scheduler is still adding to.

    ``tokens_left`` limits what is added. ``prompt_limit`` limits prompt tokens beside that; schedulers may lower it.
    """

    def __init__(self, state: SchedulerState) -> None:
        """Begins a plan: what ``state`` move from now on is part of it."""
        state.begin_plan()
        self.state = state
        self.decodes: list[Request] = []
        self.prefills: list[GpuBatchItem] = []
        self.tokens_left = self.prompt_limit = state.limits.max_num_batched_tokens
        self._started: set[str] = set()
        self._computed_blocks: set[bytes] = set()  # names of those that are full after this plan
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

    def tokens_to_hold(self, request: Request, num_found: int = 0) -> int:
        """Tokens for which a prompt needs blocks: all, or with ``by_chunk`` as many as the budget allows, beside those
        in ``num_found`` cached blocks."""
        if not self.state.rules.by_chunk:
            return request.num_tokens
        num_computed = request.num_computed_tokens + num_found * self.state.kv.block_size
        return min(request.num_tokens, num_computed + self.prompt_tokens_left)

    def computes_block(self, request: Request, index: int) -> bool:
        """Whether this plan computes this block of a request's tokens for another request."""
        names = request.block_hashes or ()
        return bool(self._computed_blocks) and index < len(names) and names[index] in self._computed_blocks

    def add_prefill(self, request: Request, *, starts: bool = False) -> None:
        """Add a chunk: all uncomputed tokens of the request, or as many as the budget allows.

        ``starts``: the request waited until this plan.
        """
        num_tokens, tier = min(request.num_uncomputed, self.prompt_tokens_left), request.tier
        assert tier is not None, "a prompt without blocks"
        if num_tokens > 0:
            start, size = request.num_computed_tokens, self.state.kv.block_size
            self.prefills.append(GpuBatchItem(request, start, num_tokens, tier, True))
            if request.block_hashes is not None:
                self._computed_blocks.update(request.block_hashes[start // size : (start + num_tokens) // size])
            self.tokens_left -= num_tokens
            self.prompt_limit -= num_tokens
        if starts:
            self._started.add(request.request_id)

    def put_off(self, item: GpuBatchItem) -> None:
        """Take a chunk out again. A request that starts with it goes back to those that wait."""
        self.prefills.remove(item)
        self.tokens_left += item.num_tokens
        self.prompt_limit += item.num_tokens
        if item.request.request_id in self._started:
            self.state.requeue(item.request)

    def plan(
        self,
        cpu_batches: Sequence[CpuBatchPlan] = (),
        predicted: Mapping[str, float] | None = None,
        time_limit_s: float | None = None,
    ) -> IterationPlan:
        state = self.state
        return IterationPlan(
            tuple(self.decodes),
            tuple(self.prefills),
            tuple(cpu_batches),
            tuple(state.kv.swaps),
            frozenset(state.cpu_batches.leaving),
            dict(predicted or {}),
            time_limit_s,
        )
