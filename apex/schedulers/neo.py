"""NEO (MLSys'25): load-aware scheduling with asymmetric pipelining; steps as in its section 3.2 and appendix A."""

from __future__ import annotations

from apex.perf.lane_load import LaneLoad
from apex.schedulers.base import OffloadScheduler
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Tier
from swiftllm.scheduling.plan_draft import PlanDraft


class NeoScheduler(OffloadScheduler):
    """Compares a GPU-only and a pipelined schedule each iteration and takes the one with more requests per second."""

    def _may_offload(self) -> bool:
        config = self.config
        if config.strategy == "asynchronous-overlap":
            raise ValueError("neo has no asynchronous overlap; use --system apex for it")
        return config.strategy != "gpu-only" and not config.disable_asymmetric_pipelining

    def decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        pipeline = Pipeline(self.model, LaneLoad.from_draft(draft))
        if not pipeline.load.requests:
            pipeline.split_evenly(ready)  # no lane to hide behind: the two batches hide each other
            return self.pipelined_plan(draft, pipeline)
        pipeline.add_hidden(ready)
        if ready.overdue is not None:
            pipeline.add_overdue(ready.overdue)
            return self.pipelined_plan(draft, pipeline)
        self._reduce_cpu_prefills(draft, pipeline)
        if any(batch.size for batch in pipeline.batches):
            gpu_only_rate = pipeline.load.requests / self._gpu_only_s(pipeline.load)
            forced = self.config.strategy == "asymmetric-pipelining"
            if forced or pipeline.num_requests / pipeline.iteration_s() > gpu_only_rate:
                return self.pipelined_plan(draft, pipeline)
        return self.gpu_only_plan(draft, pipeline.load)

    def _reduce_cpu_prefills(self, draft: PlanDraft, pipeline: Pipeline) -> None:
        """Step 5: postpone prefills bound for the CPU, the youngest first, while the CPU stays hidden without them.

        Prefills within the flat part of the linear time stay, since they cost the lane nothing. The last one stays too:
        otherwise the CPU would never get any work.
        """
        for item in reversed([item for item in draft.prefills if item.tier is Tier.CPU]):
            load = pipeline.load
            pipeline.set_load(load.without(item))
            lane_tokens = pipeline.load.tokens + pipeline.batches[0].size
            if len(load.chunks) == 1 or lane_tokens < self.model.flat_linear_tokens or not pipeline.hides_cpu():
                pipeline.set_load(load)
                break
            draft.remove_prefill(item)
            if item.request.request_id in draft.admitted:
                self._requeue(item.request)
