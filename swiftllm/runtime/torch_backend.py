"""The backend that computes: torch on a CPU or a CUDA GPU, and pacpu for decode attention over the CPU tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem, StateCopy, Swap
from swiftllm.core.request import Request, Tier, TokenLogprob
from swiftllm.device import Device, open_device
from swiftllm.engine.backend import AttentionFuture
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import KVPlan, KVPools, block_bytes, check_kv, tier_formats
from swiftllm.machine import available_host_bytes
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Placement, all_resident
from swiftllm.model.stages import LoadedWeights, open_weights
from swiftllm.ops.interface import StateRows, concatenate
from swiftllm.runtime.cpu_tier import AttentionTask, CpuTier, InlineWorker, LocalCpuTier, MakeWorker, TaskRunner
from swiftllm.runtime.execution_context import CoreDivision, ExecutionContext, device_name, read_model_config
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.kv_transfers import KVTransfers, Pacer, StateTransfers
from swiftllm.runtime.memory import check_weights, plan_blocks
from swiftllm.runtime.memory_estimate import widest_iteration
from swiftllm.runtime.model_input import (
    BatchBuilder,
    CpuBatchInput,
    CpuBatchTensors,
    GpuBatchInput,
    GpuBatchTensors,
    PrefillGroup,
    Rows,
    cpu_batch_input,
    gpu_batch_input,
)
from swiftllm.sampling.sampler import PromptRows, PromptScorer, Sampler

if TYPE_CHECKING:
    from swiftllm.remote.tier import AttentionHosts

# -- a model before its KV cache ---------------------------------------------------------------------------------------
# A model whose weights are in memory, before the KV cache takes the rest of it.


class LoadedModel:
    """
    Attributes:
        processors: what computes it.
        model_config: of the whole model; ``model.config`` has the sizes of what this process computes of it.
        placement: where the weights are.
        graphs: the memory of captured graphs, which are not captured yet; None where there can be none.
        kv_formats, bytes_per_block: how each tier holds K and V; bytes of a block of it, in all layers of a group.
        state_bytes: of a request's state of linear attention.
        free_bytes: of the device, beside what the widest iteration needs. None: the device's memory is the host's.
    """

    def __init__(
        self,
        config: EngineConfig,
        processors: ExecutionContext,
        model_config: ModelConfig,
        sizes: ModelConfig,
        weights: LoadedWeights,
        placement: Placement,
        all_agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Put ``weights`` of these ``sizes`` to use, and measure what an iteration needs beside them.

        ``all_agree``: see :class:`~swiftllm.runtime.graphs.LayerGraphs`.
        """
        hardware, dtype = processors.hardware, processors.dtype
        longest = model_config.longest_request(config.max_model_len)
        self.processors, self.model_config, self.placement = processors, model_config, placement
        slots = config.max_num_seqs
        self.model = LlamaModel(sizes, weights, processors.ops, longest, processors.residual_dtype, slots)
        self.sampler = Sampler(config.seed, hardware, processors.ops.make_draw())
        self.prompt_scorer = PromptScorer(model_config.vocab_size, hardware)
        self.kv_formats = tier_formats(config, dtype)
        self.bytes_per_block = block_bytes(self.kv_formats, sizes, config.block_size)
        self.state_bytes = sizes.state_bytes(dtype.itemsize)
        self.graphs: LayerGraphs | None = None
        # Operations on states that wait for the host cannot be captured.
        if hardware.can_capture and (sizes.linear is None or processors.ops.takes_empty_rows):
            most = {"max_rows": config.max_num_seqs, "max_blocks": -(-longest // config.block_size)}
            where = {"layer_groups": LayerGroups.of(sizes, config.block_size), "placement": placement}
            self.graphs = LayerGraphs(hardware, self.model, dtype, all_agree=all_agree, **most, **where)
        self.free_bytes = hardware.left_free(partial(widest_iteration, self.model, self.sampler, config, dtype))
        self._unwritten_bytes = slots * sizes.state_bytes(dtype.itemsize) if self.free_bytes is None else 0

    def host_bytes(self, ranks: int = 1) -> int:
        """Available host memory for the part of one of ``ranks``, beside states of linear attention: where the device's
        memory is the host's, they are in pages that nobody has written yet."""
        return available_host_bytes() // ranks - self._unwritten_bytes


# -- the backend -------------------------------------------------------------------------------------------------------


class TorchBackend:
    """See :class:`swiftllm.engine.backend.Backend`. :func:`open_torch_backend` makes one.

    Set ``block_tables`` (request id to the block ids of the request's tier) before the first GPU batch opens. Tables
    are read when a GPU batch or CPU batch opens, and must be long enough for the tokens it is about to compute. In
    models with linear attention set ``state_slots`` (request id to the slot of its state) too.

    Attributes:
        hardware, model_config: where the linear layers run; of the whole model.
        model, sampler: what this process computes of it; what chooses tokens.
        graphs, placement: captured graphs, None on a host; where the weights are.
        device, dtype: the torch device of ``hardware``; the dtype of weights, activations and KV cache.
        cpu_kernel: pacpu's kernel for attention over the CPU tier.
        kv_plan, kv_pools: the KV cache, its size and its memory.
        num_gpu_blocks, num_cpu_blocks, block_size: the same.
        layer_groups: the layers by their attention window.
        kv_bytes_per_block, cpu_kv_bytes_per_block: bytes of a block of each tier, in all layers of a group.
        cpu_kv_format: how the CPU tier holds K and V.
        cpu_tier, attention_hosts: the CPU tier, other hosts' part included; the same, or None if they hold none.
        state_transfers: the snapshots of states of linear attention; None without any.
    """

    def __init__(self, loaded: LoadedModel, kv_pools: KVPools, cpu_tier: LocalCpuTier) -> None:
        self._processors = processors = loaded.processors
        self.hardware, self.dtype, self.cpu_kernel = processors.hardware, processors.dtype, processors.cpu_kernel
        self.device = self.hardware.torch_device
        self.model_config, self.model, self.placement = loaded.model_config, loaded.model, loaded.placement
        self.sampler, self._prompt_scorer, self.graphs = loaded.sampler, loaded.prompt_scorer, loaded.graphs
        self.kv_pools, self.kv_plan, self.layer_groups = kv_pools, kv_pools.plan, kv_pools.groups
        self.block_size, self.cpu_kv_format = self.kv_plan.block_size, kv_pools.formats[Tier.CPU]
        tiers = Tier.GPU, Tier.CPU
        self.kv_bytes_per_block, self.cpu_kv_bytes_per_block = (self.kv_plan.bytes_per_block[tier] for tier in tiers)
        self.num_gpu_blocks, self.num_cpu_blocks = (self.kv_plan.num_blocks[tier] for tier in tiers)
        self.block_tables: Mapping[str, Sequence[int]] = {}
        self.state_slots: Mapping[str, int] | None = None
        self._local_tier = cpu_tier
        self.cpu_tier: CpuTier = cpu_tier
        self.attention_hosts: AttentionHosts | None = None
        self._ops, self._scale = processors.ops, self.model_config.head_dim**-0.5
        self._host_sinks = [None if own is None else own.cpu() for own in map(self.model.sinks, range(self.num_layers))]
        self._pacer = Pacer(self.hardware.compute)
        self._transfers = KVTransfers(self.hardware, kv_pools, self._ops, cpu_tier)
        self.state_transfers: StateTransfers | None = None
        if (states := self.model.states) is not None and self.kv_plan.num_snapshots:
            linear = self.model.config.linear
            assert linear is not None
            of_states = states, linear.layers_before, self.kv_plan.num_snapshots
            self.state_transfers = StateTransfers(self.hardware, *of_states)
        self._builder = BatchBuilder(
            self.hardware, self.dtype, self.layer_groups, self.model.config.num_heads, self.model.rotary_table
        )

    # -- setting up ----------------------------------------------------------------------------------------------------

    def capture_graphs(self) -> None:
        """Capture the graphs anew, after they were closed; no effect where there can be none."""
        if self.graphs is not None:
            self.graphs.capture(self.kv_pools.layers[Tier.GPU])

    def use_hosts(self, hosts: AttentionHosts) -> None:
        """Extend the CPU tier by other hosts, while nothing is under way; ``hosts`` includes :attr:`cpu_tier`."""
        self.attention_hosts = self.cpu_tier = self._transfers.cpu_tier = hosts

    def use_cores(self, division: CoreDivision) -> None:
        """Compute with these numbers of threads from now on."""
        self._processors.use_cores(division)
        self._local_tier.runner.num_threads = division.cpu_threads

    def write_blocks(self, num_blocks: int, progress: Callable[[float, str], None]) -> None:
        """See :meth:`~swiftllm.kv.tensors.KVPools.write`."""
        self.kv_pools.write(num_blocks, self.cores.cpu_threads, progress)

    def draw_states(self) -> None:
        """Draw the states of linear attention, which the model has: see
        :meth:`~swiftllm.model.llama.LinearStates.draw`."""
        assert self.model.states is not None
        self.model.states.draw()

    @property
    def cores(self) -> CoreDivision:
        """Threads of a GPU batch on a CPU, and of attention over the CPU tier."""
        return self._processors.cores

    @property
    def device_name(self) -> str:
        return device_name(self.device)

    @property
    def num_layers(self) -> int:
        return self.model_config.num_layers

    @property
    def worker_restarts(self) -> int:
        return self._local_tier.restarts

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def weights_name(self) -> str:
        """Of the layers' matrices: their dtype, or ``4-bit AWQ, groups of 128``, and what library multiplies them."""
        scheme, library = self.model_config.quantisation, self._ops.by_library
        return self.dtype_name if scheme is None else scheme.describe() + (f", by {library}" if library else "")

    def now(self) -> float:
        return time.perf_counter()

    @torch.inference_mode()
    def swap(self, swaps: Sequence[Swap]) -> None:
        self._transfers.swap_blocks(swaps)

    @torch.inference_mode()
    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        assert self.state_transfers is not None
        self.state_transfers.copy(copies)

    @torch.inference_mode()
    def await_swaps(self) -> None:
        """Later work on the device finds all swaps done, not only those of the layers it comes to."""
        self._transfers.await_swaps()

    # -- batches: made of requests by the process that schedules, of descriptions alone by others ----------------------

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> GpuBatchTensors:
        return self.build_gpu_batch(*gpu_batch_input(items, self.block_tables, self.layer_groups, self.state_slots))

    def open_cpu_batch(self, requests: Sequence[Request]) -> CpuBatchTensors:
        if self.attention_hosts is not None:  # so that the rows of a host are adjacent
            requests = sorted(requests, key=lambda request: self.block_tables[request.request_id][0])
        description = cpu_batch_input(requests, self.block_tables, self.layer_groups, self.state_slots)
        return self.build_cpu_batch(description, requests)

    def drop_rows(self, cpu_batch: CpuBatchTensors, request_ids: frozenset[str]) -> CpuBatchTensors:
        return self.keep_rows(cpu_batch, cpu_batch.rows_without(request_ids))

    @torch.inference_mode()
    def build_gpu_batch(
        self, description: GpuBatchInput, requests: Sequence[Request] = (), prompts: Sequence[PromptRows] = ()
    ) -> GpuBatchTensors:
        """``requests`` get the tokens of the sampling rows, ``prompts`` the log-probabilities of the scored ones."""
        gpu_batch = self._builder.open_gpu_batch(description)
        gpu_batch.sampling_requests, gpu_batch.prompts = list(requests), tuple(prompts)
        self._transfers.load_first(gpu_batch)
        return gpu_batch

    @torch.inference_mode()
    def build_cpu_batch(self, description: CpuBatchInput, requests: Sequence[Request] = ()) -> CpuBatchTensors:
        cpu_batch = self._builder.open_cpu_batch(description)
        cpu_batch.sampling_requests = list(requests)
        return cpu_batch

    @torch.inference_mode()
    def keep_rows(self, cpu_batch: CpuBatchTensors, kept: Sequence[int]) -> CpuBatchTensors:
        """The CPU batch with these of its rows; see :meth:`drop_rows`."""
        self._await_return(cpu_batch)
        return self._builder.keep_rows(cpu_batch, kept)

    # -- the work of an iteration --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run_stage(self, layer: int, batches: Sequence[Rows]) -> Mapping[str, int]:
        batches = [batch for batch in batches if batch.num_rows]
        if not batches:
            return {}
        self._pacer.wait()
        # All are waits of the device alone: for states and weights that are copied, and for outputs of CPU attention.
        # That an attention task is ready means only that the way of its output to the device has begun.
        if self.state_transfers is not None:
            self.state_transfers.await_copies(layer)
        self.model.weights.enter(layer)
        for batch in batches:
            if isinstance(batch, CpuBatchTensors):
                self._await_return(batch)
        tokens: Mapping[str, int] = {}
        if layer == self.num_layers - 1:
            tokens = self._finish(batches)
        elif self.graphs is None or not self.graphs.run_stage(layer, batches):
            self._cross(layer, batches)
        # Behind all reads of the weights: the slot in which they are may take the next ones from here on.
        self.model.weights.launched()
        self._pacer.launched()
        return tokens

    def holds_weights(self, layer: int) -> bool:
        """Whether a stage can be run now without a copy of its weights for that alone."""
        return self.model.weights.holds(layer)

    def _await_return(self, cpu_batch: CpuBatchTensors) -> None:
        """Later work on the device finds the result of the CPU batch's CPU attention."""
        if cpu_batch.returned is not None:
            self.hardware.compute.wait(cpu_batch.returned)

    def _cross(self, layer: int, batches: Sequence[Rows]) -> None:
        rotary_rows = concatenate([batch.rotary_rows for batch in batches])
        state_rows = _concatenate_states([batch.state_rows for batch in batches])
        if layer < 0:
            residual = self.model.embed(concatenate([batch.token_ids for batch in batches]))
            qkv = self.model.first_stage(residual, rotary_rows, state_rows=state_rows)
        else:
            attention_out = concatenate([self.model.gated(batch.attention_out, batch.qkv) for batch in batches])
            residual = concatenate([batch.residual for batch in batches])
            for batch in batches:
                batch.residual = batch.qkv = None  # the next ones are in memory before these would be freed
            qkv = self.model.stage(layer, attention_out, residual, rotary_rows, state_rows=state_rows)
        start = 0
        for batch in batches:
            rows = slice(start, start + batch.num_rows)
            batch.residual, batch.qkv = residual[rows], qkv[rows]
            # A view of a few rows would keep a wide GPU batch's memory for as long as the CPU batch is under way.
            if isinstance(batch, CpuBatchTensors) and len(batches) > 1:
                batch.residual, batch.qkv = batch.residual.clone(), batch.qkv.clone()
            start = rows.stop

    @torch.inference_mode()
    def gpu_attention(self, layer: int, gpu_batch: GpuBatchTensors) -> None:
        # Of this layer alone: swaps of later layers go on beside its attention.
        self._transfers.await_swaps(layer)
        for group in gpu_batch.prefills:
            self._prefill_attention(layer, gpu_batch, group)
        if gpu_batch.decodes is not None and (self.graphs is None or not self.graphs.attention(layer, gpu_batch)):
            assert gpu_batch.qkv is not None
            rows, kv_layer = gpu_batch.decodes.rows, self.kv_pools.layers[Tier.GPU][layer]
            group, new = self.layer_groups.group_of[layer], self.model.split_qkv(gpu_batch.qkv[rows])
            addressed = (
                kv_layer,
                gpu_batch.decodes.block_tables[group],
                gpu_batch.decodes.seq_lens,
                gpu_batch.attention_out[rows],
            )
            how = self._scale, self.layer_groups.windows[group], self.model.sinks(layer)
            self._ops.decode_attention(*new, *addressed, *how)
        if layer + 1 < self.num_layers:  # while the device computes, the next part of the swaps is on its way
            self._transfers.begin_swaps(layer + 1)
        # The executor asks next which attention tasks are ready. A host far ahead of the device would ask too early,
        # find none, and let CPU batches miss stages that they could have joined.
        self._pacer.wait()

    @torch.inference_mode()
    def run_full_graph(self, gpu_batch: GpuBatchTensors) -> Mapping[str, int] | None:
        # One graph would have to wait for all swaps first. Layer by layer, a layer waits for its own part alone.
        if self.graphs is None or not self.placement.is_all_resident or self._transfers.has_swaps:
            return None
        self._pacer.wait()
        if self.state_transfers is not None:
            self.state_transfers.await_copies()
        crossed = self.graphs.run_full_graph(gpu_batch)
        if crossed is None:
            return None
        tokens = self._choose(*crossed, [gpu_batch])
        self._pacer.launched()
        return tokens

    def _prefill_attention(self, layer: int, gpu_batch: GpuBatchTensors, group: PrefillGroup) -> None:
        qkv = gpu_batch.qkv
        assert qkv is not None
        q, k, v = self.model.split_qkv(qkv)
        keys_and_values = self.model.without_gates(qkv)[:, q.shape[1] :]
        own = keys_and_values.unflatten(1, (2, k.shape[1])).permute(1, 2, 0, 3)
        index = self.layer_groups.group_of[layer]
        calls, stored = group.calls[index], group.stored[index]
        kv_layer = self.kv_pools.layers[Tier.GPU][layer]
        # A context that has the chunk's own tokens is read from the blocks, where they must be by then.
        stores_first = group.tier is Tier.GPU and any(call.has_own for call in calls)

        def store() -> None:
            if group.tier is Tier.GPU:
                self._ops.store_kv(k[stored.rows], v[stored.rows], kv_layer, stored.blocks, stored.offsets)
            else:
                self._transfers.store_rows(layer, keys_and_values[stored.rows], stored.blocks, stored.offsets)

        if stores_first:
            store()
        for number, call in enumerate(calls):
            context = own[:, :, call.rows] if call.contexts is None else self._context(layer, number, group, own)
            if call is calls[-1] and not stores_first:  # before, a ring's blocks hold what rows attend to
                store()
            rows, how = call.rows, (self._scale, self.layer_groups.windows[index], self.model.sinks(layer))
            keys, values = context
            self._ops.prefill_attention(q[rows], keys, values, call.lens, gpu_batch.attention_out[rows], *how)
            del context, keys, values  # the next one may take its place

    def _context(self, layer: int, number: int, group: PrefillGroup, own: torch.Tensor) -> torch.Tensor:
        """K and V of a call's chunks and of all that they attend to, ``[2, num_kv_heads, tokens, head_dim]``; ``own``
        are those of the GPU batch's rows."""
        call = group.calls[self.layer_groups.group_of[layer]][number]
        assert call.contexts is not None
        if group.tier is Tier.CPU:
            earlier = self._transfers.take_contexts(layer, number, group)
        else:
            gathered = self._ops.gather_contexts(self.kv_pools.layers[Tier.GPU][layer], call.contexts)
            if call.has_own:
                return gathered
            earlier = gathered.split(call.contexts.tokens, dim=2)
        new = own[:, :, call.rows].split(call.lens.rows, dim=2)
        context = torch.cat([part for parts in zip(earlier, new, strict=True) for part in parts], dim=2)
        if group.tier is Tier.CPU:
            del earlier  # the next contexts may take its place
            self._transfers.load_after(layer, number, group)
        return context

    @torch.inference_mode()
    def submit_cpu_attention(self, layer: int, cpu_batch: CpuBatchTensors) -> AttentionFuture:
        hardware = self.hardware
        assert cpu_batch.qkv is not None
        # The tier carries out what it is asked in order, so a swap that brings this layer's blocks must be asked first.
        self._transfers.begin_swaps(layer)
        of_host = self.model.without_gates(cpu_batch.qkv).contiguous()
        hardware.to_host.wait(hardware.compute.mark())  # Q, K and V are not computed yet, only launched
        if not cpu_batch.opened:
            of_groups = zip(cpu_batch.block_tables, self.layer_groups.windows, strict=True)
            cpu_batch.opened = [self.cpu_tier.open(tables, cpu_batch.seq_lens, window) for tables, window in of_groups]
        group, place = self.layer_groups.group_of[layer], self.layer_groups.place_of[layer]
        qkv = hardware.to_host.fetch(of_host)

        # On the worker's thread, as soon as the output is there: the main thread may be launching other work.
        def send_back() -> None:
            hardware.to_device.copy(cpu_batch.attention_out, cpu_batch.host_out)
            cpu_batch.returned = hardware.to_device.mark()

        task = AttentionTask(place, cpu_batch.opened[group], qkv, cpu_batch.host_out, self._host_sinks[layer])
        return self.cpu_tier.attend(task, hardware.to_host.mark(), send_back)

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return self.sampler.take_logprobs()

    def recover(self) -> None:
        # The workers first: swaps wait for what they gather. The device last, since it runs what both have launched.
        self.cpu_tier.recover()
        self._transfers.forget_swaps()
        if self.state_transfers is not None:
            self.state_transfers.forget_copies()
        self.sampler.take_logprobs()
        self.hardware.compute.mark().synchronize()

    def close(self) -> None:
        self.cpu_tier.close()
        if self.graphs is not None:
            self.graphs.close()

    def _finish(self, batches: Sequence[Rows]) -> dict[str, int]:
        """The last stage, for rows that get tokens or log-probabilities: others are done once K and V are stored."""
        for batch in batches:
            if isinstance(batch, GpuBatchTensors) and batch.scored_rows:
                self._score_prompts(batch)
        batches = [batch for batch in batches if batch.num_samples]
        if not batches:
            return {}

        def select(batch: Rows, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if batch.sampling_rows is None else tensor.index_select(0, batch.sampling_rows)

        crossed = None if self.graphs is None else self.graphs.last_stage(batches)
        if crossed is None:
            attended = [(batch, self.model.gated(batch.attention_out, batch.qkv)) for batch in batches]
            attention_out = concatenate([select(batch, rows) for batch, rows in attended])
            residual = concatenate([select(batch, batch.residual) for batch in batches])
            crossed = self.model.last_stage(attention_out, residual), None
        return self._choose(*crossed, batches)

    def _score_prompts(self, gpu_batch: GpuBatchTensors) -> None:
        residual, qkv = gpu_batch.residual, gpu_batch.qkv
        assert residual is not None and qkv is not None

        def logits_of(rows: slice) -> torch.Tensor:
            attended = self.model.gated(gpu_batch.attention_out[rows], qkv[rows])
            return self.model.last_stage(attended, residual[rows].clone())  # of a copy

        if gpu_batch.prompts:
            self._prompt_scorer.score_prompts(gpu_batch.prompts, logits_of)
            return
        for rows in gpu_batch.scored_rows:  # the rank with the requests does the same, and keeps the results
            for piece in self._prompt_scorer.pieces(rows):
                logits_of(piece)

    def _choose(self, logits: torch.Tensor, likeliest: torch.Tensor | None, batches: Sequence[Rows]) -> dict[str, int]:
        """The next token of each request of the batches; see :meth:`Sampler.sample`."""
        requests = [request for batch in batches for request in batch.sampling_requests]
        if not requests:
            return {}
        tokens = self.sampler.sample(logits, requests, likeliest)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}


def _concatenate_states(parts: Sequence[StateRows | None]) -> StateRows | None:
    """The states of batches whose rows follow each other. Only the first one may have chunks."""
    if None in parts:
        return None
    own = [part for part in parts if part is not None]
    assert not any(part.chunks for part in own[1:]), "chunks behind decodes"
    return replace(own[0], decode_slots=concatenate([part.decode_slots for part in own]))


def open_torch_backend(
    config: EngineConfig,
    make_worker: MakeWorker = InlineWorker,
    hardware: Device | None = None,
    placement: Placement | None = None,
) -> TorchBackend:
    """The backend of one process, with the whole model.

    Args:
        make_worker: makes the worker that runs CPU attention and writes to the CPU tier, and another one that reads the
            tier for the GPU; default: both at once, on the calling thread.
        hardware: replaces the device that ``config.device`` names.
        placement: where the weights are; by default all on the device.

    Raises:
        FileNotFoundError, ValueError: the model folder is incomplete or of an unsupported kind.
        InsufficientMemory: the model or the KV cache asked for does not fit.
    """
    hardware = hardware or open_device(config.device)
    processors = ExecutionContext(config, hardware)
    model = read_model_config(config.model, processors.dtype)
    check_kv(config, model)
    placement = placement or all_resident(model.num_layers)
    host_bytes = None if hardware.torch_device.type == "cpu" else available_host_bytes()
    check_weights(
        model,
        processors.dtype,
        hardware.free_bytes(),
        placement,
        host_bytes=host_bytes,
        max_num_seqs=config.max_num_seqs,
    )
    weights = open_weights(config, model, processors.dtype, processors.ops, placement, hardware, processors.host_ops)
    loaded = LoadedModel(config, processors, model, model, weights, placement)
    plan = plan_blocks(config, loaded.bytes_per_block, loaded.host_bytes(), loaded.free_bytes, loaded.state_bytes)
    return serve_loaded(loaded, plan, make_worker)


def serve_loaded(loaded: LoadedModel, kv_plan: KVPlan, make_worker: MakeWorker) -> TorchBackend:
    """Give a loaded model its KV cache, captured graphs and workers. Ranks have met before."""
    processors = loaded.processors
    pools = KVPools(loaded.model.config, kv_plan, processors.hardware.torch_device, loaded.kv_formats)
    runner = TaskRunner(pools.tensors[Tier.CPU], kernel=processors.cpu_kernel, num_threads=processors.cores.cpu_threads)
    if loaded.graphs is not None:
        loaded.graphs.capture(pools.layers[Tier.GPU])
    # Last: if anything above failed, an unclosed worker would keep the CPU tier's memory.
    return TorchBackend(loaded, pools, LocalCpuTier(runner, make_worker))
