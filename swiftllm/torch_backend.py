"""The backend that computes: torch on a CPU or a CUDA GPU, with pacpu for decode attention in host memory."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import pacpu
from swiftllm.attention_worker import AttentionWorker, InlineWorker
from swiftllm.backend import Ticket
from swiftllm.config import EngineConfig
from swiftllm.kv_pool import KVPools
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.weights import dummy_weights, load_weights
from swiftllm.ops import select_ops
from swiftllm.plan import LaneItem, Swap
from swiftllm.request import Request, Tier
from swiftllm.sampling import Sampler
from swiftllm.torch_batch import BatchBuilder, Cohort, Lane, Rows

FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


class TorchBackend:
    """See :class:`swiftllm.backend.Backend`.

    Set ``block_tables`` (request id to the block ids of the request's tier) before the first lane opens. Tables are
    read when a lane or cohort opens, and must be long enough for the tokens it is about to compute.

    Attributes:
        device, device_name: the torch device of the linear layers, and what the hardware calls itself.
        dtype: of weights, activations and KV cache.
        num_gpu_blocks, num_cpu_blocks, block_size, kv_bytes_per_block: the KV cache; a block's bytes span all layers.
        cpu_kernel, cpu_threads: who computes attention over the CPU tier.
    """

    def __init__(self, config: EngineConfig, worker: AttentionWorker | None = None) -> None:
        """``worker`` runs the CPU attention; default: at once, on the calling thread.

        Raises:
            FileNotFoundError, ValueError: the model folder is incomplete or of an unsupported kind.
            InsufficientMemory: the KV cache asked for does not fit.
        """
        self.device = _resolve_device(config)
        self.dtype = _resolve_dtype(config, self.device)
        self.device_name = _device_name(self.device)
        if self.device.type == "cpu":
            # The lane is one core's work: the others belong to the attention worker, and a second torch thread
            # that has to share its core makes small layers ten times slower.
            torch.set_num_threads(1)
        self.cpu_threads = config.cpu_threads or max(1, len(os.sched_getaffinity(0)) - 1)
        self.cpu_kernel = config.cpu_kernel or pacpu.default_kernel(self.dtype)
        usable = pacpu.kernels(self.dtype)
        if self.cpu_kernel not in usable:
            why = pacpu.unavailable().get(self.cpu_kernel, "there is no such kernel")
            if self.cpu_kernel in pacpu.kernels():
                why = f"it does not compute in {str(self.dtype).removeprefix('torch.')}"
            raise ValueError(f"cpu_kernel={self.cpu_kernel!r} is not among {', '.join(usable)}: {why}")
        self.model_config = ModelConfig.from_folder(config.model)
        if config.load_format == "dummy":
            weights = dummy_weights(self.model_config, self.device, self.dtype, config.seed)
        else:
            weights = load_weights(config.model, self.model_config, self.device, self.dtype)
        self._ops = select_ops(self.device, self.dtype, self.cpu_kernel)
        self._model = LlamaModel(self.model_config, weights, self._ops, config.max_model_len)
        self.kv_pools = KVPools(self.model_config, config, self.device, self.dtype, self._ops)
        self.num_gpu_blocks = self.kv_pools.num_blocks[Tier.GPU]
        self.num_cpu_blocks = self.kv_pools.num_blocks[Tier.CPU]
        self.kv_bytes_per_block = self.kv_pools.bytes_per_block
        self.block_size = config.block_size
        self.block_tables: Mapping[str, Sequence[int]] = {}
        self._scale = self.model_config.head_dim**-0.5
        self._sampler = Sampler(config.seed)
        self._worker = worker or InlineWorker()
        self._builder = BatchBuilder(
            self.device, self.dtype, self.block_size, self.model_config.num_heads, self._model.rotary_table
        )

    @property
    def num_layers(self) -> int:
        return self.model_config.num_layers

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def now(self) -> float:
        return time.perf_counter()

    @torch.inference_mode()
    def swap(self, swaps: Sequence[Swap]) -> None:
        self.kv_pools.swap(swaps)

    @torch.inference_mode()
    def open_lane(self, items: Sequence[LaneItem]) -> Lane:
        return self._builder.open_lane(items, self.block_tables)

    @torch.inference_mode()
    def open_cohort(self, requests: Sequence[Request]) -> Cohort:
        return self._builder.open_cohort(requests, self.block_tables)

    @torch.inference_mode()
    def drop_rows(self, cohort: Cohort, request_ids: frozenset[str]) -> Cohort:
        return cohort.without(request_ids)

    @torch.inference_mode()
    def boundary(self, layer: int, batches: Sequence[Rows]) -> Mapping[str, int]:
        batches = [batch for batch in batches if batch.num_rows]
        if layer == self.num_layers - 1:
            return self._finish(batches)
        if not batches:
            return {}
        if layer < 0:
            hidden = self._model.embed(_concatenate([batch.token_ids for batch in batches]))
        else:
            attention_out = _concatenate([batch.attention_out.to(self.device) for batch in batches])
            residual = _concatenate([batch.residual for batch in batches])
            hidden = self._model.post_attention(layer, attention_out, residual)
        rotary_rows = _concatenate([batch.rotary_rows for batch in batches])
        q, k, v = self._model.pre_attention(layer + 1, hidden, rotary_rows)
        start = 0
        for batch in batches:
            rows = slice(start, start + batch.num_rows)
            batch.residual, batch.q, batch.k, batch.v = hidden[rows], q[rows], k[rows], v[rows]
            start = rows.stop
        return {}

    @torch.inference_mode()
    def gpu_attention(self, layer: int, lane: Lane) -> None:
        ops, scale = self._ops, self._scale
        for group in lane.prefills:
            kv_layer = self.kv_pools.layers[group.tier][layer]
            stored = (rows.to(kv_layer.device) for rows in (lane.k[group.rows], lane.v[group.rows]))
            ops.store_kv(*stored, kv_layer, group.blocks, group.offsets)
            for chunk in group.chunks:
                if chunk.blocks is None:
                    keys, values = lane.k[chunk.rows].transpose(0, 1), lane.v[chunk.rows].transpose(0, 1)
                else:
                    keys, values = ops.gather_kv(kv_layer, chunk.blocks, chunk.context_len).to(self.device)
                lane.attention_out[chunk.rows] = ops.prefill_attention(
                    lane.q[chunk.rows], keys, values, chunk.mask, scale
                )
        if lane.decodes is not None:
            rows, kv_layer = lane.decodes.rows, self.kv_pools.layers[Tier.GPU][layer]
            new = lane.q[rows], lane.k[rows], lane.v[rows]
            tables, lens = lane.decodes.block_tables, lane.decodes.seq_lens
            ops.decode_attention(*new, kv_layer, tables, lens, lane.attention_out[rows], scale)

    @torch.inference_mode()
    def submit_cpu_attention(self, layer: int, cohort: Cohort) -> Ticket:
        new = [rows.to("cpu") for rows in (cohort.q, cohort.k, cohort.v)]
        kv_layer = self.kv_pools.layers[Tier.CPU][layer]
        tables, lens, out = cohort.block_tables, cohort.seq_lens, cohort.attention_out
        how = {"num_threads": self.cpu_threads, "kernel": self.cpu_kernel}

        def attend() -> None:
            pacpu.paged_attention(*new, kv_layer, tables, lens, out, self._scale, **how)

        return self._worker.submit(attend)

    def forget(self, request_ids: Sequence[str]) -> None:
        self._sampler.forget(request_ids)

    def close(self) -> None:
        self._worker.close()

    def _finish(self, batches: Sequence[Rows]) -> dict[str, int]:
        """The last boundary, for the rows alone that get a token: the others' hidden states end with their K and V."""
        batches = [batch for batch in batches if batch.sampling_requests]
        if not batches:
            return {}

        def select(batch: Rows, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if batch.sampling_rows is None else tensor.index_select(0, batch.sampling_rows)

        attention_out = _concatenate([select(batch, batch.attention_out.to(self.device)) for batch in batches])
        residual = _concatenate([select(batch, batch.residual) for batch in batches])
        logits = self._model.logits(self._model.post_attention(self.num_layers - 1, attention_out, residual))
        requests = [request for batch in batches for request in batch.sampling_requests]
        tokens = self._sampler.sample(logits, requests)
        return {request.request_id: token for request, token in zip(requests, tokens, strict=True)}


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _resolve_device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' and torch sees no GPU; use device='cpu', or check the driver and torch build")
    if config.device != "auto":
        return torch.device(config.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        return torch.float16  # every GPU has it; those this engine is for (T4) have no bfloat16
    # With bfloat16 instructions a matrix product is twice as fast as in float32. Without them torch widens first and
    # is slower, and float16 on x86 is slower still.
    return torch.bfloat16 if _cpu_info("flags").keys() & FAST_BFLOAT16_FLAGS else torch.float32


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return " ".join(_cpu_info("model name")) or platform.machine()


def _cpu_info(field: str) -> dict[str, None]:
    """The words of a field of the first core, in order; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    value = next((line.partition(":")[2] for line in lines if line.partition(":")[0].strip() == field), "")
    return dict.fromkeys(value.split())
