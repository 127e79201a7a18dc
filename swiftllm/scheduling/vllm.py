"""The scheduler of vLLM's V1 engine, GPU only: the baseline most people run.

Modelled: first come, first served; one token budget, from which decodes take first and chunks of prompts what is left;
blocks for just the tokens of this step; where they lack, the request that came last gives all of its own back and is
computed again later; nobody is admitted in a step that took blocks from somebody. Not modelled: prefix caching, the
effects of CUDA graphs, speculative decoding, priorities.
"""

from __future__ import annotations

from collections.abc import Mapping

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import Scheduler


class VllmScheduler(Scheduler):
    """Continuous batching that knows no CPU tier, however large that is."""

    def schedule(self) -> IterationPlan:
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        preemptions_before = self.num_preemptions
        self._schedule_gpu_decodes(draft)
        self._schedule_running_prefills(draft)
        if self.num_preemptions == preemptions_before:
            self._admit(draft)
        return draft.plan()

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        self._recompute(request, draft)

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        for request in list(self.prefilling):
            if self.kv.allocate_slots(request, self._tokens_to_hold(request, draft)):
                draft.add_prefill(request)
            else:  # nobody is admitted past a prompt under way, so the last that came is this request itself
                self._push_out(request, draft)

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        return min(request.num_tokens, request.num_computed_tokens + draft.tokens_left)

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        return num_blocks <= self.kv.num_free(tier)


GPU_ONLY_SCHEDULERS: Mapping[str, type[Scheduler]] = {"vllm": VllmScheduler, "swiftllm": Scheduler}
"""The schedulers that decode on the GPU alone, by the name of their system."""
