"""What policies that decode on the CPU share: predictions, patience with requests left out, and plans of known form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from apex.perf.lane_load import LaneLoad
from apex.perf.model import PerfModel
from apex.perf.online import OnlineCorrection
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import RIDE, STEP, IterationPlan, StepResult
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.cohorts import Cohort
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import two_tiers
from swiftllm.scheduling.policy import Policy
from swiftllm.scheduling.rules import Rules


class Predicting(Policy):
    """A policy whose decisions rest on times that a performance model predicts, corrected by those of iterations."""

    rules = Rules(tiers=(Tier.GPU, Tier.CPU))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        self.config = config
        self._correction = None if config.disable_online_correction else OnlineCorrection(model)
        self.use_model(model)

    def use_model(self, model: PerfModel) -> None:
        """Predict with this model from now on. Who keeps predictions must renew them here."""
        self.model = model

    def observe(self, plan: IterationPlan, result: StepResult, boundaries: Mapping[int, int]) -> None:
        if self._correction is not None and self._correction.observe(plan, result, boundaries):
            self.use_model(self._correction.model)

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        return self._correction.factors if self._correction else {}


class Hybrid(Predicting):
    """One that may be kept from the CPU. Then it predicts nothing, and its plans are those of ``one_tier``."""

    def __init__(self, model: PerfModel, config: StrategyConfig, *, uses_cpu: bool) -> None:
        super().__init__(model, config)
        self.uses_cpu = uses_cpu
        self.patience = Patience(config.max_wait_iterations)
        if not uses_cpu:
            self.rules, self._correction = Rules(), None


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


def ready_decodes(
    draft: Draft, patience: Patience, before_prompts: Callable[[Draft], None] | None = None
) -> CpuDecodes:
    """Fill both tiers. Returns the CPU decodes that may start their next token, and which of them is overdue."""
    ready = two_tiers(draft, before_prompts)
    return CpuDecodes(ready, patience.overdue(ready, draft.residents.iteration))


def lane_s(model: PerfModel, load: LaneLoad) -> float:
    """Seconds of an iteration of the lane alone."""
    layer_s = model.layer_s(model.linear_s(load.tokens) + load.gpu_attention_s(model))
    return model.num_layers * layer_s + model.ends_s(load.requests)


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
