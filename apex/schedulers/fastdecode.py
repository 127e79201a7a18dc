"""FastDecode+ as NEO rebuilt it (NEO section 5.1): all decode attention on the CPU, two even batches."""

from __future__ import annotations

from apex.perf.lane_load import LaneLoad
from apex.schedulers.base import OffloadScheduler
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Tier
from swiftllm.scheduling.plan_draft import PlanDraft


class FastDecodeScheduler(OffloadScheduler):
    """Keeps every KV cache in the CPU tier; the GPU computes prefills and linear layers only."""

    decode_tiers = (Tier.CPU,)

    def _may_offload(self) -> bool:
        config = self.config
        if config.strategy not in ("auto", "asymmetric-pipelining") or config.disable_asymmetric_pipelining:
            raise ValueError("fastdecode has asymmetric pipelining only; use --system neo or apex")
        return True

    def decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        load = LaneLoad.from_draft(draft)
        if not ready:
            return self.gpu_only_plan(draft, load)
        pipeline = Pipeline(self.model, load)
        pipeline.split_evenly(ready)
        return self.pipelined_plan(draft, pipeline)
