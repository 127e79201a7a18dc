"""The scheduler `adaptive`: prompts in the shadow of decodes, and the best of three ways to use the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.adaptive.choice import ChosenStrategy, Load, choose
from apex.schedulers.adaptive.chunks import ChunkSizes, is_short_queue, prompt_chunk
from apex.schedulers.adaptive.rates import SteadyLoad
from apex.schedulers.adaptive.split import best_split
from apex.schedulers.adaptive.times import OperationTimes
from apex.schedulers.cpu_decodes import CpuDecodes
from apex.schedulers.hybrid import Hybrid, gpu_batch_s, gpu_only, pipelined
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.pipeline import Pipeline
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE_RUNNING, OVERLAPPED, CpuBatchMode, IterationPlan, Strategy
from swiftllm.core.request import FinishReason, Request, Tier
from swiftllm.scheduling.cpu_batches import CpuBatch
from swiftllm.scheduling.plan_builder import PlanBuilder
from swiftllm.scheduling.state import SchedulerState

ESTIMATE_KEPT = 8
"""Iterations for which an estimate of output lengths is kept."""
WAITING_LOOKED_AT = 32
"""Waiting requests whose tokens count as backlog."""
ROOM_PER_REQUEST = 1.2
"""Room on the GPU is counted in requests of this multiple of the mean context, since they grow."""
LEFT_OUT_SHARE = 0.1
"""Of the GPU batch's time, the share spent on CPU decodes that the strategy leaves out. Else they wait for minutes
while prompts fill the GPU, for a few percent more throughput."""


class Adaptive(Hybrid):
    """GPU-only, pipelining or free-running CPU batches, whichever yields most tokens per second in the steady state.

    No CPU decode starves. One of n that may start its next token does so within ``max_wait_iterations`` + n + c
    iterations, where c is what the CPU batches under way need to end their tokens. The reason: whatever starts takes
    those that have waited longest; and where nothing starts for ``max_wait_iterations``, one CPU batch of all of them
    does. With overlap disabled it is one request instead, so there the bound is n times ``max_wait_iterations``.
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
        self._left_out_s = 0.0  # of the GPU batch, while CPU decodes were left out

    def added(self, request: Request) -> None:
        self.lengths.add_prompt(request.prompt_len)

    def ended(self, request: Request) -> None:
        self.lengths.add_output(request.output_len, aborted=request.finish_reason is FinishReason.ABORT)

    def decide(self, builder: PlanBuilder, ready: CpuDecodes) -> IterationPlan:
        under_way, load = builder.state.cpu_batches.under_way(), GpuBatchLoad.from_builder(builder)
        if not ready and not under_way:
            return gpu_only(builder, self.model, load)
        ready = _longest_waiting_first(ready)
        pipeline = self._pipeline(load, ready, under_way) if self.config.pipelines else None
        if pipeline is not None:
            self._left_out_s = 0.0
            return pipelined(builder, pipeline, under_way)
        return self._overlapped(builder, load, ready, under_way)

    # -- the choice of a strategy and of the prompt chunk -----------------------------------------------------------

    def limit_prompts(self, builder: PlanBuilder) -> None:
        """Choose the strategy, unless the last choice still stands, and the most prompt tokens of this iteration."""
        state = builder.state
        if self._chunk_sizes is None:
            budget = state.limits.max_num_batched_tokens
            self._chunk_sizes = ChunkSizes(self.times, budget, self.model.flat_linear_tokens)
        on_gpu = state.decoding[Tier.GPU][: state.limits.max_num_batched_tokens]
        on_cpu, gpu_context = state.decoding[Tier.CPU], context_tokens(on_gpu)
        queue = len(state.waiting) + len(state.prefilling)
        load = self._load(state, len(on_gpu), gpu_context, queue)
        if self._choice is None or not self._choice.rests_on(load.sizes()):
            strategies = self._strategies(load.cpu_decodes)
            self._choice = choose(self.times, self._chunk_sizes, load, strategies, self.config.max_cpu_batches)
        is_short = is_short_queue(queue, len(on_gpu) + len(on_cpu))
        chunk = prompt_chunk(
            self._chunk_sizes,
            self._choice.need,
            gpu_batch_decodes=len(on_gpu),
            joined=self._choice.joined,
            cpu_decodes=len(on_cpu),
            gpu_attention_s=self.model.gpu_attention_s(len(on_gpu), gpu_context),
            is_settled=self.lengths.is_settled,
            short_queue_tokens=load.steady.prompt_limit if is_short else 0.0,
        )
        if not self.config.disable_prompt_chunks:
            builder.prompt_limit = min(builder.prompt_limit, chunk)

    def _load(self, state: SchedulerState, gpu_decodes: int, gpu_context: int, queue: int) -> Load:
        """The load of this iteration; ``gpu_context`` is summed in tokens, ``queue`` counts requests without a token
        yet."""
        on_cpu, budget, kv = state.decoding[Tier.CPU], state.limits.max_num_batched_tokens, state.kv
        backlog = sum([request.num_uncomputed for request in state.prefilling])
        backlog += sum([request.num_uncomputed for request in state.waiting[:WAITING_LOOKED_AT]])
        each = context_tokens(on_cpu) / len(on_cpu) if on_cpu else self.lengths.mean_prompt
        steady = SteadyLoad(
            gpu_decodes,
            gpu_context / max(gpu_decodes, 1),
            each,
            self._prompt_per_output(state) if backlog else 0.0,
            min(backlog, budget),
        )
        room = {tier: kv.num_free(tier) * kv.block_size / kv.groups.slots(max(each, 1.0)) for tier in Tier}
        most_on_cpu = len(on_cpu) + min(queue, room[Tier.CPU])
        return Load(steady, len(on_cpu), most_on_cpu, room[Tier.GPU] / ROOM_PER_REQUEST)

    def _prompt_per_output(self, state: SchedulerState) -> float:
        """Prompt tokens per output token in the long run (rho)."""
        if state.iteration >= self._next_estimate:
            self._next_estimate = state.iteration + ESTIMATE_KEPT
            outputs = [request.output_len for queue in state.decoding.values() for request in queue]
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

    def _pipeline(self, load: GpuBatchLoad, ready: CpuDecodes, under_way: Sequence[CpuBatch]) -> Pipeline | None:
        """The batches of pipelining; None if it is not its turn, or CPU batches under way should end first."""
        partial = [request for cpu_batch in under_way for request in cpu_batch.members]
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(partial)
        if not load.requests:
            pipeline.split_evenly(ready)  # no GPU batch to hide behind: the two batches hide each other
            return pipeline
        must = ready.overdue is not None and not self.config.overlaps
        is_chosen = self._chosen.strategy is Strategy.PIPELINING
        if not must and (not is_chosen or (partial and not pipeline.hides_cpu())):
            return None
        assert self._chunk_sizes is not None  # as for the choice
        alone, joining = best_split(
            self.times,
            self.model,
            load,
            ready.tokens,
            (len(partial), context_tokens(partial)),
            token_s=self._chunk_sizes.token_s,
            least_members=1 if must or self.config.is_forced else 0,
        )
        first, second = pipeline.batches
        last = alone + joining
        second.add_requests(ready.requests[:alone], int(ready.tokens[:alone].sum()))
        first.add_requests(ready.requests[alone:last], int(ready.tokens[alone:last].sum()))
        return pipeline if first.size or second.size else None

    def _overlapped(
        self, builder: PlanBuilder, load: GpuBatchLoad, ready: CpuDecodes, under_way: Sequence[CpuBatch]
    ) -> IterationPlan:
        """CPU batches under way go on, and one may start."""
        state, choice, cpu_batches = builder.state, self._chosen, list(under_way)
        is_chosen = choice.strategy is Strategy.OVERLAP
        most = choice.num_cpu_batches if is_chosen else 1
        size = -(-(len(ready) + sum(len(cpu_batch.members) for cpu_batch in under_way)) // most)
        if not under_way:
            self._left_out_s += gpu_batch_s(self.model, load)
        its_turn = LEFT_OUT_SHARE * self._left_out_s >= self.model.num_layers * self.model.linear_s(len(ready))
        starts = its_turn or ready.overdue is not None or not load.requests or (is_chosen and 2 * len(ready) >= size)
        if self.config.overlaps and ready and starts and len(under_way) < most:
            self._left_out_s = 0.0
            cpu_batches.append(state.cpu_batches.start(ready.requests[:size]))
        elif ready.overdue is not None:
            self.patience.look_again(state.iteration + 1)  # as soon as a CPU batch has ended
        if not cpu_batches:
            return gpu_only(builder, self.model, load)
        plans = [cpu_batch.plan(self._rule(len(cpu_batch.members), load, is_chosen)) for cpu_batch in cpu_batches]
        alone_stages_s = self.model.num_layers * choice.alone_stages_per_layer_s  # of CPU batches, in the steady state
        return builder.plan(plans, {"iteration_s": gpu_batch_s(self.model, load) + alone_stages_s})

    def _rule(self, members: int, load: GpuBatchLoad, is_chosen: bool) -> CpuBatchMode:
        """Whether a CPU batch should run its stage alone: not if the GPU batch yields more tokens in the time of its
        stages."""
        if not is_chosen:
            return FREE_RUNNING
        model = self.model
        attention_s = model.gpu_attention_s(load.decodes, load.decode_context)
        gpu_batch_layer_s = model.layer_s(model.linear_s(load.decodes) + attention_s)
        alone_stage_s = model.linear_s(members) + model.hand_over_s(members)
        return FREE_RUNNING if members * gpu_batch_layer_s >= load.decodes * alone_stage_s else OVERLAPPED


def _longest_waiting_first(ready: CpuDecodes) -> CpuDecodes:
    """In any order in which some come first for ever, the others would starve."""
    return CpuDecodes(sorted(ready.requests, key=attrgetter("last_served")), ready.overdue)
