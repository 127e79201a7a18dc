"""NEO (MLSys'25), and FastDecode+ as NEO rebuilt it: asymmetric pipelining, with and without a view of the load."""

from __future__ import annotations

from apex.perf.model import GpuBatchLoad, PerfModel
from apex.schedulers.hybrid import (
    CpuDecodes,
    Hybrid,
    Pipeline,
    Predicting,
    add_cpu_decodes,
    gpu_batch_s,
    gpu_only,
    pipelined,
    put_off_cpu_prompts,
)
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Tier
from swiftllm.scheduling.scheduler import PlanBuilder, two_tiers
from swiftllm.scheduling.state import SchedulerState, SchedulingRules


class Neo(Hybrid):
    """Compares a GPU-only and a pipelined schedule each iteration and takes the one with more requests per second.

    Steps as in section 3.2 and appendix A.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        if config.strategy == "asynchronous-overlap":
            raise ValueError("neo has no asynchronous overlap; use --system apex for it")
        super().__init__(model, config, can_overlap=False)

    def decide(self, builder: PlanBuilder, startable: CpuDecodes) -> IterationPlan:
        pipeline = Pipeline(self.model, GpuBatchLoad.from_builder(builder))
        add_cpu_decodes(pipeline, startable, self.config)
        if not pipeline.load.requests or startable.overdue is not None:
            return pipelined(builder, pipeline)
        put_off_cpu_prompts(builder, pipeline, self.config)
        if any(batch.size for batch in pipeline.batches):
            gpu_only_rate = pipeline.load.requests / gpu_batch_s(self.model, pipeline.load)
            if self.config.is_forced or pipeline.num_requests / pipeline.iteration_s() > gpu_only_rate:
                return pipelined(builder, pipeline)
        return gpu_only(builder, self.model, pipeline.load)


class FastDecode(Predicting):
    """FastDecode+ (NEO section 5.1): every KV cache is in the CPU tier, and its decodes are two even batches.

    The GPU computes prefills and linear layers only.
    """

    rules = SchedulingRules(tiers=(Tier.CPU,))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        if not config.pipelines:
            raise ValueError("fastdecode has asymmetric pipelining only; use --system neo or apex")
        super().__init__(model, config)

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder = PlanBuilder(state)
        startable = CpuDecodes(two_tiers(builder))
        load = GpuBatchLoad.from_builder(builder)
        if not startable:
            return gpu_only(builder, self.model, load)
        pipeline = Pipeline(self.model, load)
        pipeline.split_evenly(startable)
        return pipelined(builder, pipeline)
