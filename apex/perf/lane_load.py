"""The load of a lane: the sizes from which its times are predicted and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apex.perf.model import PerfModel
from swiftllm.core.plan import IterationPlan, LaneItem
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.draft import Draft


@dataclass(frozen=True)
class LaneLoad:
    """The work of a lane, in tokens and requests. ``decode_context`` is summed over the decodes, in tokens."""

    tokens: int
    requests: int
    decodes: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens cached before) of each prefill
    open_chunks: int = 0  # those of the chunks after which their prompt goes on, so that they sample no token
    longest_context: int = 0  # of the decodes; 0 where they count as equal
    cpu_tier_chunks: tuple[tuple[int, int], ...] = ()  # those of the chunks whose K and V go to the CPU tier

    @property
    def sampled(self) -> int:
        """Rows that get a token."""
        return self.requests - self.open_chunks

    @staticmethod
    def from_items(lane: Sequence[LaneItem]) -> LaneLoad:
        prefills = [item for item in lane if item.is_prefill]
        starts = [item.start for item in lane if not item.is_prefill]
        return LaneLoad._from_parts(len(starts), sum(starts) + len(starts), prefills, max(starts, default=-1) + 1)

    @staticmethod
    def from_draft(draft: Draft | IterationPlan) -> LaneLoad:
        context = draft.decode_context if isinstance(draft, Draft) else context_tokens(draft.decodes)
        return LaneLoad._from_parts(len(draft.decodes), context, draft.prefills)

    @staticmethod
    def _from_parts(
        num_decodes: int, decode_context: int, prefills: Sequence[LaneItem], longest_context: int = 0
    ) -> LaneLoad:
        return LaneLoad(
            tokens=num_decodes + sum([item.num_tokens for item in prefills]),
            requests=num_decodes + len(prefills),
            decodes=num_decodes,
            decode_context=decode_context,
            chunks=tuple([(item.num_tokens, item.start) for item in prefills]),
            open_chunks=sum([not item.samples for item in prefills]),
            longest_context=longest_context,
            cpu_tier_chunks=tuple([(item.num_tokens, item.start) for item in prefills if item.tier is Tier.CPU]),
        )

    def without(self, chunk: LaneItem) -> LaneLoad:
        """The load without one of its prefills."""
        chunks, cpu_tier_chunks = list(self.chunks), list(self.cpu_tier_chunks)
        for those in (chunks, cpu_tier_chunks) if chunk.tier is Tier.CPU else (chunks,):
            those.remove((chunk.num_tokens, chunk.start))
        return replace(
            self,
            tokens=self.tokens - chunk.num_tokens,
            requests=self.requests - 1,
            chunks=tuple(chunks),
            cpu_tier_chunks=tuple(cpu_tier_chunks),
            open_chunks=self.open_chunks - (not chunk.samples),
        )

    def gpu_attention_s(self, model: PerfModel) -> float:
        """Seconds of one layer's attention in the lane, prefills and decodes."""
        return model.lane_attention_s(
            self.decodes, self.decode_context, self.chunks, self.longest_context, self.cpu_tier_chunks
        )

    def prefill_attention_s(self, model: PerfModel) -> float:
        """The same of the prefills alone."""
        return model.prefill_attention_s(self.chunks, self.cpu_tier_chunks)


def context_tokens(requests: Sequence[Request]) -> int:
    """Tokens that a decode of all these requests attends to."""
    return sum([request.num_tokens for request in requests])
