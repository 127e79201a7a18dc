"""NEO (MLSys'25): load-aware scheduling with asymmetric pipelining; steps as in its section 3.2 and appendix A."""

from __future__ import annotations

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.hybrid import Hybrid, gpu_only, lane_s, pipelined, ready_decodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Tier
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import one_tier
from swiftllm.scheduling.residents import Residents


class Neo(Hybrid):
    """Compares a GPU-only and a pipelined schedule each iteration and takes the one with more requests per second."""

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        if config.strategy == "asynchronous-overlap":
            raise ValueError("neo has no asynchronous overlap; use --system apex for it")
        super().__init__(model, config, uses_cpu=config.pipelines)

    def plan(self, residents: Residents) -> IterationPlan:
        if not self.uses_cpu:
            return one_tier(residents)
        draft = Draft(residents)
        return self.decide(draft, ready_decodes(draft, self.patience))

    def decide(self, draft: Draft, ready: CpuDecodes) -> IterationPlan:
        """The plan for what is drafted and the CPU decodes that are ready."""
        pipeline = Pipeline(self.model, LaneLoad.from_draft(draft))
        if not pipeline.load.requests:
            pipeline.split_evenly(ready)  # no lane to hide behind: the two batches hide each other
            return pipelined(draft, pipeline)
        pipeline.add_hidden(ready)
        if ready.overdue is not None:
            pipeline.add_overdue(ready.overdue)
            return pipelined(draft, pipeline)
        put_off_cpu_prompts(draft, pipeline)
        if any(batch.size for batch in pipeline.batches):
            gpu_only_rate = pipeline.load.requests / lane_s(self.model, pipeline.load)
            if self.config.is_forced or pipeline.num_requests / pipeline.iteration_s() > gpu_only_rate:
                return pipelined(draft, pipeline)
        return gpu_only(draft, self.model, pipeline.load)


def put_off_cpu_prompts(draft: Draft, pipeline: Pipeline) -> None:
    """Step 5: postpone prefills bound for the CPU, the youngest first, while the CPU stays hidden without them.

    Prefills within the flat part of the linear time stay, since they cost the lane nothing. The last one stays too:
    otherwise the CPU would never get any work.
    """
    for item in reversed([item for item in draft.prefills if item.tier is Tier.CPU]):
        load = pipeline.load
        pipeline.set_load(load.without(item))
        lane_tokens = pipeline.load.tokens + pipeline.batches[0].size
        if len(load.chunks) == 1 or lane_tokens < pipeline.model.linear_knee_tokens or not pipeline.hides_cpu():
            pipeline.set_load(load)
            break
        draft.put_off(item)
