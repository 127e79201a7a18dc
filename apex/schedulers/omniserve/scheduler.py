"""OmniServe (SIGMOD'26, section 3.3): latency-sensitive requests first, best-effort requests in the time left.

An iteration is filled in the order of section 3.3.2: latency-sensitive decodes and prompts, then best-effort prompts
and decodes. Best-effort requests in the CPU tier decode in CPU batches that join the GPU batch. Every iteration with
best-effort work is predicted to end within the target for a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from apex.perf.gpu_batch_load import context_tokens
from apex.perf.model import PerfModel, total_s
from apex.schedulers.hybrid import Predicting
from apex.schedulers.lengths import LengthsSeen
from apex.schedulers.omniserve.admission import backlog_before, first_token_s
from apex.schedulers.omniserve.gpu_batch import BEST_EFFORT, URGENT, GpuBatch, RowsByStage, rows_by_stage
from apex.schedulers.omniserve.share import IterationLength, Turns
from apex.schedulers.omniserve.times import joined_rows_s
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE_RUNNING, OVERLAPPED, CpuBatchPlan, IterationPlan
from swiftllm.core.request import FinishReason, Request, RequestRefusedForNow, Tier
from swiftllm.core.slo import Slo
from swiftllm.scheduling.cpu_batches import CpuBatch
from swiftllm.scheduling.parts import gpu_decodes
from swiftllm.scheduling.plan_builder import PlanBuilder
from swiftllm.scheduling.rules import SchedulingRules
from swiftllm.scheduling.state import SchedulerState

GPU_ONLY = SchedulingRules(spills=())


class OmniServe(Predicting):
    """Two service classes on one GPU. The CPU tier holds best-effort requests only.

    A plan names those CPU batches that may join: with all of them the iteration is predicted to keep the target. A CPU
    batch joins at most one stage an iteration. The oldest CPU batch comes first.
    """

    rules = SchedulingRules(tiers=(Tier.GPU, Tier.CPU), urgent_tiers=(Tier.GPU,), spills=(BEST_EFFORT,))

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        super().__init__(model, config)
        if not config.overlaps:
            self.rules = GPU_ONLY
        self._slo = config.slo
        self.lengths = LengthsSeen()
        self._length = IterationLength()
        self._turns = Turns(config.max_wait_iterations)

    @property
    def slo(self) -> Slo:
        return self._slo

    def ended(self, request: Request) -> None:
        if request.service_class is URGENT and request.finish_reason is not FinishReason.ABORT:
            self.lengths.add_output(request.output_len)

    def check_targets(self, request: Request, state: SchedulerState) -> None:
        if request.service_class is not URGENT or self.config.disable_admission_control:
            return
        backlog = backlog_before(request, state, self.lengths)
        waited_s = state.now() - request.arrival_s
        budget = state.limits.max_num_batched_tokens
        expected_s = waited_s + first_token_s(self.model, self.slo, backlog, budget)
        late_s = expected_s - self.slo.first_token_s
        if late_s > 0:
            expected = f"is expected after {expected_s:.1f} s" if isfinite(late_s) else "cannot be predicted now"
            raise RequestRefusedForNow(
                f"the first token {expected}, and the target of {self.slo.ttft_s:g} s less its margin is "
                f"{self.slo.first_token_s:g} s: try again later, or ask for best effort",
                retry_after_s=late_s if isfinite(late_s) else self.slo.ttft_s,
            )

    def plan(self, state: SchedulerState) -> IterationPlan:
        builder, target_s = PlanBuilder(state), self.slo.iteration_s
        gpu_batch = GpuBatch(builder, self.model)
        state.may_swap_out = lambda request: gpu_batch.has_time_to_move(request, target_s)
        overdue = self._turns.overdue_decode(state)
        reserved = overdue is not None or self._turns.prompts_are_overdue(state.iteration)
        builder.tokens_left -= reserved
        gpu_decodes(builder, URGENT)
        gpu_batch.add_urgent_prompts(target_s)
        builder.tokens_left += reserved
        urgent_s = gpu_batch.iteration_s()
        limit_s = self._length.limit_s(state, self.model, target_s, urgent_s)
        # Growing may swap, so best-effort decodes are idle where others fill the time already.
        decodes = state.grow_on_gpu(BEST_EFFORT, builder.tokens_left) if urgent_s <= limit_s else []
        if overdue is not None and overdue.tier is Tier.GPU:
            if state.hold_on_gpu(overdue, overdue.num_tokens):
                builder.add_decodes([overdue])
            decodes = [request for request in decodes if request is not overdue and request.tier is Tier.GPU]
        ready = state.grow_on_cpu(BEST_EFFORT)
        joining, starting = gpu_batch.choose_joining(ready, limit_s, self.most_cpu_batches, overdue)
        self.fill(gpu_batch, decodes, rows_by_stage(joining, starting), limit_s)
        if gpu_batch.is_empty and not joining:
            starting = starting or ready[:1]  # nothing else goes on, so the least does, whatever the target
        return self._plan_cpu_batches(gpu_batch, joining, starting, limit_s)

    @property
    def most_cpu_batches(self) -> int:
        """CPU batches under way at once: one at each stage."""
        return self.model.num_layers + 1

    def fill(self, gpu_batch: GpuBatch, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort work of the GPU batch beside ``joined_rows``: prompts before decodes (section 3.3.2)."""
        self.add_prompts(gpu_batch, joined_rows, limit_s)
        gpu_batch.add_decodes(decodes, joined_rows, limit_s)
        gpu_batch.recall(joined_rows, limit_s)

    def add_prompts(self, gpu_batch: GpuBatch, joined_rows: RowsByStage, limit_s: float) -> None:
        """Best-effort prompts within the limit, or within the shares saved for them."""
        iteration = gpu_batch.state.iteration
        saved_s = (1 + self._turns.saved_share(iteration)) * gpu_batch.iteration_s(joined_rows)
        limit_s = max(limit_s, min(self.slo.iteration_s, saved_s))
        if gpu_batch.add_prompts(joined_rows, limit_s, must=self._turns.prompts_are_overdue(iteration)):
            self._turns.last_prompt = iteration

    def cpu_batch_plans(self, cpu_batches: Sequence[CpuBatch], spare_s: float) -> tuple[list[CpuBatchPlan], float]:
        """How CPU batches run stages, and the seconds that this takes beside one that each joins of each.

        ``spare_s`` is the time left if each joins once.
        """
        return [cpu_batch.plan(OVERLAPPED) for cpu_batch in cpu_batches], 0.0

    def _plan_cpu_batches(
        self, gpu_batch: GpuBatch, joining: list[CpuBatch], starting: Sequence[Request], limit_s: float
    ) -> IterationPlan:
        state, target_s = gpu_batch.state, self.slo.iteration_s
        for request in gpu_batch.builder.decodes:
            request.last_served = state.iteration
        recalled = {swap.request.request_id for swap in state.kv.swaps if swap.request is not None}
        starting = [request for request in starting if request.request_id not in recalled]
        expected_s = gpu_batch.iteration_s(rows_by_stage(joining, starting))
        cpu_batches = [*joining, state.cpu_batches.start(starting)] if starting else joining
        plans, added_s = self.cpu_batch_plans(cpu_batches, limit_s - expected_s)
        expected_s += added_s
        if gpu_batch.is_empty:
            expected_s = min(expected_s, target_s)
        self._length.add_iteration(expected_s, state.iteration)
        # With an empty GPU batch nothing else would end the iteration before the CPU batches have their tokens.
        return gpu_batch.builder.plan(plans, {"iteration_s": expected_s}, time_limit_s=target_s)


class OmniServeStepping(OmniServe):
    """OmniServe with few large CPU batches that run free, each as often as the target allows. This is not in a paper.

    A joined CPU batch runs one stage in an iteration, so n requests yield n / (d + 1) tokens in each, however fast the
    CPU is. A stage alone costs the GPU batch the weights of a layer once more. With large CPU batches that is little
    for each request.

    Decodes are as many as requests are resident, but a backlog of prompts has no end. Where prompts come first, decodes
    wait until the tiers are full. So prompts get the time that decodes leave.
    """

    @property
    def most_cpu_batches(self) -> int:
        return self.config.max_cpu_batches

    def fill(self, gpu_batch: GpuBatch, decodes: Sequence[Request], joined_rows: RowsByStage, limit_s: float) -> None:
        gpu_batch.add_decodes(decodes, joined_rows, limit_s)
        gpu_batch.recall(joined_rows, limit_s)
        self.add_prompts(
            gpu_batch, joined_rows, limit_s - self._alone_stages_s(gpu_batch.state.cpu_batches.under_way(), limit_s)
        )

    def _alone_stages_s(self, cpu_batches: Sequence[CpuBatch], limit_s: float) -> float:
        """Seconds of the stages alone for which the worker can be ready in an iteration of ``limit_s``, beside one that
        each joins."""
        loads = [(len(cpu_batch.members), context_tokens(cpu_batch.members)) for cpu_batch in cpu_batches]
        round_s = total_s(self.model.cpu_attention_s(*load) for load in loads)  # of the worker, for a layer of each
        rounds = limit_s / round_s if round_s else 0.0
        steps = [max(0.0, min(rounds, self.model.num_layers - cpu_batch.stage) - 1) for cpu_batch in cpu_batches]
        each_s = [self.model.linear_s(rows) + self.model.hand_over_s(rows) for rows, _ in loads]
        return total_s(count * alone_stage_s for count, alone_stage_s in zip(steps, each_s, strict=True))

    def cpu_batch_plans(self, cpu_batches: Sequence[CpuBatch], spare_s: float) -> tuple[list[CpuBatchPlan], float]:
        plans, added_s = [], 0.0
        for cpu_batch in sorted(cpu_batches, key=lambda cpu_batch: -len(cpu_batch.members)):
            rows, alone_stages_s = len(cpu_batch.members), [0.0]
            for stage in range(cpu_batch.stage, self.model.num_layers):
                # A stage alone costs as much as one joined to an empty GPU batch. Some stages will be joined, which is
                # cheaper.
                seconds = alone_stages_s[-1] + joined_rows_s(self.model, 0, 0, {stage: rows})
                if added_s + seconds > spare_s:
                    break
                alone_stages_s.append(seconds)
            crossings = len(alone_stages_s) - 1
            if crossings > 1:
                added_s += alone_stages_s[-1]
                plans.append(cpu_batch.plan(replace(FREE_RUNNING, max_stages=crossings)))
            else:
                plans.append(cpu_batch.plan(OVERLAPPED))
        return plans, added_s
