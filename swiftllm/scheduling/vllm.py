"""The scheduler of vLLM's V1 engine, GPU only: the baseline most people run.

Modelled:

- Requests are served in order of arrival.
- One token budget serves decodes first, then prompt chunks.
- Blocks are allocated for the tokens of this step only.
- If blocks are missing, the newest request is preempted: its blocks are freed and it is computed again later.
- A step that preempts admits no request of the class that it preempts.

Not modelled: prefix caching, the effects of CUDA graphs, speculative decoding, priorities. Service classes are this
project's own and the same in every scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import Scheduler


class VllmScheduler(Scheduler):
    """Continuous batching that never uses the CPU tier."""

    def schedule(self) -> IterationPlan:
        draft = self._new_draft()
        for service_class in ServiceClass:
            self._schedule_gpu_decodes(draft, service_class)
            self._schedule_running_prefills(draft, service_class)
            if all(request.service_class is not service_class for request in draft.recomputed):
                self._admit(draft, service_class)
        return draft.build_plan()

    def _push_out(self, request: Request, draft: PlanDraft) -> None:
        self._recompute(request, draft)

    def _schedule_running_prefills(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        for request in self.prefilling.of_class(service_class):
            is_running = request.tier is Tier.GPU  # not preempted for an older one meanwhile
            if is_running and self._make_gpu_room(request, self._tokens_to_hold(request, draft), draft):
                draft.add_prefill(request)

    def _tokens_to_hold(self, request: Request, draft: PlanDraft) -> int:
        return min(request.num_tokens, request.num_computed_tokens + draft.prompt_tokens_left)

    def _has_room(self, tier: Tier, num_blocks: int, without: Sequence[Request] = ()) -> bool:
        return num_blocks <= self._num_free(tier, without)
