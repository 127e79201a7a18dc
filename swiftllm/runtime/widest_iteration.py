"""The widest iteration that a configuration allows, run to measure the memory it takes.

It is also the first launch of the kernels that serving needs: Triton compiles each then, in a second or so. Captured
graphs need some in further forms, and launch those themselves before they are captured.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import Request
from swiftllm.core.sampling_params import MAX_LOGPROBS, SamplingParams
from swiftllm.kv.format import cpu_format
from swiftllm.model.llama import LlamaModel
from swiftllm.ops.interface import ChunkLens, ContextBlocks
from swiftllm.runtime.kv_transfers import SNAPSHOTS
from swiftllm.sampling.sampler import LogitsNotFinite, Sampler


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
