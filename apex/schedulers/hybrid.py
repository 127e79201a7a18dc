"""What schedulers that decode on the CPU share: predictions, patience with requests left out, and plans of known
form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter

from apex.perf.gpu_batch_load import GpuBatchLoad
from apex.perf.model import PerfModel
from apex.perf.online import OnlineCorrection
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import ALONE, JOINED, IterationPlan, StepResult
from swiftllm.core.request import Request, Tier
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.arrival_queue import arrival_order
from swiftllm.scheduling.cpu_batches import CpuBatch
from swiftllm.scheduling.parts import one_tier, two_tiers
from swiftllm.scheduling.plan_builder import PlanBuilder
from swiftllm.scheduling.rules import SchedulingRules
from swiftllm.scheduling.scheduler import Scheduler
from swiftllm.scheduling.state import SchedulerState

MOST_COPIES = 4096  # cached blocks that a plan copies to the CPU tier at most, however fast PCIe is


class Predicting(Scheduler):
    """A scheduler whose decisions rest on times that a performance model predicts, corrected by those of iterations."""

    rules = SchedulingRules(tiers=(Tier.GPU, Tier.CPU))
    _kv: KVCacheManager | None = None

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        self.config = config
        self._correction = None if config.disable_online_correction else OnlineCorrection(model)
        self.use_model(model)

    def use_model(self, model: PerfModel) -> None:
        """Predict with this model from now on. Who keeps predictions must renew them here."""
        self.model = model
        if self._kv is not None:
            self.manage_copies(self._kv)

    def manage_copies(self, kv: KVCacheManager) -> None:
        """Copies of cached blocks hide beside the shortest iteration, or take less time than computing them again."""
        self._kv, table, layers = kv, self.model.table, self.model.num_layers
        hidden_s = layers * table.linear(1)
        kv.most_copies = bisect_right(range(1, MOST_COPIES + 1), hidden_s, key=table.swap)

        def copying_pays(source: Tier, num_blocks: int) -> bool:
            return table.swap(num_blocks) <= layers * table.linear(num_blocks * kv.block_size)

        kv.copying_pays = copying_pays

    def observe(self, plan: IterationPlan, result: StepResult, stages: Mapping[int, int]) -> None:
        if self._correction is not None and self._correction.observe(plan, result, stages):
            self.use_model(self._correction.model)

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        return self._correction.factors if self._correction else {}


class Hybrid(Predicting):
    """Fills both tiers, the GPU first, and decides what the CPU decodes that are ready do.

    One that is kept from the CPU predicts nothing, and its plans are those of ``one_tier``.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig, *, can_overlap: bool = True) -> None:
        super().__init__(model, config)
        self.uses_cpu = config.pipelines or (can_overlap and config.overlaps)
        self.patience = Patience(config.max_wait_iterations)
        if not self.uses_cpu:
            self.rules, self._correction = SchedulingRules(), None

    def plan(self, state: SchedulerState) -> IterationPlan:
        if not self.uses_cpu:
            return one_tier(state)
        builder = PlanBuilder(state)
        ready = two_tiers(builder, self.limit_prompts)
        return self.decide(builder, CpuDecodes(ready, self.patience.overdue(ready, state.iteration)))

    def limit_prompts(self, builder: PlanBuilder) -> None:
        """Called once a plan, before the first prompt is added."""

    def decide(self, builder: PlanBuilder, ready: CpuDecodes) -> IterationPlan:
        """The plan for what is in the builder and the CPU decodes that may start a token; it must serve
        ``ready.overdue``."""
        raise NotImplementedError


class Patience:
    """Finds the CPU request that was left out longest, if for more than so many iterations: no rule may starve it.

    There is at most one in as many iterations. Otherwise a CPU that takes longer than that for a token of every request
    would be waited for in nearly every iteration.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._next_look = 0  # the iteration of the next search

    def overdue(self, ready: Sequence[Request], iteration: int) -> Request | None:
        if iteration < self._next_look or not ready:
            return None
        longest_waiting = min(ready, key=attrgetter("last_served"))
        if iteration - longest_waiting.last_served > self.iterations:
            self._next_look = iteration + self.iterations
            return longest_waiting
        self._next_look = longest_waiting.last_served + self.iterations + 1
        return None

    def look_again(self, iteration: int) -> None:
        """It could not be served: look for it from this iteration on."""
        self._next_look = iteration


def gpu_batch_s(model: PerfModel, load: GpuBatchLoad) -> float:
    """Seconds of an iteration of the GPU batch alone."""
    layer_s = model.layer_s(model.linear_s(load.tokens) + load.gpu_attention_s(model))
    return model.num_layers * layer_s + model.outside_layers_s(load.requests)


def gpu_only(
    builder: PlanBuilder, model: PerfModel, load: GpuBatchLoad, predicted: Mapping[str, float] | None = None
) -> IterationPlan:
    return builder.plan(predicted={"iteration_s": gpu_batch_s(model, load), **(predicted or {})})


def pipelined(
    builder: PlanBuilder,
    pipeline: Pipeline,
    under_way: Sequence[CpuBatch] = (),
    predicted: Mapping[str, float] | None = None,
) -> IterationPlan:
    """Asymmetric pipelining: batch-0's CPU decodes join the GPU batch; batch-1 and CPU batches ``under_way`` run
    alone."""
    plans = [cpu_batch.plan(ALONE) for cpu_batch in under_way]
    batches = zip(pipeline.batches, (JOINED, ALONE), strict=True)
    plans += [builder.state.cpu_batches.batch(batch.requests, mode) for batch, mode in batches if batch.requests]
    return builder.plan(plans, {"iteration_s": pipeline.iteration_s(), **(predicted or {})})


def add_cpu_decodes(pipeline: Pipeline, ready: CpuDecodes, config: StrategyConfig) -> None:
    """NEO's step 4: fill the batches with CPU decodes that stay hidden, and the overdue one.

    With the limit disabled, or with an empty GPU batch, take all of them: then the two batches hide each other.
    """
    if config.disable_cpu_decode_limit or not pipeline.load.requests:
        pipeline.split_evenly(ready)
        return
    pipeline.add_hidden(ready)
    if ready.overdue is not None:
        pipeline.add_overdue(ready.overdue)


def put_off_cpu_prompts(builder: PlanBuilder, pipeline: Pipeline, config: StrategyConfig) -> None:
    """NEO's step 5: postpone prefills bound for the CPU, the youngest first, while the CPU stays hidden without them.

    The batches stay as they are. So do prefills within the flat part of the linear time, since they cost the GPU batch
    nothing, and the last one of all: otherwise the CPU would never get any work. In one iteration of
    ``max_wait_iterations`` none waits for a younger one: short prompts that always find room on the GPU would starve a
    long one.
    """
    if config.disable_postponed_cpu_prompts:
        return
    in_order = builder.state.iteration % config.max_wait_iterations == 0
    on_gpu = [item.request for item in builder.prefills if item.tier is Tier.GPU]
    for item in reversed([item for item in builder.prefills if item.tier is Tier.CPU]):
        if in_order and any(arrival_order(item.request) < arrival_order(request) for request in on_gpu):
            break
        load = pipeline.load
        pipeline.set_load(load.without(item))
        gpu_batch_tokens = pipeline.load.tokens + pipeline.batches[0].size
        if len(load.chunks) == 1 or gpu_batch_tokens < pipeline.model.flat_linear_tokens or not pipeline.hides_cpu():
            pipeline.set_load(load)
            break
        builder.put_off(item)
