"""APEX (section 3.4, Algorithm 1): GPU-first placement, then the inequality decides how the CPU is used."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter

from apex.perf.model import GpuBatchLoad, context_tokens, total_s
from apex.schedulers.formulas import Inequality, mixed_cpu_window_s, overlap_rate, pipelining_pays
from apex.schedulers.hybrid import (
    CpuDecodes,
    Hybrid,
    Pipeline,
    add_cpu_decodes,
    gpu_batch_s,
    gpu_only,
    longest_run,
    pipelined,
    put_off_cpu_prompts,
)
from swiftllm.core.plan import OVERLAPPED, CpuBatchPlan, IterationPlan
from swiftllm.core.request import Request
from swiftllm.scheduling.scheduler import PlanBuilder


class Apex(Hybrid):
    """No CPU requests: GPU-only. Inequality (5) holds: asymmetric pipelining. Else: asynchronous overlap."""

    def decide(self, builder: PlanBuilder, ready: CpuDecodes) -> IterationPlan:
        under_way, load = builder.state.cpu_batches.under_way(), GpuBatchLoad.from_builder(builder)
        if not ready and not under_way:
            return gpu_only(builder, self.model, load)
        partial = [request for cpu_batch in under_way for request in cpu_batch.members]
        num_cpu, cpu_context = len(ready) + len(partial), ready.context_tokens + context_tokens(partial)
        inequality = self._inequality(load, num_cpu, cpu_context)
        pays = inequality.holds
        predicted = {"inequality_left": inequality.left, "inequality_right": inequality.right}
        if self.config.compare_overlap and self.config.overlaps:
            predicted["overlap_rate"] = self._overlap_rate(load, num_cpu, cpu_context)
            pays &= inequality.left > predicted["overlap_rate"]
        may_start = self.config.overlaps and self._enough(ready, num_cpu, load)
        only_way = ready.overdue is not None and not self.config.overlaps
        if self.config.pipelines and (pays or self.config.is_forced or only_way):
            if self._hides(load, partial):
                pipeline = self._pipeline(load, ready, partial)
                if any(batch.size for batch in pipeline.batches):
                    put_off_cpu_prompts(builder, pipeline, self.config)
                    return pipelined(builder, pipeline, under_way, predicted)
            else:
                may_start = False  # CPU batches under way overlap to their end, and no other starts
        cpu_batches = [cpu_batch.plan(OVERLAPPED) for cpu_batch in under_way]
        may_start = may_start and len(cpu_batches) < self.config.max_cpu_batches
        if may_start and (started := self._in_time(ready, partial, load)):
            # One CPU batch starts per iteration, so that later arrivals need not wait for the end of all others.
            cpu_batches.append(builder.state.cpu_batches.start(started).plan(OVERLAPPED))
        if not cpu_batches:
            return gpu_only(builder, self.model, load, predicted)
        return builder.plan(cpu_batches, {"iteration_s": self._overlap_s(load, cpu_batches), **predicted})

    # -- Algorithm 1 ------------------------------------------------------------------------------------------------

    def _inequality(self, load: GpuBatchLoad, num_cpu: int, cpu_context: int) -> Inequality:
        """Inequality (5) at this iteration's sizes; with prefills it has the longer CPU window of Algorithm 1."""
        model = self.model
        gpu_rate, cpu_rate, linear_s, attention_s = self._rates(load, num_cpu, cpu_context)
        window_s = None
        if load.chunks:
            linear_with_prefill_s, attention_with_prefill_s = model.linear_s(load.tokens), load.gpu_attention_s(model)
            window_s = model.layer_s(mixed_cpu_window_s(linear_with_prefill_s, linear_s, attention_with_prefill_s))
            if not load.decodes:  # Algorithm 1 divides by the decodes' time; without any, the GPU batch's replaces it
                linear_s = linear_with_prefill_s
        return pipelining_pays(gpu_rate, cpu_rate, linear_s, attention_s, window_s, model.stream_s)

    def _rates(self, load: GpuBatchLoad, num_cpu: int, cpu_context: int) -> tuple[float, float, float, float]:
        """N_G and N_C in tokens of context per second, T_glinear and T_gatt of the decodes in seconds per layer."""
        model = self.model
        attention_s = model.gpu_attention_s(load.decodes, load.decode_context)
        cpu_attention_s = model.cpu_attention_s(num_cpu, cpu_context)
        cpu_rate = cpu_context / cpu_attention_s if cpu_attention_s else float("inf")
        gpu_rate = load.decode_context / attention_s if attention_s else 0.0
        return gpu_rate, cpu_rate, model.linear_s(load.decodes), attention_s

    def _overlap_rate(self, load: GpuBatchLoad, num_cpu: int, cpu_context: int) -> float:
        model = self.model
        rates = self._rates(load, num_cpu, cpu_context)
        return overlap_rate(*rates, cpu_context, model.num_layers, model.stream_s)

    def _hides(self, load: GpuBatchLoad, partial: Sequence[Request]) -> bool:
        """Whether all requests under way fit the CPU's window; always with an empty GPU batch, since nothing waits."""
        if not partial or not load.requests or self.config.disable_cpu_decode_limit:
            return True
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(partial)
        return pipeline.hides_cpu()

    def _pipeline(self, load: GpuBatchLoad, ready: CpuDecodes, partial: Sequence[Request]) -> Pipeline:
        """Two batches that the CPU can compute in its window; requests under way come first."""
        pipeline = Pipeline(self.model, load)
        if not self.config.disable_partial_progress_priority:
            pipeline.add_under_way(partial)
        add_cpu_decodes(pipeline, ready, self.config)
        if self.config.disable_partial_progress_priority:
            pipeline.add_under_way(partial)
        return pipeline

    # -- asynchronous overlap ---------------------------------------------------------------------------------------

    def _enough(self, ready: CpuDecodes, num_cpu: int, load: GpuBatchLoad) -> bool:
        """The threshold of section 4.2: hand-overs cost time, so overlap pays only with many CPU requests."""
        if not ready:
            return False
        is_large = num_cpu >= self.config.min_cpu_request_ratio * load.requests
        return self.config.is_forced or ready.overdue is not None or is_large

    def _in_time(self, ready: CpuDecodes, partial: Sequence[Request], load: GpuBatchLoad) -> list[Request]:
        """The CPU decodes to start: those left out longest, as many as the CPU attends to within an iteration.

        Section 6 reduces the number of CPU requests where the CPU is seen to take longer than the GPU: an attention
        task that is a little late waits for the next iteration, and with it the CPU. The predicted times are corrected
        by those of iterations. Prompts make an iteration longer, but not those in which the CPU batch goes on: they do
        not count.
        """
        if self.config.disable_cpu_request_limit or not load.decodes:
            return ready.requests
        model = self.model
        layer_s = model.linear_s(load.decodes) + model.gpu_attention_s(load.decodes, load.decode_context)
        iteration_s = model.num_layers * model.layer_s(layer_s) + model.outside_layers_s(load.decodes)
        left_s = iteration_s - model.cpu_attention_s(len(partial), context_tokens(partial))
        waiting = sorted(ready.requests, key=attrgetter("last_served"))
        sums = [0, *accumulate(request.num_tokens for request in waiting)]
        most = longest_run(lambda count: model.cpu_attention_s(count, sums[count]), left_s, len(waiting))
        return waiting[: max(most, not partial or ready.overdue is not None)]

    def _overlap_s(self, load: GpuBatchLoad, cpu_batches: Sequence[CpuBatchPlan]) -> float:
        """GPU-only time, plus what each joined CPU batch adds to the stage it runs."""
        model = self.model
        single_s = model.linear_s(load.tokens)
        joined_rows_s = total_s(
            model.linear_s(load.tokens + len(cpu_batch.requests)) - single_s for cpu_batch in cpu_batches
        )
        return gpu_batch_s(model, load) + joined_rows_s
