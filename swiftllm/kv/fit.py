"""Whether weights, KV pools and activations fit a card and its host, before anything is loaded.

Plain arithmetic on the shapes of a model, for planning. The engine measures at its start what it can
(:meth:`~swiftllm.device.device.Device.left_free`), and that decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftllm.device.cuda import CONTEXT_BYTES, DEVICE_HEADROOM
from swiftllm.kv.sizing import HOST_HEADROOM_BYTES, WeightSizes, weight_bytes
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import FFN_ELEMENTS_AT_ONCE
from swiftllm.model.weights import fused_matrices
from swiftllm.ops.interface import MASK_ELEMENTS_AT_ONCE, QUERY_BLOCK
from swiftllm.runtime.graphs import ROW_BUCKETS
from swiftllm.runtime.kv_transfers import SNAPSHOTS
from swiftllm.sampling.sampler import BYTES_PER_LOGIT, CPU_LOGITS, GPU_LOGITS

SPLIT_TOKENS = 1024  # of decode attention on a GPU with many requests


@dataclass(frozen=True)
class MemoryFit:
    """What a card (without one: the host) and the host hold of a model. All but the numbers of blocks are bytes.

    Attributes:
        device_bytes: the card's memory as torch reports it; without a card 0.
        weight_bytes: of all weights.
        activation_bytes: at the peak of the widest iteration, with the buffers that stay; an estimate.
        reserved_bytes: for the CUDA context, captured graphs, libraries and fragmentation; without a card, of the host.
        bytes_per_block: K and V of a block in all layers.
        host_bytes: available host memory.
        max_gpu_blocks: blocks that fit beside weights, activations and reserve.
        max_cpu_blocks: blocks that fit the host beside its headroom. Without a card both pools share this number.
        on_host: there is no card; weights and both pools lie in host memory.
        weights: where there is a card, their sizes if they are placed elsewhere or quantised.
    """

    device_bytes: int
    weight_bytes: int
    activation_bytes: int
    reserved_bytes: int
    bytes_per_block: int
    host_bytes: int
    max_gpu_blocks: int
    max_cpu_blocks: int
    on_host: bool = False
    weights: WeightSizes | None = None

    @property
    def usable_bytes(self) -> int:
        """Of the card, for weights and KV cache."""
        return self.device_bytes - self.activation_bytes - self.reserved_bytes


def memory_fit(
    model: ModelConfig,
    dtype: torch.dtype | str,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    device_bytes: int,
    host_bytes: int,
    on_host: bool = False,
) -> MemoryFit:
    """How many KV blocks of ``block_size`` tokens fit.

    Args:
        dtype: of weights, activations and KV cache, or its name.
        max_num_batched_tokens, max_num_seqs, max_model_len: as in :class:`swiftllm.config.EngineConfig`.
        device_bytes: the card's memory as torch reports it (``total_memory``). ``nvidia-smi`` reports 2% to 3% more
            as ``memory.total``, of which ``memory.reserved`` cannot be used.
        host_bytes: available host memory (:func:`swiftllm.machine.available_host_bytes`).
        on_host: there is no card: ``device_bytes`` is not looked at.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    weights = weight_bytes(model, dtype)
    activations = activation_bytes(
        model,
        dtype.itemsize,
        rows=max_num_batched_tokens,
        requests=max_num_seqs,
        context=max_model_len,
        on_host=on_host,
    )
    block = model.kv_bytes_per_token(dtype.itemsize) * block_size
    if on_host:
        device_bytes, reserved = 0, HOST_HEADROOM_BYTES
        gpu = cpu = _blocks(host_bytes - weights - activations - reserved, block)
    else:
        reserved = int(DEVICE_HEADROOM * device_bytes) + CONTEXT_BYTES
        gpu = _blocks(device_bytes - weights - activations - reserved, block)
        cpu = _blocks(host_bytes - HOST_HEADROOM_BYTES, block)
    sizes = None if on_host else WeightSizes.of(model, dtype)
    return MemoryFit(device_bytes, weights, activations, reserved, block, host_bytes, gpu, cpu, on_host, sizes)


def check_fit(fit: MemoryFit, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
    """Check that pools of these numbers of blocks fit.

    Raises:
        InsufficientMemory: they do not. The message says what each part needs, what is there, how many blocks would
            fit, and what to do.
    """
    fixed_bytes = fit.weight_bytes + fit.activation_bytes + fit.reserved_bytes
    parts = f"weights {_gib(fit.weight_bytes)}, activations {_gib(fit.activation_bytes)}, {_gib(fit.reserved_bytes)}"
    if fit.on_host:
        blocks = num_gpu_blocks + num_cpu_blocks
        if fixed_bytes + blocks * fit.bytes_per_block > fit.host_bytes:
            raise InsufficientMemory(
                f"the host has {_gib(fit.host_bytes)} of memory available. Needed are {parts} of headroom, and "
                f"{_gib(blocks * fit.bytes_per_block)} for num_gpu_blocks + num_cpu_blocks = {blocks:,} blocks; "
                f"{fit.max_cpu_blocks:,} blocks fit. Lower both numbers, or take a smaller model"
            )
        return
    if fixed_bytes + num_gpu_blocks * fit.bytes_per_block > fit.device_bytes:
        if fit.weight_bytes + fit.reserved_bytes > fit.device_bytes:
            remedy = f"The weights alone do not fit: {fit.weights.advice(fit.usable_bytes, fit.host_bytes)}"
        elif fit.max_gpu_blocks == 0:
            remedy = "Lower max_num_batched_tokens, max_num_seqs or max_model_len, or give --weights-gpu-memory auto"
        else:
            remedy = f"Set num_gpu_blocks to {fit.max_gpu_blocks:,}, or lower max_num_batched_tokens"
        raise InsufficientMemory(
            f"the GPU has {_gib(fit.device_bytes)} of memory. Needed are {parts} for CUDA and headroom, and "
            f"{_gib(num_gpu_blocks * fit.bytes_per_block)} for num_gpu_blocks = {num_gpu_blocks:,} blocks; "
            f"{fit.max_gpu_blocks:,} blocks fit. {remedy}"
        )
    if num_cpu_blocks > fit.max_cpu_blocks:
        raise InsufficientMemory(
            f"the host has {_gib(fit.host_bytes)} of memory available. Needed are {_gib(HOST_HEADROOM_BYTES)} of "
            f"headroom, and {_gib(num_cpu_blocks * fit.bytes_per_block)} for num_cpu_blocks = {num_cpu_blocks:,} "
            f"blocks; {fit.max_cpu_blocks:,} blocks fit. Set num_cpu_blocks to {fit.max_cpu_blocks:,}, end other "
            "programs, or take a machine with more memory"
        )


def activation_bytes(
    model: ModelConfig, itemsize: int, *, rows: int, requests: int, context: int, on_host: bool
) -> int:
    """Bytes at the peak of :func:`~swiftllm.runtime.widest_iteration.widest_iteration`, and of buffers that stay.

    ``rows`` is the most tokens of a lane, ``requests`` the most requests, ``context`` the tokens of the longest. The
    terms follow that function and the model; tests measure them.
    """
    sampled, chunk = min(requests, rows), min(rows, context)
    rotary = 2 * model.head_dim * 4
    hidden = rows * model.hidden_size * itemsize
    attended = rows * model.num_heads * model.head_dim * itemsize
    qkv = rows * model.qkv_size * itemsize
    held = hidden + qkv + rows * rotary + chunk * context  # residual, Q, K and V, rotary rows, mask
    if not on_host:  # K and V on their way to the CPU tier
        held += SNAPSHOTS * rows * 2 * model.num_kv_heads * model.head_dim * itemsize

    own_attention = held + 2 * attended
    pieces = max(1, -(-rows * 2 * model.intermediate_size // FFN_ELEMENTS_AT_ONCE))
    gate_up = -(-rows // pieces) * 2 * model.intermediate_size * itemsize
    crossing = held + attended + hidden + max(hidden, gate_up + gate_up // 2, qkv)
    if model.quantisation is not None:
        crossing = max(crossing, held + attended + hidden + _written_out(model, itemsize, hidden, gate_up, qkv))

    keys_values = 2 * context * model.num_kv_heads * model.head_dim * itemsize
    masked_rows = min(chunk, max(QUERY_BLOCK, MASK_ELEMENTS_AT_ONCE // context))
    masked = 2 * masked_rows * context * itemsize  # the mask as numbers, and these padded
    long_attention = held + attended + 2 * keys_values + max(masked + attended, 2 * attended)

    decoding = 0
    if not on_host:
        splits = -(-context // SPLIT_TOKENS)
        decoding = held + attended + sampled * model.num_heads * (splits * (model.head_dim + 1) * 4 + model.head_dim)

    logits = sampled * model.vocab_size
    at_once = min(logits, max(CPU_LOGITS if on_host else GPU_LOGITS, model.vocab_size))
    sampling = held + attended + logits * itemsize + at_once * BYTES_PER_LOGIT
    peak = max(own_attention, crossing, long_attention, decoding, sampling)
    return peak + context * rotary + (0 if on_host else _graph_buffers(model, itemsize, requests))


def _written_out(model: ModelConfig, itemsize: int, hidden: int, gate_up: int, qkv: int) -> int:
    """Of a quantised matrix in full, beside its product, where that is most; arguments are the products' bytes.

    With up to 512 rows codes are multiplied from sm_80 on, and on most CPUs with any; then this is more than is taken.
    """
    beside = {"qkv": qkv, "o": hidden, "gate_up": gate_up, "down": hidden + gate_up // 2}
    return max(
        sum(matrix.out_features) * matrix.in_features * itemsize + beside[matrix.name]
        for matrix in fused_matrices(model)
    )


def _graph_buffers(model: ModelConfig, itemsize: int, requests: int) -> int:
    """Of the two frames and the logits of :class:`~swiftllm.runtime.graphs.LayerGraphs`, but for their tables."""
    rows = next((bucket for bucket in ROW_BUCKETS if bucket >= requests), ROW_BUCKETS[-1])
    row = (model.hidden_size + model.qkv_size + model.num_heads * model.head_dim) * itemsize + 2 * model.head_dim * 4
    return rows * (2 * row + model.vocab_size * itemsize)


def _blocks(free_bytes: int, bytes_per_block: int) -> int:
    return max(0, free_bytes // bytes_per_block)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
