"""The scheduler of vLLM's V1 engine, GPU only: the baseline most people run.

Modelled:

- Requests are served in order of arrival.
- One token budget serves decodes first, then prompt chunks.
- Blocks are allocated for the tokens of this step only.
- If blocks are missing, the newest request is preempted: its blocks are freed and it is computed again later.
- A step that preempts admits no request.

Not modelled: prefix caching, the effects of CUDA graphs, speculative decoding, priorities.
"""

from __future__ import annotations

from collections.abc import Mapping

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import Scheduler


class VllmScheduler(Scheduler):
    """Continuous batching that never uses the CPU tier."""

    def schedule(self) -> IterationPlan:
        draft = PlanDraft(self.limits.max_num_batched_tokens)
        preemptions_before = self.num_preemptions
        self._schedule_gpu_decodes(draft)
        self._schedule_running_prefills(draft)
        if self.num_preemptions == preemptions_before:
            self._admit(draft)
        return draft.build_plan()

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        self._recompute(request, draft)

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        for request in list(self.prefilling):
            if self.kv.allocate_slots(request, self._tokens_to_hold(request, draft)):
                draft.add_prefill(request)
            else:  # no request is admitted while a prompt is unfinished, so this one is the newest
                self._push_out(request, draft)

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        return min(request.num_tokens, request.num_computed_tokens + draft.tokens_left)

    def _may_start(self, tier: Tier, request: Request, num_blocks: int) -> bool:
        return num_blocks <= self.kv.num_free(tier)


GPU_ONLY_SCHEDULERS: Mapping[str, type[Scheduler]] = {"vllm": VllmScheduler, "swiftllm": Scheduler}
"""The schedulers that decode on the GPU alone, by the name of their system."""
