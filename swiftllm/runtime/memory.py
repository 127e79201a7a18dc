"""What fits: bytes of weights and activations, and how many KV blocks the memory of GPU and host then holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import MAX_LOGPROBS, Request, SamplingParams, Tier
from swiftllm.device import CONTEXT_BYTES, DEVICE_HEADROOM, LARGE_WORKSPACE_BYTES
from swiftllm.kv.tensors import KVFormat, KVPlan, cpu_format
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import FFN_ELEMENTS_AT_ONCE, LlamaModel
from swiftllm.model.placement import Placement
from swiftllm.model.quantisation import AWQ, MXFP4, QuantisationScheme
from swiftllm.model.weight_memory import packed_bytes
from swiftllm.model.weights import LlamaWeights, fused_matrices
from swiftllm.ops.interface import MASK_ELEMENTS_AT_ONCE, ChunkLens, ContextBlocks
from swiftllm.ops.matrices import MXFP4_GROUP
from swiftllm.runtime.cpu_tier import MAX_STAGED_BYTES
from swiftllm.runtime.graphs import BLOCK_BUCKETS, ROW_BUCKETS
from swiftllm.runtime.kv_transfers import SNAPSHOTS
from swiftllm.sampling.sampler import BYTES_PER_LOGIT, CPU_LOGITS, GPU_LOGITS, LogitsNotFinite, Sampler

# -- bytes of weights --------------------------------------------------------------------------------------------------
# Bytes of a model's weights, before any is read: all, those of each stage, and all in 4 bits.

GROUP_SIZES = (128, 64, 32, 16)  # of 4-bit weights, the usual one first


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights on the device in ``dtype``, whatever dtype the checkpoint has.

    Quantised matrices stay packed, with scales of 16 bits. That a checkpoint leaves single modules of a layer in 16
    bits is not known before it is read.
    """
    weights = LlamaWeights.empty(model, "meta", dtype)
    total = sum(tensor.nbytes for tensor in weights.by_checkpoint_name(model).values())
    if model.quantisation is None:
        return total
    packed = weights.empty_quantised(model, "meta", torch.float16)
    orders = sum(4 * matrix.in_features for matrix in packed) if model.quantisation.ordered else 0
    return total + orders + sum(matrix.nbytes for matrix in packed)


def stage_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Bytes of what may be elsewhere than on the device, for each stage from -1 on; see :func:`weight_bytes`."""
    weights = LlamaWeights.empty(model, "meta", dtype)
    if model.quantisation is not None:
        weights.empty_quantised(model, "meta", torch.float16)
    return [packed_bytes(weights.take_linears(stage)) for stage in range(-1, model.num_layers)]


def embedding_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of an embedding that may be in host memory: none where it is the vocabulary's matrix too."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * dtype.itemsize


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights: all, those that stay on a GPU in every placement, and all of them in 4 bits.

    ``four_bit`` is None where they are quantised already, or no size of groups divides the matrices.
    """

    total: int
    staying: int
    four_bit: int | None

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> WeightSizes:
        total = weight_bytes(model, dtype)
        if model.has_swiglu_limit:
            scheme: QuantisationScheme | None = QuantisationScheme(MXFP4, MXFP4_GROUP)
        else:
            inputs = [matrix.in_features for matrix in fused_matrices(model)]
            group_size = next((size for size in GROUP_SIZES if all(n % size == 0 for n in inputs)), None)
            scheme = None if group_size is None else QuantisationScheme(AWQ, group_size)
        four_bit = None
        if model.quantisation is None and scheme is not None:
            four_bit = weight_bytes(replace(model, quantisation=scheme), dtype)
        elsewhere = sum(stage_bytes(model, dtype)) + embedding_bytes(model, dtype)
        return cls(total, total - elsewhere, four_bit)


# -- how many KV blocks fit --------------------------------------------------------------------------------------------
# How many KV blocks fit: a memory, less weights, activations, graphs and headroom, over the bytes of a block.
#
# Plain arithmetic on bytes, which the callers find out in their own ways: the engine measures at its start,
# ``swiftllm/runtime/memory.py`` estimates before anything is loaded, and ``apex/simulator`` reads data sheets.

HOST_HEADROOM_BYTES = GIB // 2  # left free for activations and other processes
CPU_TIER_SHARE = 0.5  # of host memory, by default: page caches and other programs grow meanwhile
EMBEDDED_GPU_TIER_BYTES = 1 * GIB  # the "GPU" tier without a GPU: small, as on the GPUs this engine is for
EMBEDDED_CPU_TIER_BYTES = 4 * GIB

# Of machines that are not at hand only a data sheet's gigabytes are known, so the simulator takes shares of these where
# the engine subtracts what it measures. Recorded results were made with these numbers.
SIMULATED_GPU_SHARE = 0.9  # for weights and KV cache; activations, the driver and the CUDA context need the rest
SIMULATED_HOST_SHARE = 0.9  # for weights and the CPU tier together


def blocks_in(free_bytes: float, bytes_per_block: int) -> int:
    """Whole blocks in so much memory; none where it is overdrawn."""
    return max(0, int(free_bytes // bytes_per_block))


@dataclass(frozen=True)
class MemoryBudget:
    """What a card and its host hold of a model, in bytes, and the KV blocks that fit beside it.

    Attributes:
        device_bytes: the card's memory that may be used. None: no card, weights and both pools lie in host memory.
        host_bytes: available host memory.
        weight_bytes: of all weights.
        bytes_per_block: K and V of a block in all layers of a group.
        cpu_bytes_per_block: the same in the CPU tier; None: its format is no other.
        activation_bytes: at the peak of the widest iteration, with the buffers that stay.
        reserved_bytes: for the CUDA context, captured graphs, libraries and fragmentation; without a card, of the host.
        host_headroom_bytes: of the host beside a card, for the engine's process, its pinned buffers and all else.
        weights: their sizes if they are placed elsewhere or quantised, for advice; None of predicted machines.
    """

    device_bytes: float | None
    host_bytes: float
    weight_bytes: int
    bytes_per_block: int
    activation_bytes: int = 0
    reserved_bytes: int = 0
    host_headroom_bytes: int = 0
    weights: WeightSizes | None = None
    cpu_bytes_per_block: int | None = None

    @property
    def host_block_bytes(self) -> int:
        """Of a block in the CPU tier."""
        return self.bytes_per_block if self.cpu_bytes_per_block is None else self.cpu_bytes_per_block

    @property
    def usable_bytes(self) -> float:
        """For weights and KV cache: of the card, without one of the host."""
        all_bytes = self.host_bytes if self.device_bytes is None else self.device_bytes
        return all_bytes - self.activation_bytes - self.reserved_bytes

    @property
    def max_gpu_blocks(self) -> int:
        """Blocks that fit beside weights, activations and reserve. Without a card both pools share the memory."""
        return blocks_in(self.usable_bytes - self.weight_bytes, self.bytes_per_block)

    @property
    def max_cpu_blocks(self) -> int:
        """Blocks that fit the host beside its headroom."""
        if self.device_bytes is None:
            return blocks_in(self.usable_bytes - self.weight_bytes, self.host_block_bytes)
        return blocks_in(self.host_bytes - self.host_headroom_bytes, self.host_block_bytes)

    def check(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Check that pools of these numbers of blocks fit."""
        room_bytes = self.usable_bytes - self.weight_bytes
        weights, activations, reserved = map(_gib, (self.weight_bytes, self.activation_bytes, self.reserved_bytes))
        parts = f"Needed are weights {weights}, activations {activations}, {reserved}"
        host = f"the host has {_gib(self.host_bytes)} of memory available"
        if self.device_bytes is None:
            blocks = num_gpu_blocks + num_cpu_blocks
            needed = num_gpu_blocks * self.bytes_per_block + num_cpu_blocks * self.host_block_bytes
            if needed > room_bytes:
                most = self.max_gpu_blocks if self.host_block_bytes == self.bytes_per_block else None
                raise InsufficientMemory(
                    f"{host}. {parts} of headroom, and "
                    f"{_words('num_gpu_blocks + num_cpu_blocks', blocks, needed, most)}. Lower both "
                    "numbers, or take a smaller model"
                )
            return
        if num_gpu_blocks * self.bytes_per_block > room_bytes:
            most = self.max_gpu_blocks
            if self.weight_bytes + self.reserved_bytes > self.device_bytes:
                assert self.weights is not None, "a budget without the sizes that advice is about"
                advice = weights_advice(self.weights, self.usable_bytes, self.host_bytes)
                remedy = f"The weights alone do not fit: {advice}"
            elif most == 0:
                remedy = (
                    "Lower max_num_batched_tokens, max_num_seqs or max_model_len, or give --weights-gpu-memory auto"
                )
            else:
                remedy = f"Set num_gpu_blocks to {most:,}, or lower max_num_batched_tokens"
            raise InsufficientMemory(
                f"the GPU has {_gib(self.device_bytes)} of memory. {parts} for CUDA and headroom, and "
                f"{_words('num_gpu_blocks', num_gpu_blocks, num_gpu_blocks * self.bytes_per_block, most)}. {remedy}"
            )
        if num_cpu_blocks > (most := self.max_cpu_blocks):
            needed = num_cpu_blocks * self.host_block_bytes
            raise InsufficientMemory(
                f"{host}. Needed are {_gib(self.host_headroom_bytes)} for the engine's process, its pinned buffers and "
                f"the system, and {_words('num_cpu_blocks', num_cpu_blocks, needed, most)}. Set num_cpu_blocks to "
                f"{most:,}, end other programs, or take a machine with more memory"
            )


def _words(name: str, blocks: int, num_bytes: int, most: int | None) -> str:
    fit = "" if most is None else f"; {most:,} blocks fit"
    return f"{_gib(num_bytes)} for {name} = {blocks:,} blocks{fit}"


def choose_blocks(
    given: tuple[int | None, int | None], most: tuple[int, int], defaults: tuple[int, int]
) -> tuple[int, int]:
    """Blocks of the GPU and the CPU tier of a predicted machine: the given numbers, else the defaults."""
    for name, number, limit in zip(("num_gpu_blocks", "num_cpu_blocks"), given, most, strict=True):
        if number is not None and number > limit:
            raise ValueError(f"{name}={number} exceeds the memory, which holds at most {limit}")
    gpu, cpu = (default if number is None else number for number, default in zip(given, defaults, strict=True))
    return gpu, cpu


# -- weights ----------------------------------------------------------------------------------------------------------


def check_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    free_bytes: int,
    placement: Placement | None = None,
    *,
    host_bytes: int | None = None,
) -> None:
    """Check that the weights fit, before any is loaded.

    ``placement``: by default all are on the device. ``host_bytes``: available host memory, if weights may be placed
    there.

    Raises:
        InsufficientMemory: the weights alone exceed the device's free memory; the message says what to do.
    """
    needed = weight_bytes(model, dtype)
    placed = None if placement is None or placement.is_all_resident else placement
    if placed is not None:
        sizes = stage_bytes(model, dtype)
        needed += int(placed.gpu_bytes(sizes)) - sum(sizes)
    if placement is not None and placement.embedding_on_host:
        needed -= embedding_bytes(model, dtype)
    if needed <= free_bytes:
        return
    if placed is not None:
        remedy = "take a smaller weights_gpu_memory, or auto"
    elif host_bytes is not None:
        remedy = f"free memory, or {weights_advice(WeightSizes.of(model, dtype), free_bytes, host_bytes)}"
    else:
        remedy = "free memory, or take a narrower dtype or a smaller model"
    raise InsufficientMemory(
        f"the model's weights take {_gib(needed)} in {str(dtype).removeprefix('torch.')} and {_gib(free_bytes)} is "
        f"available: {_gib(needed - free_bytes)} are missing; {remedy}"
    )


def weights_advice(sizes: WeightSizes, device_bytes: float, host_bytes: float) -> str:
    """What can be done where all weights do not fit a GPU, with the numbers.

    Args:
        device_bytes: of the GPU, for weights and KV cache.
        host_bytes: available host memory.
    """
    device_bytes, host_bytes = max(0, device_bytes), max(0, host_bytes - HOST_HEADROOM_BYTES)
    stays = sizes.staying <= device_bytes
    ways = []
    if stays and sizes.total <= device_bytes + host_bytes:
        ways.append(
            f"give --weights-gpu-memory auto: {(sizes.total - device_bytes) / GIB:.1f} GiB or more of them would "
            f"be in host memory, where {host_bytes / GIB:.1f} GiB are free"
        )
    if sizes.four_bit is not None and sizes.four_bit <= device_bytes + (host_bytes if stays else 0):
        how = ", which fit" if sizes.four_bit <= device_bytes else ", with --weights-gpu-memory auto"
        ways.append(f"take 4-bit weights, {sizes.four_bit / GIB:.1f} GiB{how}")
    return ", or ".join(ways) or (
        f"GPU and host, with {device_bytes / GIB:.1f} and {host_bytes / GIB:.1f} GiB for them, do not hold "
        "them together either: take a smaller model, a larger GPU or more host memory"
    )


# -- the engine's start -----------------------------------------------------------------------------------------------


def plan_blocks(
    config: EngineConfig, bytes_per_block: Mapping[Tier, int], host_bytes: int, device_bytes: int | None
) -> KVPlan:
    """The number of blocks in each tier: as set in ``config``, else a share of the available memory.

    ``host_bytes``: available host memory. ``device_bytes``: GPU memory left by weights, activations and headroom;
    None: no GPU, and both tiers share the host memory.

    Raises:
        InsufficientMemory: the blocks set in ``config``, or a single block, do not fit.
    """
    cpu_bytes = host_bytes * CPU_TIER_SHARE
    if device_bytes is None:
        gpu_bytes, cpu_bytes = min(EMBEDDED_GPU_TIER_BYTES, host_bytes / 4), min(EMBEDDED_CPU_TIER_BYTES, cpu_bytes)
    else:
        gpu_bytes = device_bytes
    of_gpu, of_cpu = bytes_per_block[Tier.GPU], bytes_per_block[Tier.CPU]
    gpu = blocks_in(gpu_bytes, of_gpu) if config.num_gpu_blocks is None else config.num_gpu_blocks
    cpu = blocks_in(cpu_bytes, of_cpu) if config.num_cpu_blocks is None else config.num_cpu_blocks
    host_limit = host_bytes - HOST_HEADROOM_BYTES
    if device_bytes is None:
        needed = gpu * of_gpu + cpu * of_cpu
        checks = [("host", "num_gpu_blocks + num_cpu_blocks", gpu + cpu, needed, of_cpu, host_limit)]
    else:
        if config.num_gpu_blocks is None and gpu == 0:
            raise InsufficientMemory(
                f"weights and activations leave no room for a KV cache: a block takes {of_gpu / GIB:.4f} GiB "
                f"and {_gib(of_gpu - device_bytes)} are missing for the first; lower "
                "max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks=0 to keep all KV cache on the host"
            )
        checks = [
            ("GPU", "num_gpu_blocks", gpu, gpu * of_gpu, of_gpu, device_bytes),
            ("host", "num_cpu_blocks", cpu, cpu * of_cpu, of_cpu, host_limit),
        ]
    for where, what, blocks, needed, each, there in checks:
        there = max(0, there)
        if needed > there:
            raise InsufficientMemory(
                f"a KV cache of {what} = {blocks} blocks takes {_gib(needed)} of {where} memory and {_gib(there)} is "
                f"available: ask for {-(-(needed - there) // each)} blocks less"
            )
    return KVPlan({Tier.GPU: gpu, Tier.CPU: cpu}, config.block_size, bytes_per_block)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


# -- an estimate before anything is loaded -----------------------------------------------------------------------------
# What an engine will take of a card and its host, before anything is loaded: an estimate from a model's shapes.
#
# The engine measures at its start what it can (:meth:`~swiftllm.device.Device.left_free`), and that decides.

MASK_BYTES = 9  # of an element of a mask on a CPU while it is made, beside the number torch makes of it
SPLIT_TOKENS = 1024  # of decode attention on a GPU with many requests
PROCESS_BYTES = 2 * GIB
"""Resident memory of an engine's process beside a GPU, without KV cache: Python, torch, CUDA's libraries and context.
An assumption: 0.3 GiB without CUDA, measured (torch 2.13+cpu, a tiny model, profiled and serving); 0.4 to 2.0 GiB with
a CUDA context by reports (pytorch issues #113326, #12873 and #87539, the last on a T4)."""
GRAPHS_HOST_BYTES = GIB // 4
"""Of captured graphs on the host. An assumption: some 150 KiB each of 1,815."""


def estimate_memory(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    device_bytes: int | None,
    host_bytes: int,
    residual_dtype: torch.dtype | None = None,
) -> MemoryBudget:
    """The budget of an engine.

    Args:
        config: its limits and the size of its KV blocks.
        dtype: of weights, activations and KV cache.
        device_bytes: the card's memory as torch reports it (``total_memory``). ``nvidia-smi`` reports 2% to 3% more
            as ``memory.total``, of which ``memory.reserved`` cannot be used. None: there is no card.
        host_bytes: available host memory (:func:`swiftllm.machine.available_host_bytes`).
        residual_dtype: of residuals (:func:`swiftllm.runtime.execution_context.resolve_residual_dtype`), by default
            ``dtype``.
    """
    sizes, on_host = WeightSizes.of(model, dtype), device_bytes is None
    reserved_bytes = HOST_HEADROOM_BYTES
    if not on_host:
        assert device_bytes is not None
        # The last is that of the thread that serves; on cards before Hopper it is a quarter of that.
        reserved_bytes = int(DEVICE_HEADROOM * device_bytes) + CONTEXT_BYTES + LARGE_WORKSPACE_BYTES
    activations = activation_bytes(
        model,
        dtype.itemsize,
        (residual_dtype or dtype).itemsize,
        rows=config.max_num_batched_tokens,
        requests=config.max_num_seqs,
        context=config.max_model_len or model.max_position_embeddings,
        on_host=on_host,
    )
    return MemoryBudget(
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        weight_bytes=sizes.total,
        bytes_per_block=KVFormat.exact(dtype).block_bytes(model, config.block_size),
        cpu_bytes_per_block=cpu_format(config.cpu_kv_dtype, dtype).block_bytes(model, config.block_size),
        activation_bytes=activations,
        reserved_bytes=reserved_bytes,
        host_headroom_bytes=0 if on_host else host_reserve_bytes(config, model, dtype.itemsize),
        weights=sizes,
    )


def host_reserve_bytes(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Host memory, in bytes, to leave free beside a CPU tier before an engine with a GPU has begun.

    It is the sum of the engine's process (``PROCESS_BYTES``), its captured graphs (``GRAPHS_HOST_BYTES``), its pinned
    buffers, and ``HOST_HEADROOM_BYTES`` for the system and other programs. The pinned buffers are, each way, what may
    wait for the CPU tier and one transfer more: a layer's K and V of the widest GPU batch or of the longest context. Q,
    K, V and results of two CPU batches add to them. All count twice, as torch rounds pinned memory up to powers of two.

    Weights on the GPU add nothing. They are loaded one tensor at a time, and the last one is gone before the tier's
    first block is written. Nor does a measured vLLM server: an engine and a server never live at the same time.
    """
    tokens = max(config.max_num_batched_tokens, config.max_model_len or model.max_position_embeddings)
    layer = tokens * 2 * model.num_kv_heads * model.head_dim * itemsize
    cpu_batches = 2 * config.max_num_seqs * (model.qkv_size + model.num_heads * model.head_dim) * itemsize
    pinned = 2 * (2 * (MAX_STAGED_BYTES + layer) + cpu_batches)
    return PROCESS_BYTES + GRAPHS_HOST_BYTES + pinned + HOST_HEADROOM_BYTES


def activation_bytes(
    model: ModelConfig,
    itemsize: int,
    residual_itemsize: int,
    *,
    rows: int,
    requests: int,
    context: int,
    on_host: bool,
) -> int:
    """Bytes at the peak of :func:`~swiftllm.runtime.memory.widest_iteration`, and of buffers that stay.

    ``itemsize`` is of activations, ``residual_itemsize`` of residuals. ``rows`` is the most tokens of a GPU batch,
    ``requests`` the most requests, ``context`` the tokens of the longest. The terms follow that function and the model;
    tests measure them.
    """
    sampled, chunk = min(requests, rows), min(rows, context)
    rotary = 2 * model.head_dim * 4
    hidden = rows * model.hidden_size * itemsize
    attended = rows * model.num_heads * model.head_dim * itemsize
    qkv = rows * model.qkv_size * itemsize
    reached = model.tokens_reached(chunk, context)
    residual = rows * model.hidden_size * residual_itemsize
    held = residual + qkv + rows * rotary  # these are Q, K and V, and rotary rows
    if not on_host:  # K and V on their way to the CPU tier
        held += SNAPSHOTS * rows * 2 * model.num_kv_heads * model.head_dim * itemsize

    log_sums = 0 if on_host else rows * model.num_heads * 4
    own_attention = held + 2 * attended + log_sums
    pieces = max(1, -(-rows * model.ffn_width // FFN_ELEMENTS_AT_ONCE))
    gate_up = -(-rows // pieces) * model.ffn_width * itemsize
    crossing = held + attended + hidden + max(hidden, gate_up + gate_up // 2, qkv)
    if model.quantisation is not None:
        crossing = max(crossing, held + attended + hidden + _written_out(model, itemsize, hidden, gate_up, qkv))

    keys_values = 2 * max(reached) * model.num_kv_heads * model.head_dim * itemsize
    masked = 0
    if on_host:
        masked = min(chunk * max(reached), max(max(reached), MASK_ELEMENTS_AT_ONCE)) * (MASK_BYTES + itemsize)
    contexts = (2 if on_host else 3) * keys_values  # gathered, with the chunk's own, and on the way for the next call
    long_attention = held + 2 * attended + contexts + masked + log_sums

    decoding = 0
    if not on_host:
        splits = -(-context // SPLIT_TOKENS)
        decoding = held + attended + sampled * model.num_heads * (splits * (model.head_dim + 1) * 4 + model.head_dim)

    logits = sampled * model.vocab_size
    at_once = min(logits, max(CPU_LOGITS if on_host else GPU_LOGITS, model.vocab_size))
    sampling = held + attended + logits * itemsize + at_once * BYTES_PER_LOGIT
    peak = max(own_attention, crossing, long_attention, decoding, sampling)
    return peak + context * rotary + (0 if on_host else _graph_buffers(model, itemsize, residual_itemsize, requests))


def _written_out(model: ModelConfig, itemsize: int, hidden: int, gate_up: int, qkv: int) -> int:
    """Of a quantised matrix in full, beside its product, where that is most; arguments are the products' bytes.

    With up to 512 rows codes are multiplied from sm_80 on, and on most CPUs with any; then this is more than is taken.
    """
    beside = {"qkv": qkv, "o": hidden, "gate_up": gate_up, "down": hidden + gate_up // 2}
    written_out = [
        sum(matrix.out_features) * matrix.in_features * itemsize + beside[matrix.name]
        for matrix in fused_matrices(model)
        if matrix.is_quantised
        if model.experts is None or matrix.name in ("qkv", "o")  # experts' codes are multiplied as they are
    ]
    return max(written_out, default=0)


def _graph_buffers(model: ModelConfig, itemsize: int, residual_itemsize: int, requests: int) -> int:
    """Of the frames, logits and widest block tables of :class:`~swiftllm.runtime.graphs.LayerGraphs`."""
    rows = next((bucket for bucket in ROW_BUCKETS if bucket >= requests), ROW_BUCKETS[-1])
    row = (model.qkv_size + model.num_heads * model.head_dim) * itemsize + 2 * model.head_dim * 4
    row += model.hidden_size * residual_itemsize
    table = BLOCK_BUCKETS[-1] * 4 * len(set(model.windows or [None]))
    return rows * (2 * (row + table) + model.vocab_size * itemsize)


# -- the widest iteration, run to be measured --------------------------------------------------------------------------
# The widest iteration that a configuration allows, run to measure the memory it takes.
#
# It is also the first launch of the kernels that serving needs: Triton compiles each then, in a second or so. Captured
# graphs need some in further forms, and launch those themselves before they are captured.


@torch.inference_mode()
def widest_iteration(model: LlamaModel, sampler: Sampler, config: EngineConfig, dtype: torch.dtype) -> None:
    """One layer of a GPU batch full of prompts, with K and V on their way to the CPU tier, a chunk at the end of the
    longest context, decodes of the most requests, and their logits and samples. One block takes the place of the KV
    cache."""
    sizes, ops, device = model.config, model.ops, model.rotary_table.device
    scale, rows = sizes.head_dim**-0.5, config.max_num_batched_tokens
    context = len(model.rotary_table)
    chunk = min(rows, context)

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def lens(rows: int, tokens: int) -> ChunkLens:
        return ChunkLens.of([rows], [tokens], lambda starts: starts.to(device))

    model.weights.enter(-1)
    residual = model.embed(zeros(rows, dtype=torch.int64))
    rotary_rows = model.rotary_table[:1].expand(rows, -1, -1).contiguous()
    q, k, v = model.split_qkv(model.first_stage(residual, rotary_rows))
    goes_to_host = device.type != "cpu" and config.num_cpu_blocks != 0
    on_their_way = [torch.cat([k, v], dim=1) for _ in range(SNAPSHOTS if goes_to_host else 0)]
    attention_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    windows = set(sizes.windows or [None])
    for window in windows:
        own = k.transpose(0, 1), v.transpose(0, 1)
        ops.prefill_attention(q, *own, lens(rows, rows), attention_out, scale, window)
    if sizes.num_layers > 1:
        model.weights.enter(0)
        model.stage(0, attention_out, residual, rotary_rows)

    tokens = max(sizes.tokens_reached(chunk, context))
    gathered = [zeros(2, sizes.num_kv_heads, tokens, sizes.head_dim) for _ in range(2 if goes_to_host else 1)]
    keys_values = torch.cat([gathered[0], gathered[0][:, :, :0]], dim=2)  # beside what is on its way for the next call
    keys, values = keys_values
    ops.prefill_attention(q[:chunk], keys, values, lens(chunk, tokens), attention_out[:chunk], scale)
    del gathered, keys_values, keys, values

    block = zeros(1, sizes.num_kv_heads, 2, config.block_size, sizes.head_dim)
    slot = zeros(1, dtype=torch.int64)
    ops.store_kv(k[:1], v[:1], block, slot, slot)
    ops.gather_contexts(block, ContextBlocks.of([[0]], [1], config.block_size, lambda ids: ids.to(device)))
    staged = torch.empty_like(block[None])
    ops.gather_blocks(block[None], slot, staged)
    ops.scatter_blocks(staged, block[None], slot)
    if device.type != "cpu" and not (host_format := cpu_format(config.cpu_kv_dtype, dtype)).is_exact:
        codes = zeros(1, 1, sizes.num_kv_heads, *host_format.head_shape(*block.shape[3:]), dtype=host_format.dtype)
        ops.quantise_blocks(block[None], slot, codes)
        ops.dequantise_blocks(codes, block[None], slot)

    if ops.takes_empty_rows:
        requests = min(config.max_num_seqs, rows)
        tables = zeros(requests, -(-context // config.block_size), dtype=torch.int32)
        seq_lens = zeros(requests, dtype=torch.int32)
        out = zeros(requests, sizes.num_heads, sizes.head_dim)
        new = q[:requests], k[:requests], v[:requests]
        for columns, window in itertools.product((tables, tables[:, :1]), windows):  # many splits, and a single one
            ops.decode_attention(*new, block, columns, seq_lens, out, scale, window)
        del tables, out

    model.weights.enter(sizes.num_layers - 1)
    logits = model.last_stage(attention_out[: config.max_num_seqs], residual[: config.max_num_seqs])
    how = SamplingParams(temperature=1.0, top_p=0.5, seed=0)
    adjusted = replace(how, min_p=0.1, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
    for way in (how, adjusted):
        with suppress(LogitsNotFinite):  # of numbers that mean nothing
            sampler.sample(logits, [Request(str(row), (0,), way) for row in range(len(logits))])
    sampler.take_logprobs()
    del on_their_way
