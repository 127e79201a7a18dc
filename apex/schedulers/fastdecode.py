"""FastDecode+ as NEO rebuilt it (NEO section 5.1): all decode attention on the CPU, two even batches."""

from __future__ import annotations

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.hybrid import Predicting, gpu_only, pipelined
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Tier
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import two_tiers
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules


class FastDecode(Predicting):
    """Keeps every KV cache in the CPU tier; the GPU computes prefills and linear layers only."""

    rules = Rules(tiers=(Tier.CPU,))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        if not config.pipelines:
            raise ValueError("fastdecode has asymmetric pipelining only; use --system neo or apex")
        super().__init__(model, config)

    def plan(self, residents: Residents) -> IterationPlan:
        draft = Draft(residents)
        ready = CpuDecodes(two_tiers(draft))
        load = LaneLoad.from_draft(draft)
        if not ready:
            return gpu_only(draft, self.model, load)
        pipeline = Pipeline(self.model, load)
        pipeline.split_evenly(ready)
        return pipelined(draft, pipeline)
