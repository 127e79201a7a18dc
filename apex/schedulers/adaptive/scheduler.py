"""The scheduler `adaptive`: prompts in the shadow of decodes, and the best of three ways to use the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.adaptive.chunks import (
    ChunkSizes,
    PromptNeed,
    free_prompt_tokens,
    is_short_queue,
    prompt_chunk,
    waiting_pays,
)
from apex.schedulers.adaptive.lengths import LengthsSeen
from apex.schedulers.adaptive.lockstep import best_split
from apex.schedulers.adaptive.modes import Mode, ModeRates, best_mode
from apex.schedulers.adaptive.rates import SteadyLoad
from apex.schedulers.adaptive.times import OperationTimes
from apex.schedulers.base import CohortState, OffloadScheduler
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan, SteppingRule, Strategy
from swiftllm.core.request import FinishReason, Request, Tier
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import SchedulerLimits

SAME = 0.05
"""A choice is kept until a size that it rests on has changed by more than this share."""
ESTIMATE_KEPT = 8
"""Iterations for which an estimate of output lengths is kept."""
WAITING_LOOKED_AT = 32
"""Waiting requests whose tokens count as backlog."""
GROWN = 1.2
"""Room on the GPU is counted in requests of this multiple of the mean context."""

HURRY_GAIN = 0.1
"""Where prompts exceed the shadow of the weights, they hurry while more CPU decodes would raise the rate by so much."""


@dataclass(frozen=True)
class Choice:
    """A mode, and what it says about prompts. ``sizes`` are those it rests on."""

    rates: ModeRates
    need: PromptNeed
    sizes: tuple[float, ...]

    def rests_on(self, sizes: Sequence[float]) -> bool:
        """Whether these sizes are about those of the choice."""
        return all(abs(new - old) <= SAME * old for new, old in zip(sizes, self.sizes, strict=True))


class AdaptiveScheduler(OffloadScheduler):
    """GPU-only, lockstep or free-running cohorts, whichever yields most tokens per second in the steady state.

    No CPU decode starves. One of n that may start its next token does so within ``max_wait_iterations`` + n + c
    iterations, where c is what the cohorts under way need to end their tokens. The reason: whatever starts takes those
    that have waited longest; and where nothing starts for ``max_wait_iterations``, one cohort of all of them does.
    With free-running disabled it is one request instead, so there the bound is n times ``max_wait_iterations``.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        now: Callable[[], float],
        model: PerfModel,
        config: StrategyConfig,
    ) -> None:
        super().__init__(limits, kv, now, model, config)
        self.times = OperationTimes(model)
        self.chunk_sizes = ChunkSizes(self.times, limits.max_num_batched_tokens, model.linear_knee_tokens)
        self.lengths = LengthsSeen()

    def _empty_queues(self) -> None:
        super()._empty_queues()
        self._choice: Choice | None = None
        self._next_estimate, self._rho = 0, 0.0

    def _may_offload(self) -> bool:
        return self._may_lockstep or self._may_feed

    @property
    def _may_lockstep(self) -> bool:
        config = self.config
        return config.strategy in ("auto", "asymmetric-pipelining") and not config.disable_asymmetric_pipelining

    @property
    def _may_feed(self) -> bool:
        config = self.config
        return config.strategy in ("auto", "asynchronous-overlap") and not config.disable_asynchronous_overlap

    # -- what is learnt from requests -------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self.lengths.add_prompt(request.prompt_len)

    def abort(self, request_id: str) -> Request | None:
        request = super().abort(request_id)
        if request is not None:
            self.lengths.add_output(request.output_len, aborted=True)
        return request

    def _retire(self, request: Request) -> None:
        super()._retire(request)
        if request.finish_reason is not FinishReason.ABORT:
            self.lengths.add_output(request.output_len)

    # -- the choice of a mode and of the prompt chunk ---------------------------------------------------------------

    def _schedule_running_prefills(self, draft: PlanDraft) -> None:
        if self._may_offload():
            chunk = self._choose(draft)
            if not self.config.disable_prompt_chunks:
                draft.tokens_left = min(draft.tokens_left, chunk)
        super()._schedule_running_prefills(draft)

    def _choose(self, draft: PlanDraft) -> int:
        """Choose the mode, unless the last choice still stands. Returns the most prompt tokens of this iteration."""
        on_gpu, on_cpu = draft.decodes, self.decoding[Tier.CPU]
        g, n = len(on_gpu), len(on_cpu)
        gpu_context, cpu_context = context_tokens(on_gpu), context_tokens(on_cpu)
        load = self._steady_load(g, gpu_context / max(g, 1), cpu_context / n if n else self.lengths.mean_prompt)
        queue = len(self.waiting) + len(self.prefilling)
        most = n + min(
            queue,
            self.kv.num_free(Tier.CPU) * self.kv.block_size / max(load.cpu_context, 1.0),
        )
        gpu_room = self.kv.num_free(Tier.GPU) * self.kv.block_size / (GROWN * max(load.cpu_context, 1.0))
        has_room = gpu_room > 1 + g / 8
        sizes = (g, n, load.gpu_context, load.cpu_context, load.prompt_per_output, load.prompt_limit, most, has_room)
        if self._choice is None or not self._choice.rests_on(sizes):
            self._choice = self._new_choice(load, n, most, has_room, sizes)
        choice = self._choice
        return prompt_chunk(
            self.chunk_sizes,
            choice.need,
            lane_decodes=g,
            riders=choice.rates.riders,
            cpu_decodes=n,
            gpu_attention_s=self.model.gpu_attention_s(g, gpu_context),
            short_queue_tokens=load.prompt_limit if is_short_queue(queue, g + n) else 0,
            is_settled=self.lengths.is_settled,
        )

    def _steady_load(self, gpu_decodes: int, gpu_context: float, cpu_context: float) -> SteadyLoad:
        backlog = sum([request.num_uncomputed for request in self.prefilling])
        backlog += sum([request.num_uncomputed for request in self.waiting[:WAITING_LOOKED_AT]])
        return SteadyLoad(
            gpu_decodes,
            gpu_context,
            cpu_context,
            self._prompt_per_output() if backlog else 0.0,
            min(backlog, self.limits.max_num_batched_tokens),
        )

    def _prompt_per_output(self) -> float:
        """Prompt tokens per output token in the long run (rho)."""
        if self._iteration >= self._next_estimate:
            self._next_estimate = self._iteration + ESTIMATE_KEPT
            outputs = [request.output_len for queue in self.decoding.values() for request in queue]
            self._rho = self.lengths.mean_prompt / self.lengths.mean_output(outputs)
        return self._rho

    def _new_choice(self, load: SteadyLoad, n: int, most: float, has_room: bool, sizes: tuple[float, ...]) -> Choice:
        larger = [n + share * (most - n) for share in (0.25, 0.5, 1.0)] + [2 * n]
        larger = [number for number in larger if n < number <= most]
        rates = best_mode(self.times, load, n, larger, self._modes(n), max_cohorts=self.config.max_cohorts)
        free_tokens = free_prompt_tokens(self.chunk_sizes, load.gpu_decodes, rates.riders)
        gain = rates.reachable_tokens_per_s / rates.tokens_per_s - 1 if rates.tokens_per_s else float("inf")
        layers, rows = self.model.num_layers, load.gpu_decodes + free_tokens
        layer_s = (
            float(self.times.linear_s(rows) + self.times.gpu_attention_s(load.gpu_decodes, load.gpu_context))
            + float(self.times.ends_s(load.gpu_decodes)) / layers
        )
        steady_tokens = rates.prompt_tokens
        grows = (
            has_room
            or steady_tokens > free_tokens
            or not waiting_pays(self.chunk_sizes, layers, gain, free_tokens, steady_tokens, layer_s)
        )
        hurries = steady_tokens > free_tokens and gain > HURRY_GAIN
        return Choice(rates, PromptNeed(steady_tokens, grows, hurries), sizes)

    def _modes(self, cpu_decodes: int) -> list[Mode]:
        """The modes to choose from; a forced strategy leaves one, where there are CPU decodes."""
        modes = [Mode.ONLY] if self.config.strategy == "auto" or not cpu_decodes else []
        return modes + [Mode.LOCKSTEP] * self._may_lockstep + [Mode.FEED] * self._may_feed

    # -- one iteration ----------------------------------------------------------------------------------------------

    def decide(self, draft: PlanDraft, ready: CpuDecodes) -> IterationPlan:
        under_way, load = self._under_way(), LaneLoad.from_draft(draft)
        if not ready and not under_way:
            return self.gpu_only_plan(draft, load)
        ready = _longest_waiting_first(ready)
        pipeline = self._lockstep(load, ready, under_way) if self._may_lockstep else None
        if pipeline is not None:
            return self.pipelined_plan(draft, pipeline, under_way)
        return self._free_running_plan(draft, load, ready, under_way)

    def _lockstep(self, load: LaneLoad, ready: CpuDecodes, under_way: Sequence[CohortState]) -> Pipeline | None:
        """The batches of lockstep; None if it is not its turn, or cohorts under way should end first."""
        partial = [request for cohort in under_way for request in cohort.members]
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(partial)
        if not load.requests:
            pipeline.split_evenly(ready)  # no lane to hide behind: the two batches hide each other
            return pipeline
        must = ready.overdue is not None and not self._may_feed
        if not must and (self._choice.rates.mode is not Mode.LOCKSTEP or (partial and not pipeline.hides_cpu())):
            return None
        forced = self.config.strategy == "asymmetric-pipelining"
        stepping, riding = best_split(
            self.times,
            self.model,
            load,
            ready.tokens,
            (len(partial), context_tokens(partial)),
            token_s=self.chunk_sizes.token_s,
            least_members=1 if must or forced else 0,
        )
        first, second = pipeline.batches
        last = stepping + riding
        second.add_requests(ready.requests[:stepping], int(ready.tokens[:stepping].sum()))
        first.add_requests(ready.requests[stepping:last], int(ready.tokens[stepping:last].sum()))
        return pipeline if first.size or second.size else None

    def _free_running_plan(
        self, draft: PlanDraft, load: LaneLoad, ready: CpuDecodes, under_way: Sequence[CohortState]
    ) -> IterationPlan:
        """Cohorts under way go on, and one may start."""
        rates = self._choice.rates
        feeds = rates.mode is Mode.FEED
        cohorts = [cohort.to_plan(self._rule(len(cohort.members), load, feeds)) for cohort in under_way]
        most = rates.num_cohorts if feeds else 1
        size = -(-(len(ready) + sum(len(cohort.members) for cohort in under_way)) // most)
        starts = ready.overdue is not None or not load.requests or (feeds and 2 * len(ready) >= size)
        if self._may_feed and ready and starts and len(under_way) < most:
            members = ready.requests[:size]
            cohorts.append(self._start_cohort(members, self._rule(len(members), load, feeds)))
        elif ready.overdue is not None:
            self._next_look = self._iteration + 1  # as soon as a cohort has ended
        if not cohorts:
            return self.gpu_only_plan(draft, load)
        return self._plan(Strategy.ASYNCHRONOUS_OVERLAP, draft, cohorts, self._overlap_s(load, rates, feeds), None)

    def _overlap_s(self, load: LaneLoad, rates: ModeRates, feeds: bool) -> float:
        """GPU-only time, and the steps of cohorts in the steady state."""
        steps_s = self.model.num_layers * rates.steps_per_layer_s if feeds else 0.0
        return self._gpu_only_s(load) + steps_s

    def _rule(self, members: int, load: LaneLoad, feeds: bool) -> SteppingRule:
        """Whether a cohort should step by itself: not if the lane yields more tokens in the time of its steps."""
        if not feeds:
            return SteppingRule.FREE_RUNNING
        model = self.model
        lane_s = model.linear_s(load.decodes) + model.gpu_attention_s(load.decodes, load.decode_context)
        pays = members * lane_s >= load.decodes * model.linear_s(members)
        return SteppingRule.FREE_RUNNING if pays else SteppingRule.RIDE_IF_READY


def _longest_waiting_first(ready: CpuDecodes) -> CpuDecodes:
    """In any order in which some come first for ever, the others would starve."""
    return CpuDecodes(sorted(ready.requests, key=attrgetter("last_served")), ready.overdue)
