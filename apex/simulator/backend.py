"""The simulated backend: the interface of real hardware over a virtual clock, without tensors.

Scheduler, KV accounting and executor are the real ones. Only the seconds are predicted, from a profile table.

Resources:

- GPU: stages and GPU batch attention, one after the other. Each takes the time of :class:`~apex.perf.model.PerfModel`,
  and at least the time the host takes to launch it. The host is paced by the GPU, so the two share the clock.
  Stage -1 is the part of a layer before its attention, for all rows. Stage ``num_layers - 1`` is the rest of a
  layer, logits and sampling, for the rows that get a token.
- Host: its work per iteration and per request, and submitting attention tasks, delay the GPU batch. In a
  :class:`~apex.simulator.backend.Runtime` whose host works beside the GPU, an iteration takes the longer of
  the two.
- CPU attention worker: first come, first served. An attention task starts when the worker is free and its q, k, v have
  arrived.
  A ``synchronous`` backend waits for each attention task as it is submitted, so that the GPU is idle meanwhile.
- PCIe, one link each way. Swaps go layer by layer, out before in, and the GPU batch's attention waits for its layer's
  part.
  So it does for the earlier tokens that a chunk attends to in the CPU tier, of its own prompt or of a cached prefix,
  copied while the layer before computes. K and V that prompts store in the CPU tier are copied behind the layers that
  follow.
  States of linear attention are copied layer by layer, and each stage waits for its own.
  With ``whole_swaps`` neither overlaps (NEO section 3.1 has layer-wise swapping): the GPU batch starts after all swaps,
  and an iteration ends with a copy of the K and V that its prompts stored in the CPU tier. With an
  :class:`Interconnect`, which gives their sizes, q, k, v go to the host and outputs back; without one the profile's CPU
  attention includes these transfers.
- Weights: all on the GPU, unless a placement is given. Then a *streamed* stage, whose weights are copied to the GPU in
  each iteration, waits for its copy. A stage of the CPU is a task of the CPU worker, for which the GPU batch waits. So
  are experts in host memory of few rows. With many rows the stage waits for a copy of them.
- DRAM bandwidth: a PCIe transfer reads or writes DRAM at the link's rate, and the CPU worker gets the rest. During a
  transfer it runs at ``1 - link rate / DRAM rate`` of its speed. Transfers do not slow down.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from apex.perf.model import GpuBatchLoad, PerfModel
from apex.simulator.links import (
    CpuTask,
    Interconnect,
    Link,
    SimulatedWeights,
    SimulatedWorker,
    StreamingLink,
    WeightStream,
)
from swiftllm.core.plan import GpuBatchItem, StateCopy, Swap
from swiftllm.core.request import Request, Tier, TokenLogprob
from swiftllm.engine.backend import AttentionTimes, SwapTimes
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.model.placement import Place
from swiftllm.scheduling.state import SchedulingRules

# -- the process around a scheduler ------------------------------------------------------------------------------------
# What the process around a scheduler does in a simulation: this project's engine, or vLLM.


@dataclass(frozen=True)
class Runtime:
    """How iterations run. The defaults are those of this project's engine, and of the papers' baselines.

    Attributes:
        all_rows_to_end: all tokens cross the last layer. Else only those whose row is sampled.
        host_beside_gpu: the host works while the GPU does, so that an iteration takes the longer of the two. Else the
            GPU waits for the host.
        graph_sizes: batches of fewer tokens than the largest are computed with as many as the next of these.
        plans_ahead, whole_prompts: see :class:`swiftllm.scheduling.state.SchedulingRules`; of `vllm` alone.
        null_blocks: blocks of the GPU pool that no request gets.
    """

    all_rows_to_end: bool = False
    host_beside_gpu: bool = False
    graph_sizes: tuple[int, ...] = ()
    plans_ahead: bool = False
    whole_prompts: bool = False
    null_blocks: int = 0

    def padded(self, tokens: int) -> int:
        """Tokens that are computed for a batch of ``tokens``."""
        sizes = self.graph_sizes
        return sizes[bisect_left(sizes, tokens)] if sizes and 0 < tokens <= sizes[-1] else tokens

    def rules(self, rules: SchedulingRules) -> SchedulingRules:
        """The rules of `vllm` in this runtime."""
        return replace(rules, plans_ahead=self.plans_ahead, whole_prompts=self.whole_prompts)


OWN_ENGINE = Runtime()
VLLM = "vllm"
VLLM_DEFAULTS = "vLLM 0.19 with its defaults: prefix cache, asynchronous scheduling, graphs, whole prompts reserved"
PAPERS_VLLM = "as the papers ran it, without prefix cache, asynchronous scheduling and reservation"


def vllm_runtime(max_num_seqs: int) -> Runtime:
    """vLLM 0.19 with its defaults: asynchronous scheduling, CUDA graphs, reservation of whole prompts, a null block."""
    return Runtime(
        all_rows_to_end=True,
        host_beside_gpu=True,
        graph_sizes=graph_sizes(max_num_seqs),
        plans_ahead=True,
        whole_prompts=True,
        null_blocks=1,
    )


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The batch sizes that vLLM captures by default: up to twice ``max_num_seqs`` and 512 at most."""
    largest = min(2 * max_num_seqs, 512)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    return tuple(size for size in sizes if size <= largest)


# -- the backend -------------------------------------------------------------------------------------------------------

BLOCKS_OF_16 = LayerGroups(16)
PLACEHOLDER_TOKEN = 0
"""Every sampled token. Nothing is computed, so only ``max_tokens`` ends a request."""


@dataclass(frozen=True)
class BusyTimes:
    """Seconds each resource has worked. CPU time counts once its attention task is collected."""

    gpu_s: float
    cpu_s: float
    to_host_s: float
    to_gpu_s: float


@dataclass(eq=False, slots=True)
class SimulatedBatch:
    """A GPU batch or a CPU batch: its rows, seconds of one layer's attention, and ids of the requests that get a token.

    ``context_s``: seconds that PCIe takes in each layer for what chunks attend in the CPU tier. ``stored_s``: seconds
    that it takes at the end of the iteration for what chunks store there, if that is not copied layer by layer.
    """

    num_rows: int
    attention_s: float
    sampled: tuple[str, ...]
    requests: tuple[Request, ...] = ()
    context_s: float = 0.0
    stored_s: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedFuture:
    """See :class:`swiftllm.engine.backend.AttentionFuture`."""

    backend: SimulatedBackend
    task: CpuTask

    def ready(self) -> bool:
        return self.backend.is_ready(self.task)

    def wait(self) -> float:
        return self.backend.collect_output(self.task)

    def times(self) -> AttentionTimes:
        return self.task.times()


class SimulatedBackend:
    """See :class:`swiftllm.engine.backend.Backend` for the interface and the module's docstring for the model.

    Attributes:
        clock_s: the virtual time, from 0.
    """

    worker_restarts = 0

    def __init__(
        self,
        model: PerfModel,
        *,
        launch_s: float = 0.0,
        interconnect: Interconnect | None = None,
        weights: SimulatedWeights | None = None,
        runtime: Runtime = OWN_ENGINE,
        groups: LayerGroups = BLOCKS_OF_16,
        state_copy_s: float = 0.0,
        synchronous: bool = False,
        whole_swaps: bool = False,
    ) -> None:
        """``launch_s``: seconds to launch a stage or a layer's attention, for profiles that leave them out.
        ``groups``: how many KV blocks a request has. ``state_copy_s``: seconds in which PCIe copies a state of linear
        attention. ``synchronous``, ``whole_swaps``: what does not overlap, see the
        module.
        """
        streaming = None
        if weights is not None:
            if interconnect is None:
                raise ValueError("weights that are not all on the GPU need an interconnect")
            streaming = StreamingLink(interconnect.bytes_per_s)
        self.num_layers = model.num_layers
        self.clock_s = 0.0
        self.model = model
        self._launch_s = launch_s
        self._interconnect = interconnect
        self._runtime = runtime
        self._groups = groups
        self._state_copy_s = state_copy_s
        self._synchronous = synchronous
        self._whole_swaps = whole_swaps
        self._context_from_s = 0.0  # when the copy of a layer's context may begin
        self._host_done_s = 0.0  # when the host's work of this iteration is done, where it runs beside the GPU
        self._last = model.num_layers - 1
        # Sizes recur in every layer. Online correction changes the model of the scheduler, never that of the machine.
        self._linear_s = cache(model.linear_s)
        self._first_s = cache(model.first_stage_s)
        self._last_s = cache(model.last_stage_s)
        self._hand_over_s = cache(model.hand_over_s)
        self._iteration_s = iteration_s = model.host_work_s(0)
        # What an iteration takes in any case is charged where it begins (:meth:`swap`), not once for each batch.
        self._requests_s = cache(lambda requests: model.host_work_s(requests) - iteration_s)
        self._gpu_busy_s = 0.0
        self._cpu_busy_s = 0.0
        self._to_host = Link()
        self._to_gpu = Link() if streaming is None else streaming
        self._worker = SimulatedWorker(self._to_gpu, interconnect.dram_share if interconnect is not None else 0.0)
        self._swaps: SwapTimes | None = None  # what a GPU batch may still have to wait for
        self._state_copies: SwapTimes | None = None  # the same of states, for which any stage waits
        self._stream: WeightStream | None = None
        if weights is not None and streaming is not None:
            self._stream = WeightStream(weights, streaming, self._worker)

    @property
    def busy(self) -> BusyTimes:
        """The seconds each resource has worked so far."""
        return BusyTimes(self._gpu_busy_s, self._cpu_busy_s, self._to_host.busy_s, self._to_gpu.busy_s)

    @property
    def streamed_bytes(self) -> float:
        """Bytes of weights that were copied to the GPU so far."""
        return 0.0 if self._stream is None else self._stream.link.copied_bytes

    @property
    def extrapolated(self) -> frozenset[str]:
        """Names of operations that ran at sizes outside the profile table."""
        return frozenset(self.model.extrapolated)

    def now(self) -> float:
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        """Advance the clock of an idle engine."""
        self.clock_s += seconds

    # -- the GPU ----------------------------------------------------------------------------------------------------

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> SimulatedBatch:
        self._work_on_host(self._requests_s(len(items)))
        load = GpuBatchLoad.from_items(items)
        sampled = tuple(item.request.request_id for item in items if not item.is_prefill or item.samples)
        self._context_from_s = self.clock_s  # the first layer has no layer before, so its copy begins with the batch
        tokens, attention_s = self._runtime.padded(load.tokens), load.gpu_attention_s(self.model)
        context_s, stored_s = self._context_s(items), self._stored_s(items)
        return SimulatedBatch(tokens, attention_s, sampled, context_s=context_s, stored_s=stored_s)

    def _context_s(self, items: Sequence[GpuBatchItem]) -> float:
        if self.model.table.prefill_attention_cpu_tier is not None:  # measured with these copies: never count twice
            return 0.0
        earlier = [item.start for item in items if item.is_prefill and item.tier is Tier.CPU]
        return self.model.swap_s(sum(map(self._groups.blocks_for, earlier))) / self.num_layers

    def _stored_s(self, items: Sequence[GpuBatchItem]) -> float:
        if not self._whole_swaps:
            return 0.0
        stored = [item.num_tokens for item in items if item.is_prefill and item.tier is Tier.CPU]
        return self.model.swap_s(sum(map(self._groups.blocks_for, stored)))

    def open_cpu_batch(self, requests: Sequence[Request]) -> SimulatedBatch:
        self._work_on_host(self._requests_s(len(requests)))
        return self._cpu_batch(requests)

    def _work_on_host(self, seconds: float) -> None:
        if self._runtime.host_beside_gpu:
            self._host_done_s += seconds
        else:
            self.clock_s += seconds

    def _cpu_batch(self, requests: Sequence[Request]) -> SimulatedBatch:
        context_tokens = sum(request.num_tokens for request in requests)
        attention_s = self.model.cpu_attention_s(len(requests), context_tokens)
        return SimulatedBatch(len(requests), attention_s, tuple(r.request_id for r in requests), tuple(requests))

    def drop_rows(self, cpu_batch: SimulatedBatch, request_ids: frozenset[str]) -> SimulatedBatch:
        return self._cpu_batch([r for r in cpu_batch.requests if r.request_id not in request_ids])

    def run_stage(self, layer: int, batches: Sequence[SimulatedBatch]) -> Mapping[str, int]:
        if self._state_copies is not None and layer < self._last:  # the last stage has no states
            self.clock_s = max(self.clock_s, self._state_copies.ready_s(layer + 1))
            if self.clock_s >= self._state_copies.end_s:
                self._state_copies = None
        if self._stream is None:
            self._cross(layer, batches)
        elif self._stream.weights.placement.at(layer) is Place.EXPERTS and (
            self._rows_of(layer, batches) <= self._stream.weights.placement.most_cpu_rows
        ):
            self._cross_with_experts_on_cpu(layer, batches, self._stream.weights)
        else:
            self.clock_s = self._stream.enter(layer, self.clock_s)
            if self._stream.weights.placement.at(layer) is Place.CPU:
                self._cross_on_cpu(layer, batches, self._stream.weights)
            else:
                self._cross(layer, batches)
            self._stream.leave(self.clock_s)
        if layer < self._last:
            return {}
        # The end of the iteration for whoever is in its last stage: what did not overlap is paid for here.
        for batch in batches:
            if batch.stored_s:
                start_s, self.clock_s = self._to_host.book_transfer(self.clock_s, batch.stored_s)
                self._worker.slow_down(start_s, self.clock_s)
        if self._runtime.host_beside_gpu:
            self.clock_s = max(self.clock_s, self._host_done_s)
        return {request_id: PLACEHOLDER_TOKEN for batch in batches for request_id in batch.sampled}

    def holds_weights(self, layer: int) -> bool:
        """Whether a CPU batch may run stage ``layer`` by itself now, without a copy of weights for it alone."""
        return self._stream is None or self._stream.holds(layer)

    def _cross(self, layer: int, batches: Sequence[SimulatedBatch]) -> None:
        num_rows = 0
        for batch in batches:
            num_rows += batch.num_rows
        if 0 <= layer < self._last:
            self._run(self._linear_s(num_rows))
        elif layer < 0:
            self._run(self._first_s(num_rows))
        else:
            sampled = sum(len(batch.sampled) for batch in batches)
            self._run(self._last_s(sampled, num_rows if self._runtime.all_rows_to_end else sampled))

    def _cross_on_cpu(self, layer: int, batches: Sequence[SimulatedBatch], weights: SimulatedWeights) -> None:
        """The CPU worker computes the stage; the logits of the last one are the GPU's."""
        rows = self._rows_of(layer, batches)
        if rows:
            self._compute_on_cpu(rows * weights.hidden_bytes_per_row, weights.cpu_s(layer, rows))
        if layer == self._last:
            self._run(self.model.logits_s(rows))

    def _cross_with_experts_on_cpu(
        self, layer: int, batches: Sequence[SimulatedBatch], weights: SimulatedWeights
    ) -> None:
        """The CPU worker computes a stage's experts, the GPU all else."""
        experts, rows = weights.experts, self._rows_of(layer, batches)
        assert experts is not None, "there are some where a placement has them"
        if rows:
            seconds = self._linear_s(rows) if layer < self._last else self._last_s(rows, rows)
            self._run(max(0.0, seconds - experts.gpu(rows)))
            self._compute_on_cpu(rows * experts.hidden_bytes_per_row, experts.hop_s + experts.cpu(rows))

    def _rows_of(self, layer: int, batches: Sequence[SimulatedBatch]) -> int:
        """Those that a stage computes: of the last one, those that get a token."""
        return sum(batch.num_rows if layer < self._last else len(batch.sampled) for batch in batches)

    def _compute_on_cpu(self, crossing_bytes: int, seconds: float) -> None:
        """The GPU batch waits for the worker; so many bytes go to it and back."""
        link = self._interconnect
        assert link is not None, "there is one where weights are placed"
        crossing_s = link.transfer_s(crossing_bytes)
        # Outputs that came before go first: a link serves in the order in which it is asked.
        self._worker.return_outputs(self.clock_s)
        to_host = self._to_host.book_transfer(self.clock_s, crossing_s)
        self.collect_output(self._worker.submit(to_host[1], seconds, crossing_s, to_host))

    def gpu_attention(self, layer: int, gpu_batch: SimulatedBatch) -> None:
        if self._swaps is not None:
            self.clock_s = max(self.clock_s, self._swaps.ready_s(layer))  # of this layer's part alone
            if layer == self._last:
                self._swaps = None
        if gpu_batch.context_s:
            start_s, end_s = self._to_gpu.book_transfer(self._context_from_s, gpu_batch.context_s)
            self._worker.slow_down(start_s, end_s)
            self.clock_s = self._context_from_s = max(self.clock_s, end_s)
        self._run(gpu_batch.attention_s)

    def run_full_graph(self, gpu_batch: SimulatedBatch) -> Mapping[str, int] | None:
        """All layers of a GPU batch at once; declined where copies meet layers.

        The sums are made in the order of single stages, so that the clock has the same bits either way.
        """
        copies = self._swaps is not None or self._state_copies is not None
        if self._stream is not None or copies or gpu_batch.context_s:
            return None
        self._cross(-1, (gpu_batch,))
        clock_s, busy_s, launch_s = self.clock_s, self._gpu_busy_s, self._launch_s
        attention_s, linear_s = gpu_batch.attention_s, self._linear_s(gpu_batch.num_rows)
        attention_step_s, linear_step_s = max(attention_s, launch_s), max(linear_s, launch_s)
        for _ in range(self._last):
            busy_s = busy_s + attention_s + linear_s
            clock_s = clock_s + attention_step_s + linear_step_s
        self.clock_s, self._gpu_busy_s = clock_s + attention_step_s, busy_s + attention_s
        return self.run_stage(self._last, (gpu_batch,))

    def _run(self, seconds: float) -> None:
        self._gpu_busy_s += seconds
        self.clock_s += seconds if seconds > self._launch_s else self._launch_s

    # -- PCIe and the CPU worker ------------------------------------------------------------------------------------

    def submit_cpu_attention(self, layer: int, cpu_batch: SimulatedBatch) -> SimulatedFuture:
        self.clock_s += self._hand_over_s(cpu_batch.num_rows)
        arrived_s, return_s, to_host = self.clock_s, 0.0, None
        if self._interconnect is not None:
            link = self._interconnect
            self._worker.return_outputs(arrived_s)
            to_host = self._to_host.book_transfer(
                arrived_s, link.transfer_s(cpu_batch.num_rows * link.qkv_bytes_per_row)
            )
            self._worker.slow_down(*to_host)
            arrived_s = to_host[1]
            return_s = link.transfer_s(cpu_batch.num_rows * link.out_bytes_per_row)
        task = self._worker.submit(arrived_s, cpu_batch.attention_s, return_s, to_host)
        if self._synchronous:  # the GPU batch waits as with a worker that computes on the calling thread
            self.clock_s = max(self.clock_s, self._worker.ready_s(task))
        return SimulatedFuture(self, task)

    def is_ready(self, task: CpuTask) -> bool:
        self._worker.return_outputs(self.clock_s)
        return task.ready_s is not None and task.ready_s <= self.clock_s

    def collect_output(self, task: CpuTask) -> float:
        """Wait for a task's output; returns the seconds the worker computed for it."""
        self.clock_s = max(self.clock_s, self._worker.ready_s(task))
        busy_s = task.done_s - task.start_s
        self._cpu_busy_s += busy_s
        return busy_s

    def swap(self, swaps: Sequence[Swap]) -> SwapTimes | None:
        """Every iteration begins here, with or without swaps."""
        self._host_done_s = self.clock_s
        self._work_on_host(self._iteration_s)
        if not swaps:
            return None
        if self._swaps is not None:  # no GPU batch has waited for them, and the new ones may use the same blocks
            self.clock_s = max(self.clock_s, self._swaps.end_s)
        self._worker.return_outputs(self.clock_s)
        # Out before in, though the links could work at once: what comes in may take the blocks of what leaves.
        first_s, last_s = float("inf"), self.clock_s
        for source, link in ((Tier.GPU, self._to_host), (Tier.CPU, self._to_gpu)):
            blocks = sum(len(swap.source_blocks) for swap in swaps if swap.source is source)
            if blocks:
                start_s, last_s = link.book_transfer(last_s, self.model.swap_s(blocks))
                self._worker.slow_down(start_s, last_s)
                first_s = min(first_s, start_s)
        times = SwapTimes(min(first_s, last_s), last_s, self.num_layers)
        if self._whole_swaps:
            self.clock_s = max(self.clock_s, last_s)
        else:
            self._swaps = times
        return times

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """States go after what is on the link already, first those that are saved."""
        first_s, last_s = float("inf"), self.clock_s
        for saves, link in ((True, self._to_host), (False, self._to_gpu)):
            count = sum(copy.saves == saves for copy in copies)
            if count:
                start_s, last_s = link.book_transfer(last_s, count * self._state_copy_s)
                self._worker.slow_down(start_s, last_s)
                first_s = min(first_s, start_s)
        before = self._state_copies
        end_s = last_s if before is None else max(last_s, before.end_s)
        self._state_copies = SwapTimes(first_s, end_s, self.num_layers)

    # -- without state or results -----------------------------------------------------------------------------------

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return {}

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass
