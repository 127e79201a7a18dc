"""The load of a GPU batch: the sizes from which its times are predicted and simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from apex.perf.model import PerfModel
from swiftllm.core.plan import GpuBatchItem, IterationPlan
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.plan_builder import PlanBuilder


@dataclass(frozen=True)
class GpuBatchLoad:
    """The work of a GPU batch, in tokens and requests. ``decode_context`` is summed over the decodes, in tokens."""

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
    def from_items(gpu_batch: Sequence[GpuBatchItem]) -> GpuBatchLoad:
        prefills = [item for item in gpu_batch if item.is_prefill]
        starts = [item.start for item in gpu_batch if not item.is_prefill]
        return GpuBatchLoad._from_parts(len(starts), sum(starts) + len(starts), prefills, max(starts, default=-1) + 1)

    @staticmethod
    def from_builder(builder: PlanBuilder | IterationPlan) -> GpuBatchLoad:
        context = builder.decode_context if isinstance(builder, PlanBuilder) else context_tokens(builder.decodes)
        return GpuBatchLoad._from_parts(len(builder.decodes), context, builder.prefills)

    @staticmethod
    def _from_parts(
        num_decodes: int, decode_context: int, prefills: Sequence[GpuBatchItem], longest_context: int = 0
    ) -> GpuBatchLoad:
        return GpuBatchLoad(
            tokens=num_decodes + sum([item.num_tokens for item in prefills]),
            requests=num_decodes + len(prefills),
            decodes=num_decodes,
            decode_context=decode_context,
            chunks=tuple([(item.num_tokens, item.start) for item in prefills]),
            open_chunks=sum([not item.samples for item in prefills]),
            longest_context=longest_context,
            cpu_tier_chunks=tuple([(item.num_tokens, item.start) for item in prefills if item.tier is Tier.CPU]),
        )

    def without(self, chunk: GpuBatchItem) -> GpuBatchLoad:
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
        """Seconds of one layer's attention in the GPU batch, prefills and decodes."""
        return model.gpu_batch_attention_s(
            self.decodes, self.decode_context, self.chunks, self.longest_context, self.cpu_tier_chunks
        )

    def prefill_attention_s(self, model: PerfModel) -> float:
        """The same of the prefills alone."""
        return model.prefill_attention_s(self.chunks, self.cpu_tier_chunks)


def context_tokens(requests: Sequence[Request]) -> int:
    """Tokens that a decode of all these requests attends to."""
    return sum([request.num_tokens for request in requests])
