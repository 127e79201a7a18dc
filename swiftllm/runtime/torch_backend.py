"""The backend that computes: torch on a CPU or a CUDA GPU, and pacpu for decode attention over the CPU tier."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.plan import LaneItem, Swap
from swiftllm.core.request import Request, Tier, TokenLogprob
from swiftllm.device import open_device
from swiftllm.device.device import Device
from swiftllm.engine.backend import Ticket
from swiftllm.kv.pools import KVPools
from swiftllm.kv.sizing import KVPlan, check_weights, plan_blocks
from swiftllm.machine import available_host_bytes
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.loaded_weights import LoadedWeights, open_weights
from swiftllm.model.placement import Placement, all_resident
from swiftllm.ops.cpu import CpuOps, torch_threads
from swiftllm.ops.interface import ChunkAttention
from swiftllm.ops.select import select_ops
from swiftllm.runtime.batch import BatchBuilder, CohortBatch, LaneBatch, PrefillGroup, Rows, concatenate
from swiftllm.runtime.cores import CoreDivision, core_divisions
from swiftllm.runtime.cpu_tier import CpuTier, LocalCpuTier
from swiftllm.runtime.description import CohortDescription, LaneDescription, describe_cohort, describe_lane
from swiftllm.runtime.dtype_and_kernel import device_name, resolve_dtype, resolve_kernel
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.interpreter import share_interpreter
from swiftllm.runtime.kv_transfers import KVTransfers
from swiftllm.runtime.pacing import Pacer
from swiftllm.runtime.widest_iteration import widest_iteration
from swiftllm.runtime.workers.inline import InlineWorker
from swiftllm.runtime.workers.interface import MakeWorker
from swiftllm.runtime.workers.task import TaskRunner
from swiftllm.sampling.logprobs import PromptScorer
from swiftllm.sampling.sampler import Sampler

if TYPE_CHECKING:
    from swiftllm.remote.homes import AttentionHosts


class TorchBackend:
    """See :class:`swiftllm.engine.backend.Backend`.

    Set ``block_tables`` (request id to the block ids of the request's tier) before the first lane opens. Tables are
    read when a lane or cohort opens, and must be long enough for the tokens it is about to compute.

    Attributes:
        hardware, model_config: where the linear layers run; of the whole model.
        graphs, placement: captured graphs, None on a host; where the weights are.
        device, device_name: the torch device of ``hardware``, and the product's name.
        dtype: of weights, activations and KV cache.
        num_gpu_blocks, num_cpu_blocks, block_size, kv_bytes_per_block: the KV cache; a block's bytes span all layers.
        cores, cpu_kernel: threads of a lane on a CPU and of attention over the CPU tier; pacpu's kernel for that.
        cpu_tier, attention_hosts: the CPU tier, other hosts' part included; the same, or None if they hold none.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: MakeWorker = InlineWorker,
        hardware: Device | None = None,
        placement: Placement | None = None,
    ) -> None:
        """``make_worker`` makes the worker that runs CPU attention and writes to the CPU tier, and another one that
        reads the tier for the GPU; default: both at once, on the calling thread.
        ``hardware`` replaces the device that ``config.device`` names. ``placement``: by default all on the device.

        Raises:
            FileNotFoundError, ValueError: the model folder is incomplete or of an unsupported kind.
            InsufficientMemory: the model or the KV cache asked for does not fit.
        """
        share_interpreter()
        self.hardware = hardware or open_device(config.device)
        self.device = self.hardware.torch_device
        self.dtype = resolve_dtype(config, self.device)
        self.device_name = device_name(self.device)
        self.cpu_kernel = resolve_kernel(config, self.dtype)
        self.model_config, self.block_size = ModelConfig.from_folder(config.model), config.block_size
        longest = self.model_config.longest_request(config.max_model_len)
        self.placement = placement or all_resident(self.model_config.num_layers)
        self._ops = select_ops(self.device, self.dtype, self.cpu_kernel)
        self._host_ops = CpuOps()  # for boundaries that the CPU computes
        self._use_lane_threads(core_divisions(config, lane_on_cpu=self.device.type == "cpu")[0])
        sizes = self._sizes()
        may_be_placed = self.device.type != "cpu" and config.tensor_parallel == 1
        host_bytes = available_host_bytes() if may_be_placed else None
        check_weights(sizes, self.dtype, self._free_bytes(), self.placement, host_bytes=host_bytes)
        self._model = LlamaModel(sizes, self._open_weights(config), self._ops, longest)
        self._scale = self.model_config.head_dim**-0.5
        self._sampler = Sampler(config.seed, self.hardware)
        self._prompt_scorer = PromptScorer(self.model_config.vocab_size, self.hardware)
        self.kv_bytes_per_block = sizes.kv_bytes_per_token(self.dtype.itemsize) * self.block_size
        self.graphs = self._make_graphs(config) if self.hardware.can_capture else None
        widest = partial(widest_iteration, self._model, self._sampler, config, self.dtype)
        self.kv_plan = self._plan_blocks(config, self.hardware.left_free(widest))
        self.kv_pools = KVPools(sizes, self.kv_plan, self.device, self.dtype)
        self.num_gpu_blocks, self.num_cpu_blocks = map(self.kv_pools.num_blocks.get, (Tier.GPU, Tier.CPU))
        self.block_tables: Mapping[str, Sequence[int]] = {}
        pool = self.kv_pools.tensors[Tier.CPU]
        self._runner = TaskRunner(pool, kernel=self.cpu_kernel, num_threads=self.cores.cpu_threads)
        self._pacer = Pacer(self.hardware.compute)
        self._builder = BatchBuilder(
            self.hardware, self.dtype, self.block_size, sizes.num_heads, self._model.rotary_table
        )
        self._capture_graphs()
        # Last: if anything above failed, an unclosed worker would keep the CPU tier's memory.
        self._worker, self._reader = make_worker(self._runner), make_worker(self._runner)
        about = {"num_heads": sizes.num_heads, "num_kv_heads": sizes.num_kv_heads, "scale": self._scale}
        self.cpu_tier: CpuTier = LocalCpuTier(self._runner, self._worker, self._reader, **about)
        self.attention_hosts: AttentionHosts | None = None
        self._transfers = KVTransfers(self.hardware, self.kv_pools, self._ops, self.cpu_tier)

    # -- what a rank of several does in another way: see swiftllm.parallel ---------------------------------------------

    def _sizes(self) -> ModelConfig:
        """The sizes of what this process computes of the model."""
        return self.model_config

    def _open_weights(self, config: EngineConfig) -> LoadedWeights:
        placed = self._ops, self.placement, self.hardware, self._host_ops
        return open_weights(config, self.model_config, self.dtype, *placed)

    def _free_bytes(self) -> int:
        """Memory of the device that this process may take."""
        return self.hardware.free_bytes()

    def _plan_blocks(self, config: EngineConfig, device_bytes: int | None) -> KVPlan:
        """``device_bytes``: see :func:`~swiftllm.kv.sizing.plan_blocks`."""
        return plan_blocks(config, self.kv_bytes_per_block, available_host_bytes(), device_bytes)

    def _capture_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.capture(self.kv_pools.layers[Tier.GPU])

    # -- setting up ----------------------------------------------------------------------------------------------------

    def _make_graphs(self, config: EngineConfig) -> LayerGraphs:
        return LayerGraphs(
            self.hardware,
            self._model,
            self.dtype,
            max_rows=config.max_num_seqs,
            max_blocks=-(-len(self._model.rotary_table) // self.block_size),
            placement=self.placement,
        )

    def use_hosts(self, hosts: AttentionHosts) -> None:
        """Extend the CPU tier by other hosts, while nothing is under way; ``hosts`` includes :attr:`cpu_tier`."""
        self.attention_hosts = self.cpu_tier = self._transfers.cpu_tier = hosts

    def use_cores(self, division: CoreDivision) -> None:
        """Compute with these numbers of threads from now on."""
        self._use_lane_threads(division)
        self._runner.num_threads = division.cpu_threads

    def _use_lane_threads(self, division: CoreDivision) -> None:
        self.cores = division
        self._host_ops.num_threads = division.cpu_threads
        if isinstance(self._ops, CpuOps):
            torch.set_num_threads(torch_threads(self.dtype, division.lane_threads))
            self._ops.num_threads = division.lane_threads
        else:  # torch copies in host memory: more threads would spin after each copy on the worker's cores
            torch.set_num_threads(division.lane_threads)
            self._ops.num_threads = division.cpu_threads

    def write_blocks(self, num_blocks: int, progress: Callable[[float, str], None]) -> None:
        """See :meth:`~swiftllm.kv.pools.KVPools.write`."""
        self.kv_pools.write(num_blocks, progress)

    @property
    def num_layers(self) -> int:
        return self.model_config.num_layers

    @property
    def worker_restarts(self) -> int:
        return self._worker.restarts + self._reader.restarts

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
    def await_swaps(self) -> None:
        """Later work on the device finds all swaps done, not only those of the layers it comes to."""
        self._transfers.await_swaps()

    @torch.inference_mode()
    def open_lane(self, items: Sequence[LaneItem]) -> LaneBatch:
        description, requests, prompts = describe_lane(items, self.block_tables, self.block_size)
        lane = self.build_lane(description)
        lane.sampling_requests, lane.prompts = requests, tuple(prompts)
        return lane

    @torch.inference_mode()
    def open_cohort(self, requests: Sequence[Request]) -> CohortBatch:
        if self.attention_hosts is not None:  # so that the rows of a home are adjacent
            requests = sorted(requests, key=lambda request: self.block_tables[request.request_id][0])
        cohort = self.build_cohort(describe_cohort(requests, self.block_tables, self.block_size))
        cohort.sampling_requests = list(requests)
        return cohort

    @torch.inference_mode()
    def drop_rows(self, cohort: CohortBatch, request_ids: frozenset[str]) -> CohortBatch:
        return self.keep_rows(
            cohort, [row for row, r in enumerate(cohort.sampling_requests) if r.request_id not in request_ids]
        )

    # -- batches without their requests --------------------------------------------------------------------------------

    @torch.inference_mode()
    def build_lane(self, description: LaneDescription) -> LaneBatch:
        lane = self._builder.open_lane(description)
        self._transfers.load_first_layer(lane)
        return lane

    @torch.inference_mode()
    def build_cohort(self, description: CohortDescription) -> CohortBatch:
        return self._builder.open_cohort(description)

    @torch.inference_mode()
    def keep_rows(self, cohort: CohortBatch, kept: Sequence[int]) -> CohortBatch:
        """The cohort with these of its rows; see :meth:`drop_rows`."""
        self._await_return(cohort)
        return self._builder.keep_rows(cohort, kept)

    # -- the work of an iteration --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def boundary(self, layer: int, batches: Sequence[Rows]) -> Mapping[str, int]:
        batches = [batch for batch in batches if batch.num_rows]
        if not batches:
            return {}
        self._pacer.wait()
        self._model.weights.enter(layer)
        for batch in batches:
            if isinstance(batch, CohortBatch):
                self._await_return(batch)
        tokens: Mapping[str, int] = {}
        if layer == self.num_layers - 1:
            tokens = self._finish(batches)
        elif self.graphs is None or not self.graphs.boundary(layer, batches):
            self._cross(layer, batches)
        self._model.weights.launched()
        self._pacer.launched()
        return tokens

    def holds_weights(self, layer: int) -> bool:
        """Whether a boundary can be crossed now without a copy of its weights for that alone."""
        return self._model.weights.holds(layer)

    def _await_return(self, cohort: CohortBatch) -> None:
        """Later work on the device finds the result of the cohort's CPU attention."""
        if cohort.returned is not None:
            self.hardware.compute.wait(cohort.returned)

    def _cross(self, layer: int, batches: Sequence[Rows]) -> None:
        rotary_rows = concatenate([batch.rotary_rows for batch in batches])
        if layer < 0:
            residual = self._model.embed(concatenate([batch.token_ids for batch in batches]))
            qkv = self._model.enter(residual, rotary_rows)
        else:
            attention_out = concatenate([batch.attention_out for batch in batches])
            residual = concatenate([batch.residual for batch in batches])
            for batch in batches:
                batch.residual = batch.qkv = None  # the next ones are in memory before these would be freed
            qkv = self._model.cross(layer, attention_out, residual, rotary_rows)
        start = 0
        for batch in batches:
            rows = slice(start, start + batch.num_rows)
            batch.residual, batch.qkv = residual[rows], qkv[rows]
            if isinstance(batch, CohortBatch) and len(batches) > 1:  # else it keeps a wide lane's memory while it waits
                batch.residual, batch.qkv = batch.residual.clone(), batch.qkv.clone()
            start = rows.stop

    @torch.inference_mode()
    def gpu_attention(self, layer: int, lane: LaneBatch) -> None:
        self._transfers.await_swaps(layer)
        for group in lane.prefills:
            self._prefill_attention(layer, lane, group)
        if lane.decodes is not None and (self.graphs is None or not self.graphs.attention(layer, lane)):
            rows, kv_layer = lane.decodes.rows, self.kv_pools.layers[Tier.GPU][layer]
            new = self._model.split_qkv(lane.qkv[rows])
            tables, lens = lane.decodes.block_tables, lane.decodes.seq_lens
            self._ops.decode_attention(*new, kv_layer, tables, lens, lane.attention_out[rows], self._scale)
        self._pacer.wait()  # before the executor asks which cohorts are ready

    @torch.inference_mode()
    def whole_iteration(self, lane: LaneBatch) -> Mapping[str, int] | None:
        # Layer by layer, a layer waits for its own part of the swaps alone.
        if self.graphs is None or not self.placement.is_all_resident or self._transfers.has_swaps:
            return None
        self._pacer.wait()
        crossed = self.graphs.whole_iteration(lane)
        if crossed is None:
            return None
        tokens = self._choose(*crossed, [lane])
        self._pacer.launched()
        return tokens

    def _prefill_attention(self, layer: int, lane: LaneBatch, group: PrefillGroup) -> None:
        q, k, v = self._model.split_qkv(lane.qkv)
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        if group.tier is Tier.GPU:
            kv_layer = self.kv_pools.layers[Tier.GPU][layer]
            self._ops.store_kv(k[group.rows], v[group.rows], kv_layer, group.blocks, group.offsets)
            contexts = [
                None if chunk.blocks is None else self._ops.gather_kv(kv_layer, chunk.blocks, chunk.context_len)
                for chunk in group.chunks
            ]
        else:  # the CPU tier lacks the chunk's own K and V until the host has written them
            own = lane.qkv[:, num_heads:].unflatten(1, (2, num_kv_heads)).permute(1, 2, 0, 3)
            contexts = [self._transfers.take_context(layer, chunk, own[:, :, chunk.rows]) for chunk in group.chunks]
            self._transfers.store_rows(layer, lane.qkv[group.rows, num_heads:], group.blocks, group.offsets)
        chunks = []
        for chunk, context in zip(group.chunks, contexts, strict=True):
            k_and_v = (x[chunk.rows].transpose(0, 1) for x in (k, v)) if context is None else context
            chunks.append(ChunkAttention(q[chunk.rows], *k_and_v, chunk.mask, lane.attention_out[chunk.rows]))
        self._ops.prefill_attention(chunks, self._scale)

    @torch.inference_mode()
    def submit_cpu_attention(self, layer: int, cohort: CohortBatch) -> Ticket:
        hardware = self.hardware
        hardware.to_host.wait(hardware.compute.mark())
        if cohort.opened is None:
            cohort.opened = self.cpu_tier.open(cohort.block_tables, cohort.seq_lens)
        qkv = hardware.to_host.fetch(cohort.qkv)

        def send_back() -> None:
            hardware.to_device.copy(cohort.attention_out, cohort.host_out)
            cohort.returned = hardware.to_device.mark()

        return self.cpu_tier.attend(layer, cohort.opened, qkv, cohort.host_out, hardware.to_host.mark(), send_back)

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return self._sampler.take_logprobs()

    def recover(self) -> None:
        self.cpu_tier.recover()
        self._transfers.forget_swaps()
        self._sampler.take_logprobs()
        self.hardware.compute.mark().synchronize()

    def close(self) -> None:
        self.cpu_tier.close()
        if self.graphs is not None:
            self.graphs.close()

    def _finish(self, batches: Sequence[Rows]) -> dict[str, int]:
        """The last boundary, for rows that get tokens or log-probabilities: others are done once K and V are stored."""
        for batch in batches:
            if isinstance(batch, LaneBatch) and batch.scored_rows:
                self._score_prompts(batch)
        batches = [batch for batch in batches if batch.num_samples]
        if not batches:
            return {}

        def select(batch: Rows, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if batch.sampling_rows is None else tensor.index_select(0, batch.sampling_rows)

        crossed = None if self.graphs is None else self.graphs.last_boundary(batches)
        if crossed is None:
            attention_out = concatenate([select(batch, batch.attention_out) for batch in batches])
            residual = concatenate([select(batch, batch.residual) for batch in batches])
            crossed = self._model.leave(attention_out, residual), None
        return self._choose(*crossed, batches)

    def _score_prompts(self, lane: LaneBatch) -> None:
        self._prompt_scorer.score_prompts(lane.prompts, partial(self._prompt_logits, lane))

    def _prompt_logits(self, lane: LaneBatch, rows: slice) -> torch.Tensor:
        return self._model.leave(lane.attention_out[rows], lane.residual[rows].clone())  # of a copy

    def _choose(self, logits: torch.Tensor, likeliest: torch.Tensor | None, batches: Sequence[Rows]) -> dict[str, int]:
        """The next token of each request of the batches; see :meth:`Sampler.sample`."""
        requests = [request for batch in batches for request in batch.sampling_requests]
        if not requests:
            return {}
        tokens = self._sampler.sample(logits, requests, likeliest)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}
