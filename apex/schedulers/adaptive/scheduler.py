"""The scheduler `adaptive`: prompts in the shadow of decodes, and the best of three ways to use the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.adaptive.choice import Choice, Load, choose
from apex.schedulers.adaptive.chunks import ChunkSizes, is_short_queue, prompt_chunk
from apex.schedulers.adaptive.lockstep import best_split
from apex.schedulers.adaptive.modes import Mode
from apex.schedulers.adaptive.rates import SteadyLoad
from apex.schedulers.adaptive.times import OperationTimes
from apex.schedulers.base import CohortState, OffloadScheduler
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan, SteppingRule, Strategy
from swiftllm.core.request import FinishReason, Request, ServiceClass, Tier
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.plan_draft import PlanDraft
from swiftllm.scheduling.scheduler import SchedulerLimits

ESTIMATE_KEPT = 8
"""Iterations for which an estimate of output lengths is kept."""
WAITING_LOOKED_AT = 32
"""Waiting requests whose tokens count as backlog."""
GROWN = 1.2
"""Room on the GPU is counted in requests of this multiple of the mean context."""
LEFT_OUT_SHARE = 0.1
"""Of the lane's time, the share spent on CPU decodes that the mode leaves out. Else they wait for minutes while prompts
fill the GPU, for a few percent more throughput."""


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
        self.use_model(model)
        self.lengths = LengthsSeen()

    def use_model(self, model: PerfModel) -> None:
        super().use_model(model)
        self.times = OperationTimes(model)
        self.chunk_sizes = ChunkSizes(self.times, self.limits.max_num_batched_tokens, model.flat_linear_tokens)
        self._choice = None

    def _empty_queues(self) -> None:
        super()._empty_queues()
        self._choice: Choice | None = None
        self._next_estimate, self._rho = 0, 0.0
        self._left_out_s = 0.0  # of the lane, while CPU decodes were left out

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

    def _schedule_running_prefills(self, draft: PlanDraft, service_class: ServiceClass) -> None:
        if self._may_offload() and service_class is ServiceClass.LATENCY_SENSITIVE:  # once for both classes
            chunk = self._choose()
            if not self.config.disable_prompt_chunks:
                draft.prompt_limit = min(draft.prompt_limit, chunk)
        super()._schedule_running_prefills(draft, service_class)

    def _choose(self) -> int:
        """Choose the mode, unless the last choice still stands. Returns the most prompt tokens of this iteration."""
        on_gpu, on_cpu = self.decoding[Tier.GPU][: self.limits.max_num_batched_tokens], self.decoding[Tier.CPU]
        gpu_context, queue = context_tokens(on_gpu), len(self.waiting) + len(self.prefilling)
        load = self._load(len(on_gpu), gpu_context, len(on_cpu), context_tokens(on_cpu), queue)
        if self._choice is None or not self._choice.rests_on(load.sizes()):
            modes = self._modes(load.cpu_decodes)
            self._choice = choose(self.times, self.chunk_sizes, load, modes, self.config.max_cohorts)
        is_short = is_short_queue(queue, len(on_gpu) + len(on_cpu))
        return prompt_chunk(
            self.chunk_sizes,
            self._choice.need,
            lane_decodes=len(on_gpu),
            riders=self._choice.rates.riders,
            cpu_decodes=len(on_cpu),
            gpu_attention_s=self.model.gpu_attention_s(len(on_gpu), gpu_context),
            is_settled=self.lengths.is_settled,
            short_queue_tokens=load.steady.prompt_limit if is_short else 0.0,
        )

    def _load(self, gpu_decodes: int, gpu_context: int, cpu_decodes: int, cpu_context: int, queue: int) -> Load:
        """The load of this iteration; contexts are sums in tokens, ``queue`` counts requests without a token yet."""
        backlog = sum([request.num_uncomputed for request in self.prefilling])
        backlog += sum([request.num_uncomputed for request in self.waiting[:WAITING_LOOKED_AT]])
        each = cpu_context / cpu_decodes if cpu_decodes else self.lengths.mean_prompt
        steady = SteadyLoad(
            gpu_decodes,
            gpu_context / max(gpu_decodes, 1),
            each,
            self._prompt_per_output() if backlog else 0.0,
            min(backlog, self.limits.max_num_batched_tokens),
        )
        room = {tier: self.kv.num_free(tier) * self.kv.block_size / max(each, 1.0) for tier in Tier}
        return Load(steady, cpu_decodes, cpu_decodes + min(queue, room[Tier.CPU]), room[Tier.GPU] / GROWN)

    def _prompt_per_output(self) -> float:
        """Prompt tokens per output token in the long run (rho)."""
        if self._iteration >= self._next_estimate:
            self._next_estimate = self._iteration + ESTIMATE_KEPT
            outputs = [request.output_len for queue in self.decoding.values() for request in queue]
            self._rho = self.lengths.mean_prompt / self.lengths.mean_output(outputs)
        return self._rho

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
            self._left_out_s = 0.0
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
        if not must and (self._choice.mode is not Mode.LOCKSTEP or (partial and not pipeline.hides_cpu())):
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
        feeds = self._choice.mode is Mode.FEED
        cohorts = [cohort.to_plan(self._rule(len(cohort.members), load, feeds)) for cohort in under_way]
        most = self._choice.rates.num_cohorts if feeds else 1
        size = -(-(len(ready) + sum(len(cohort.members) for cohort in under_way)) // most)
        if not under_way:
            self._left_out_s += self._gpu_only_s(load)
        its_turn = LEFT_OUT_SHARE * self._left_out_s >= self.model.num_layers * self.model.linear_s(len(ready))
        starts = its_turn or ready.overdue is not None or not load.requests or (feeds and 2 * len(ready) >= size)
        if self._may_feed and ready and starts and len(under_way) < most:
            self._left_out_s = 0.0
            members = ready.requests[:size]
            cohorts.append(self._start_cohort(members, self._rule(len(members), load, feeds)))
        elif ready.overdue is not None:
            self._next_look = self._iteration + 1  # as soon as a cohort has ended
        if not cohorts:
            return self.gpu_only_plan(draft, load)
        return self._plan(Strategy.ASYNCHRONOUS_OVERLAP, draft, cohorts, self._overlap_s(load), None)

    def _overlap_s(self, load: LaneLoad) -> float:
        """GPU-only time, and the steps that cohorts take in the steady state."""
        return self._gpu_only_s(load) + self.model.num_layers * self._choice.rates.steps_per_layer_s

    def _rule(self, members: int, load: LaneLoad, feeds: bool) -> SteppingRule:
        """Whether a cohort should step by itself: not if the lane yields more tokens in the time of its steps."""
        if not feeds:
            return SteppingRule.FREE_RUNNING
        model = self.model
        attention_s = model.gpu_attention_s(load.decodes, load.decode_context)
        lane_s = model.layer_s(model.linear_s(load.decodes) + attention_s)
        step_s = model.linear_s(members) + model.hand_over_s(members)
        pays = members * lane_s >= load.decodes * step_s
        return SteppingRule.FREE_RUNNING if pays else SteppingRule.RIDE_IF_READY


def _longest_waiting_first(ready: CpuDecodes) -> CpuDecodes:
    """In any order in which some come first for ever, the others would starve."""
    return CpuDecodes(sorted(ready.requests, key=attrgetter("last_served")), ready.overdue)
