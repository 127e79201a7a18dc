"""What an engine will take of a card and its host, before anything is loaded: an estimate from a model's shapes.

The engine measures at its start what it can (:meth:`~swiftllm.device.Device.left_free`), and that decides. The widest
iteration is what it measures by.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import MAX_LOGPROBS, Request, SamplingParams
from swiftllm.device import CONTEXT_BYTES, DEVICE_HEADROOM, LARGE_WORKSPACE_BYTES
from swiftllm.kv.tensors import KVFormat, cpu_format
from swiftllm.machine import GIB
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import FFN_ELEMENTS_AT_ONCE, LlamaModel
from swiftllm.model.weights import fused_matrices, linear_matrices
from swiftllm.ops.interface import MASK_ELEMENTS_AT_ONCE, ChunkLens, ContextBlocks, StateChunk, StateRows
from swiftllm.runtime.cpu_tier import MAX_STAGED_BYTES
from swiftllm.runtime.graphs import BLOCK_BUCKETS, ROW_BUCKETS
from swiftllm.runtime.kv_transfers import SNAPSHOTS
from swiftllm.runtime.memory import HOST_HEADROOM_BYTES, MemoryBudget, WeightSizes
from swiftllm.sampling.sampler import BYTES_PER_LOGIT, CPU_LOGITS, GPU_LOGITS, LogitsNotFinite, Sampler

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
    """Bytes at the peak of :func:`~swiftllm.runtime.memory_estimate.widest_iteration`, and of buffers that stay, states
    of linear attention among them.

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
    mixing = 0
    if (linear := model.linear) is not None:
        channels, keys = linear.conv_channels, linear.num_value_heads * linear.key_dim
        projected = (channels + linear.values_size) * itemsize
        if on_host:  # intermediate results are float32
            convolving = 2 * channels * itemsize + 2 * channels * 4
            attending = channels * itemsize + (3 * keys + 5 * linear.values_size) * 4
            mixing = held + hidden + rows * (projected + max(convolving, attending))
        else:  # kernels keep them to themselves; the product, and two norms' results
            attending = channels * itemsize + linear.values_size * (4 + itemsize)
            mixing = held + attended + 3 * hidden + rows * (projected + attending)
    peak = max(own_attention, crossing, long_attention, decoding, sampling, mixing)
    peak += requests * model.state_bytes(itemsize)
    graphs = 0 if on_host else _graph_buffers(model, itemsize, residual_itemsize, requests)
    return peak + context * rotary + graphs


def _written_out(model: ModelConfig, itemsize: int, hidden: int, gate_up: int, qkv: int) -> int:
    """Of a quantised matrix in full, beside its product, where that is most; arguments are the products' bytes.

    With up to 512 rows codes are multiplied from sm_80 on, and on most CPUs with any; then this is more than is taken.
    """
    beside = {"qkv": qkv, "o": hidden, "gate_up": gate_up, "down": hidden + gate_up // 2}
    written_out = [
        sum(matrix.out_features) * matrix.in_features * itemsize
        + beside.get(matrix.name, hidden // model.hidden_size * sum(matrix.out_features))
        for matrix in (*fused_matrices(model), *linear_matrices(model))
        if matrix.is_quantised
        if model.experts is None or matrix.name not in ("gate_up", "down")  # experts' codes are multiplied as they are
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
    state_rows = None
    if sizes.linear is not None:
        decode, state_rows = (
            StateRows.of(chunks, slots, lambda tensor: tensor.to(device))
            for chunks, slots in (([], [-1]), ([StateChunk(-1, rows, is_first=False)], []))
        )
        model.first_stage(residual[:1], rotary_rows[:1], state_rows=decode)
    q, k, v = model.split_qkv(model.first_stage(residual, rotary_rows, state_rows=state_rows))
    goes_to_host = device.type != "cpu" and config.num_cpu_blocks != 0
    on_their_way = [torch.cat([k, v], dim=1) for _ in range(SNAPSHOTS if goes_to_host else 0)]
    attention_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    windows = set(sizes.windows or [None])
    for window in windows:
        own = k.transpose(0, 1), v.transpose(0, 1)
        ops.prefill_attention(q, *own, lens(rows, rows), attention_out, scale, window)
    if sizes.num_layers > 1:
        model.weights.enter(0)
        model.stage(0, attention_out, residual, rotary_rows, state_rows=state_rows)

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
