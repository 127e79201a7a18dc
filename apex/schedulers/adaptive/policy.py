"""The policy `adaptive`: prompts in the shadow of decodes, and the best of three ways to use the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from apex.perf.lane_load import LaneLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.adaptive.choice import ChosenStrategy, Load, choose
from apex.schedulers.adaptive.chunks import ChunkSizes, is_short_queue, prompt_chunk
from apex.schedulers.adaptive.rates import SteadyLoad
from apex.schedulers.adaptive.split import best_split
from apex.schedulers.adaptive.times import OperationTimes
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.hybrid import Hybrid, gpu_only, lane_s, pipelined
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE, HOP, IterationPlan, Rule, Strategy
from swiftllm.core.request import FinishReason, Request, Tier
from swiftllm.scheduling.cohorts import Cohort
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.residents import Residents

ESTIMATE_KEPT = 8
"""Iterations for which an estimate of output lengths is kept."""
WAITING_LOOKED_AT = 32
"""Waiting requests whose tokens count as backlog."""
ROOM_PER_REQUEST = 1.2
"""Room on the GPU is counted in requests of this multiple of the mean context, since they grow."""
LEFT_OUT_SHARE = 0.1
"""Of the lane's time, the share spent on CPU decodes that the strategy leaves out. Else they wait for minutes while
prompts fill the GPU, for a few percent more throughput."""


class Adaptive(Hybrid):
    """GPU-only, pipelining or free-running cohorts, whichever yields most tokens per second in the steady state.

    No CPU decode starves. One of n that may start its next token does so within ``max_wait_iterations`` + n + c
    iterations, where c is what the cohorts under way need to end their tokens. The reason: whatever starts takes those
    that have waited longest; and where nothing starts for ``max_wait_iterations``, one cohort of all of them does.
    With overlap disabled it is one request instead, so there the bound is n times ``max_wait_iterations``.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        self.lengths = LengthsSeen()
        self.emptied()

    def use_model(self, model: PerfModel) -> None:
        super().use_model(model)
        self.times = OperationTimes(model)
        self._chunk_sizes: ChunkSizes | None = None
        self._choice: ChosenStrategy | None = None

    def emptied(self) -> None:
        self._choice = None
        self._next_estimate, self._rho = 0, 0.0
        self._left_out_s = 0.0  # of the lane, while CPU decodes were left out

    def added(self, request: Request) -> None:
        self.lengths.add_prompt(request.prompt_len)

    def ended(self, request: Request) -> None:
        self.lengths.add_output(request.output_len, aborted=request.finish_reason is FinishReason.ABORT)

    def decide(self, draft: Draft, ready: CpuDecodes) -> IterationPlan:
        under_way, load = draft.residents.cohorts.under_way(), LaneLoad.from_draft(draft)
        if not ready and not under_way:
            return gpu_only(draft, self.model, load)
        ready = _longest_waiting_first(ready)
        pipeline = self._pipeline(load, ready, under_way) if self.config.pipelines else None
        if pipeline is not None:
            self._left_out_s = 0.0
            return pipelined(draft, pipeline, under_way)
        return self._overlapped(draft, load, ready, under_way)

    # -- the choice of a strategy and of the prompt chunk -----------------------------------------------------------

    def limit_prompts(self, draft: Draft) -> None:
        """Choose the strategy, unless the last choice still stands, and the most prompt tokens of this iteration."""
        residents = draft.residents
        if self._chunk_sizes is None:
            budget = residents.limits.max_num_batched_tokens
            self._chunk_sizes = ChunkSizes(self.times, budget, self.model.flat_linear_tokens)
        on_gpu = residents.decoding[Tier.GPU][: residents.limits.max_num_batched_tokens]
        on_cpu, gpu_context = residents.decoding[Tier.CPU], context_tokens(on_gpu)
        queue = len(residents.waiting) + len(residents.prefilling)
        load = self._load(residents, len(on_gpu), gpu_context, queue)
        if self._choice is None or not self._choice.rests_on(load.sizes()):
            strategies = self._strategies(load.cpu_decodes)
            self._choice = choose(self.times, self._chunk_sizes, load, strategies, self.config.max_cohorts)
        is_short = is_short_queue(queue, len(on_gpu) + len(on_cpu))
        chunk = prompt_chunk(
            self._chunk_sizes,
            self._choice.need,
            lane_decodes=len(on_gpu),
            riders=self._choice.riders,
            cpu_decodes=len(on_cpu),
            gpu_attention_s=self.model.gpu_attention_s(len(on_gpu), gpu_context),
            is_settled=self.lengths.is_settled,
            short_queue_tokens=load.steady.prompt_limit if is_short else 0.0,
        )
        if not self.config.disable_prompt_chunks:
            draft.prompt_limit = min(draft.prompt_limit, chunk)

    def _load(self, residents: Residents, gpu_decodes: int, gpu_context: int, queue: int) -> Load:
        """The load of this iteration; ``gpu_context`` is summed in tokens, ``queue`` counts requests without a token
        yet."""
        on_cpu, budget, kv = residents.decoding[Tier.CPU], residents.limits.max_num_batched_tokens, residents.kv
        backlog = sum([request.num_uncomputed for request in residents.prefilling])
        backlog += sum([request.num_uncomputed for request in residents.waiting[:WAITING_LOOKED_AT]])
        each = context_tokens(on_cpu) / len(on_cpu) if on_cpu else self.lengths.mean_prompt
        steady = SteadyLoad(
            gpu_decodes,
            gpu_context / max(gpu_decodes, 1),
            each,
            self._prompt_per_output(residents) if backlog else 0.0,
            min(backlog, budget),
        )
        room = {tier: kv.num_free(tier) * kv.block_size / kv.groups.slots(max(each, 1.0)) for tier in Tier}
        most_on_cpu = len(on_cpu) + min(queue, room[Tier.CPU])
        return Load(steady, len(on_cpu), most_on_cpu, room[Tier.GPU] / ROOM_PER_REQUEST)

    def _prompt_per_output(self, residents: Residents) -> float:
        """Prompt tokens per output token in the long run (rho)."""
        if residents.iteration >= self._next_estimate:
            self._next_estimate = residents.iteration + ESTIMATE_KEPT
            outputs = [request.output_len for queue in residents.decoding.values() for request in queue]
            self._rho = self.lengths.mean_prompt / self.lengths.mean_output(outputs)
        return self._rho

    def _strategies(self, cpu_decodes: int) -> list[Strategy]:
        """Those to choose from; a forced one is the only one, where there are CPU decodes."""
        config = self.config
        strategies = [] if config.is_forced and cpu_decodes else [Strategy.GPU_ONLY]
        return strategies + [Strategy.PIPELINING] * config.pipelines + [Strategy.OVERLAP] * config.overlaps

    @property
    def _chosen(self) -> ChosenStrategy:
        """The choice on which the plan being made rests."""
        assert self._choice is not None, "prompts are limited before the plan is decided"
        return self._choice

    # -- plans ------------------------------------------------------------------------------------------------------

    def _pipeline(self, load: LaneLoad, ready: CpuDecodes, under_way: Sequence[Cohort]) -> Pipeline | None:
        """The batches of pipelining; None if it is not its turn, or cohorts under way should end first."""
        partial = [request for cohort in under_way for request in cohort.members]
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(partial)
        if not load.requests:
            pipeline.split_evenly(ready)  # no lane to hide behind: the two batches hide each other
            return pipeline
        must = ready.overdue is not None and not self.config.overlaps
        is_chosen = self._chosen.strategy is Strategy.PIPELINING
        if not must and (not is_chosen or (partial and not pipeline.hides_cpu())):
            return None
        assert self._chunk_sizes is not None  # as for the choice
        stepping, riding = best_split(
            self.times,
            self.model,
            load,
            ready.tokens,
            (len(partial), context_tokens(partial)),
            token_s=self._chunk_sizes.token_s,
            least_members=1 if must or self.config.is_forced else 0,
        )
        first, second = pipeline.batches
        last = stepping + riding
        second.add_requests(ready.requests[:stepping], int(ready.tokens[:stepping].sum()))
        first.add_requests(ready.requests[stepping:last], int(ready.tokens[stepping:last].sum()))
        return pipeline if first.size or second.size else None

    def _overlapped(
        self, draft: Draft, load: LaneLoad, ready: CpuDecodes, under_way: Sequence[Cohort]
    ) -> IterationPlan:
        """Cohorts under way go on, and one may start."""
        residents, choice, cohorts = draft.residents, self._chosen, list(under_way)
        is_chosen = choice.strategy is Strategy.OVERLAP
        most = choice.num_cohorts if is_chosen else 1
        size = -(-(len(ready) + sum(len(cohort.members) for cohort in under_way)) // most)
        if not under_way:
            self._left_out_s += lane_s(self.model, load)
        its_turn = LEFT_OUT_SHARE * self._left_out_s >= self.model.num_layers * self.model.linear_s(len(ready))
        starts = its_turn or ready.overdue is not None or not load.requests or (is_chosen and 2 * len(ready) >= size)
        if self.config.overlaps and ready and starts and len(under_way) < most:
            self._left_out_s = 0.0
            cohorts.append(residents.cohorts.start(ready.requests[:size]))
        elif ready.overdue is not None:
            self.patience.look_again(residents.iteration + 1)  # as soon as a cohort has ended
        if not cohorts:
            return gpu_only(draft, self.model, load)
        plans = [cohort.plan(self._rule(len(cohort.members), load, is_chosen)) for cohort in cohorts]
        steps_s = self.model.num_layers * choice.steps_per_layer_s  # of cohorts, in the steady state
        return draft.plan(plans, {"iteration_s": lane_s(self.model, load) + steps_s})

    def _rule(self, members: int, load: LaneLoad, is_chosen: bool) -> Rule:
        """Whether a cohort should step by itself: not if the lane yields more tokens in the time of its steps."""
        if not is_chosen:
            return FREE
        model = self.model
        attention_s = model.gpu_attention_s(load.decodes, load.decode_context)
        lane_layer_s = model.layer_s(model.linear_s(load.decodes) + attention_s)
        step_s = model.linear_s(members) + model.hand_over_s(members)
        return FREE if members * lane_layer_s >= load.decodes * step_s else HOP


def _longest_waiting_first(ready: CpuDecodes) -> CpuDecodes:
    """In any order in which some come first for ever, the others would starve."""
    return CpuDecodes(sorted(ready.requests, key=attrgetter("last_served")), ready.overdue)
