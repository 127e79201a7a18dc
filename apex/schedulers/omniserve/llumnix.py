"""Llumnix (OSDI'24) on one instance, as OmniServe's evaluation uses it: priorities decided by memory, not by time."""

from __future__ import annotations

from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.vllm import VllmScheduler

RESERVED_SHARE = 0.1
"""Of the GPU's blocks, the share kept free of best-effort requests. Assumed: neither paper states it."""


class LlumnixScheduler(VllmScheduler):
    """vLLM's scheduler with two service classes and a reserve of GPU blocks for latency-sensitive requests.

    Llumnix places and migrates requests among instances by their memory, and keeps headroom for those of high priority.
    With one instance only the headroom remains. No iteration is bounded by a target.
    """

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        if request.service_class is ServiceClass.BEST_EFFORT:
            num_blocks += int(RESERVED_SHARE * self.kv.capacity(tier))
        return super()._may_start(tier, request, num_blocks)
