"""APEX (section 3.4, Algorithm 1): GPU-first placement, then the inequality decides how the CPU is used.

Of the CPU requests, those *startable* have their last token and may start the next one in this plan. Those *in flight*
are part of the way through the layers with a token, as members of CPU batches under way (the paper's "partial
progress"). The CPU's *window* is the time of the GPU's work beside its attention of one layer. That attention *fits* if
it takes no longer, so that the GPU batch never waits for it. Sections without another name are those of APEX's paper.
"""

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
    """No CPU requests: GPU-only. Inequality (5) holds: asymmetric pipelining. Else: asynchronous overlap.

    The placement itself, GPU first, is :func:`~swiftllm.scheduling.scheduler.two_tiers`, which :class:`Hybrid` calls
    before :meth:`decide`.
    """

    def decide(self, builder: PlanBuilder, startable: CpuDecodes) -> IterationPlan:
        under_way, load = builder.state.cpu_batches.under_way(), GpuBatchLoad.from_builder(builder)
        if not startable and not under_way:
            return gpu_only(builder, self.model, load)
        in_flight = [request for cpu_batch in under_way for request in cpu_batch.members]
        num_cpu, cpu_context = len(startable) + len(in_flight), startable.context_tokens + context_tokens(in_flight)
        # Sizes of all CPU requests: where the plan pipelines, it includes those in flight.
        inequality = self._inequality(load, num_cpu, cpu_context)
        pays = inequality.holds
        predicted = {"inequality_left": inequality.left, "inequality_right": inequality.right}
        if self.config.compare_overlap and self.config.overlaps:
            predicted["overlap_rate"] = self._overlap_rate(load, num_cpu, cpu_context)
            pays &= inequality.left > predicted["overlap_rate"]
        may_start = self.config.overlaps and self._enough(startable, num_cpu, load)
        # Without overlap an overdue request has pipelining alone, even where that costs throughput: none may starve.
        only_way = startable.overdue is not None and not self.config.overlaps
        if self.config.pipelines and (pays or self.config.is_forced or only_way):
            if self._in_flight_fit(load, in_flight):
                # The GPU batch waits for what pipelines, so requests in flight are waited for, too. Their remaining
                # stages take the window of batch-1, which runs alone (:meth:`_pipeline`), and end with the iteration.
                pipeline = self._pipeline(load, startable, in_flight)
                # Both may be empty: where no request fits beside the GPU batch, pipelining would only wait.
                if any(batch.size for batch in pipeline.batches):
                    put_off_cpu_prompts(builder, pipeline, self.config)
                    return pipelined(builder, pipeline, under_way, predicted)
            else:
                # Waiting for those in flight would delay the GPU batch. They overlap to their end first. Were others
                # started meanwhile, there might always be some in flight, and pipelining would never have its turn.
                may_start = False
        cpu_batches = [cpu_batch.plan(OVERLAPPED) for cpu_batch in under_way]
        may_start = may_start and len(cpu_batches) < self.config.max_cpu_batches
        if may_start and (started := self._in_time(startable, in_flight, load)):
            # One CPU batch starts per iteration, so that later arrivals need not wait for the end of all others.
            cpu_batches.append(builder.state.cpu_batches.start(started).plan(OVERLAPPED))
        if not cpu_batches:
            return gpu_only(builder, self.model, load, predicted)
        # Every CPU batch under way is named, since one that a plan does not name stays at its stage.
        return builder.plan(cpu_batches, {"iteration_s": self._overlap_s(load, cpu_batches), **predicted})

    # -- Algorithm 1 ------------------------------------------------------------------------------------------------

    def _inequality(self, load: GpuBatchLoad, num_cpu: int, cpu_context: int) -> Inequality:
        """Inequality (5) at this iteration's sizes; with prefills it has the longer CPU window of Algorithm 1."""
        model = self.model
        gpu_rate, cpu_rate, linear_s, attention_s = self._rates(load, num_cpu, cpu_context)
        window_s = None  # that of a batch of decodes: 2 T_glinear + T_gatt
        if load.chunks:
            # Algorithm 1 changes the CPU's window alone. Rates and T_glinear stay those of the decodes, since prompts
            # yield no tokens to be compared.
            linear_with_prefill_s, attention_with_prefill_s = model.linear_s(load.tokens), load.gpu_attention_s(model)
            window_s = model.layer_s(mixed_cpu_window_s(linear_with_prefill_s, linear_s, attention_with_prefill_s))
            if not load.decodes:  # Algorithm 1 divides by the decodes' time; without any, the GPU batch's replaces it
                linear_s = linear_with_prefill_s
        return pipelining_pays(gpu_rate, cpu_rate, linear_s, attention_s, window_s, model.stream_s)

    def _rates(self, load: GpuBatchLoad, num_cpu: int, cpu_context: int) -> tuple[float, float, float, float]:
        """N_G and N_C in tokens of context per second; T_glinear and T_gatt of the decodes in seconds per layer."""
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

    def _in_flight_fit(self, load: GpuBatchLoad, in_flight: Sequence[Request]) -> bool:
        """Whether the CPU attention of all requests in flight fits beside the GPU batch. It does if the GPU batch is
        empty, since then nothing waits."""
        if not in_flight or not load.requests or self.config.disable_cpu_decode_limit:
            return True
        pipeline = Pipeline(self.model, load)
        pipeline.add_under_way(in_flight)
        return pipeline.hides_cpu()

    def _pipeline(self, load: GpuBatchLoad, startable: CpuDecodes, in_flight: Sequence[Request]) -> Pipeline:
        """Two batches whose CPU attention fits; requests in flight are counted first (section 3.4)."""
        pipeline = Pipeline(self.model, load)
        # In either order those in flight run, since the GPU batch must wait for them. The order decides whether they
        # take the window from those that would start, or exceed it beside them.
        if not self.config.disable_partial_progress_priority:
            pipeline.add_under_way(in_flight)
        add_cpu_decodes(pipeline, startable, self.config)
        if self.config.disable_partial_progress_priority:
            pipeline.add_under_way(in_flight)
        return pipeline

    # -- asynchronous overlap ---------------------------------------------------------------------------------------

    def _enough(self, startable: CpuDecodes, num_cpu: int, load: GpuBatchLoad) -> bool:
        """The threshold of section 4.2: hand-overs cost time, so overlap pays only with many CPU requests."""
        if not startable:
            return False
        # Of all CPU requests, those in flight included: the threshold is their number per GPU request.
        is_large = num_cpu >= self.config.min_cpu_request_ratio * load.requests
        return self.config.is_forced or startable.overdue is not None or is_large

    def _in_time(self, startable: CpuDecodes, in_flight: Sequence[Request], load: GpuBatchLoad) -> list[Request]:
        """The CPU decodes to start: those left out longest, as many as the CPU attends to in time.

        A CPU batch that overlaps advances by one layer an iteration. So the CPU attention of one layer, for them and
        for those in flight, must take no longer than a whole iteration. Section 6 reduces the number of CPU requests
        where it does: an attention task that ends a little late joins an iteration later, and the CPU is idle until
        then. Prompts of this iteration do not count: the CPU batch also goes on in later iterations, without them.
        """
        if self.config.disable_cpu_request_limit or not load.decodes:
            return startable.requests
        model = self.model
        layer_s = model.linear_s(load.decodes) + model.gpu_attention_s(load.decodes, load.decode_context)
        iteration_s = model.num_layers * model.layer_s(layer_s) + model.outside_layers_s(load.decodes)
        left_s = iteration_s - model.cpu_attention_s(len(in_flight), context_tokens(in_flight))
        waiting = sorted(startable.requests, key=attrgetter("last_served"))
        # sums[n]: context of the first n of them
        sums = [0, *accumulate(request.num_tokens for request in waiting)]
        most = longest_run(lambda count: model.cpu_attention_s(count, sums[count]), left_s, len(waiting))
        # At least one where nothing is in flight: a CPU too slow for any would otherwise stay idle for ever.
        return waiting[: max(most, not in_flight or startable.overdue is not None)]

    def _overlap_s(self, load: GpuBatchLoad, cpu_batches: Sequence[CpuBatchPlan]) -> float:
        """GPU-only time, plus what each CPU batch adds to the one stage of this iteration in which it joins."""
        model = self.model
        single_s = model.linear_s(load.tokens)
        joined_rows_s = total_s(
            model.linear_s(load.tokens + len(cpu_batch.requests)) - single_s for cpu_batch in cpu_batches
        )
        return gpu_batch_s(model, load) + joined_rows_s
