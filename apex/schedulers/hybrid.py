"""What policies that decode on the CPU share: predictions, patience with requests left out, and plans of known form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.perf.online import OnlineCorrection
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import RIDE, STEP, IterationPlan, StepResult
from swiftllm.core.request import Request, Tier
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.arrival_queue import arrival_order
from swiftllm.scheduling.cohorts import Cohort
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import one_tier, two_tiers
from swiftllm.scheduling.policy import Policy
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules

MOST_COPIES = 4096  # cached blocks that a plan copies to the CPU tier at most, however fast PCIe is


class Predicting(Policy):
    """A policy whose decisions rest on times that a performance model predicts, corrected by those of iterations."""

    rules = Rules(tiers=(Tier.GPU, Tier.CPU))
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

    def observe(self, plan: IterationPlan, result: StepResult, boundaries: Mapping[int, int]) -> None:
        if self._correction is not None and self._correction.observe(plan, result, boundaries):
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
            self.rules, self._correction = Rules(), None

    def plan(self, residents: Residents) -> IterationPlan:
        if not self.uses_cpu:
            return one_tier(residents)
        draft = Draft(residents)
        ready = two_tiers(draft, self.limit_prompts)
        return self.decide(draft, CpuDecodes(ready, self.patience.overdue(ready, residents.iteration)))

    def limit_prompts(self, draft: Draft) -> None:
        """Called once a plan, before the first prompt is added."""

    def decide(self, draft: Draft, ready: CpuDecodes) -> IterationPlan:
        """The plan for what is drafted and the CPU decodes that may start a token; it must serve ``ready.overdue``."""
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


def lane_s(model: PerfModel, load: LaneLoad) -> float:
    """Seconds of an iteration of the lane alone."""
    layer_s = model.layer_s(model.linear_s(load.tokens) + load.gpu_attention_s(model))
    return model.num_layers * layer_s + model.outside_layers_s(load.requests)


def gpu_only(
    draft: Draft, model: PerfModel, load: LaneLoad, predicted: Mapping[str, float] | None = None
) -> IterationPlan:
    return draft.plan(predicted={"iteration_s": lane_s(model, load), **(predicted or {})})


def pipelined(
    draft: Draft,
    pipeline: Pipeline,
    under_way: Sequence[Cohort] = (),
    predicted: Mapping[str, float] | None = None,
) -> IterationPlan:
    """Asymmetric pipelining: batch-0's CPU decodes ride the lane; batch-1 and cohorts ``under_way`` step."""
    plans = [cohort.plan(STEP) for cohort in under_way]
    batches = zip(pipeline.batches, (RIDE, STEP), strict=True)
    plans += [draft.residents.cohorts.batch(batch.requests, rule) for batch, rule in batches if batch.requests]
    return draft.plan(plans, {"iteration_s": pipeline.iteration_s(), **(predicted or {})})


def add_cpu_decodes(pipeline: Pipeline, ready: CpuDecodes, config: StrategyConfig) -> None:
    """NEO's step 4: fill the batches with CPU decodes that stay hidden, and the overdue one.

    With the limit disabled, or with an empty lane, take all of them: then the two batches hide each other.
    """
    if config.disable_cpu_decode_limit or not pipeline.load.requests:
        pipeline.split_evenly(ready)
        return
    pipeline.add_hidden(ready)
    if ready.overdue is not None:
        pipeline.add_overdue(ready.overdue)


def put_off_cpu_prompts(draft: Draft, pipeline: Pipeline, config: StrategyConfig) -> None:
    """NEO's step 5: postpone prefills bound for the CPU, the youngest first, while the CPU stays hidden without them.

    The batches stay as they are. So do prefills within the flat part of the linear time, since they cost the lane
    nothing, and the last one of all: otherwise the CPU would never get any work. In one iteration of
    ``max_wait_iterations`` none waits for a younger one: short prompts that always find room on the GPU would starve a
    long one.
    """
    if config.disable_postponed_cpu_prompts:
        return
    in_order = draft.residents.iteration % config.max_wait_iterations == 0
    on_gpu = [item.request for item in draft.prefills if item.tier is Tier.GPU]
    for item in reversed([item for item in draft.prefills if item.tier is Tier.CPU]):
        if in_order and any(arrival_order(item.request) < arrival_order(request) for request in on_gpu):
            break
        load = pipeline.load
        pipeline.set_load(load.without(item))
        lane_tokens = pipeline.load.tokens + pipeline.batches[0].size
        if len(load.chunks) == 1 or lane_tokens < pipeline.model.flat_linear_tokens or not pipeline.hides_cpu():
            pipeline.set_load(load)
            break
        draft.put_off(item)
