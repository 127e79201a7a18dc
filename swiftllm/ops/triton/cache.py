"""Triton kernels that store and copy KV cache data.

Layout: one layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, and a pool is ``[num_layers, ...]`` of
layers; both contiguous. Offsets have 64 bits, since a pool may hold more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kv_kernel(
    k,
    v,
    kv_layer,
    blocks,
    offsets,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Grid ``(rows, head tiles)``: row i of k and v to slot ``offsets[i]`` of block ``blocks[i]`` (both int64)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, DIM_TILE)
    inside = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = heads[:, None] * HEAD_DIM + dims[None, :]
    head_stride: tl.constexpr = 2 * BLOCK_SIZE * HEAD_DIM
    slot = tl.load(blocks + row) * (NUM_KV_HEADS * head_stride) + tl.load(offsets + row) * HEAD_DIM
    target = kv_layer + slot + heads[:, None] * head_stride + dims[None, :]
    tl.store(target, tl.load(k + row * k_stride + source, mask=inside), mask=inside)
    tl.store(target + BLOCK_SIZE * HEAD_DIM, tl.load(v + row * v_stride + source, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_blocks", "num_tokens"])
def gather_contexts_kernel(
    kv_layer,
    out,
    blocks,
    columns,
    num_blocks,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Grid ``(num_blocks, kv heads)``: K and V of block ``blocks[i]`` to ``out [2, kv heads, num_tokens, HEAD_DIM]``,
    from token ``columns[i]`` up to that of the next block (both int64)."""
    entry, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.load(columns + entry)
    end = tl.load(columns + entry + 1, mask=entry + 1 < num_blocks, other=num_tokens)
    slots, dims = tl.arange(0, SLOTS_TILE), tl.arange(0, DIM_TILE)
    inside = (slots < tl.minimum(end - column, BLOCK_SIZE))[:, None] & (dims < HEAD_DIM)[None, :]
    element = slots[:, None] * HEAD_DIM + dims[None, :]
    source = kv_layer + (tl.load(blocks + entry) * NUM_KV_HEADS + head) * (2 * BLOCK_SIZE * HEAD_DIM) + element
    target = out + (head * num_tokens + column) * HEAD_DIM + element
    tl.store(target, tl.load(source, mask=inside), mask=inside)
    values = NUM_KV_HEADS * num_tokens.to(tl.int64) * HEAD_DIM
    tl.store(target + values, tl.load(source + BLOCK_SIZE * HEAD_DIM, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_staged", "num_blocks"])
def copy_blocks_kernel(
    pool,
    staging,
    blocks,
    num_staged,
    num_blocks,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Grid ``(word tiles, num_staged, num_layers)``: blocks of a pool to a staging buffer (``GATHER``) or back.

    ``pool [num_layers, num_blocks, WORDS]`` and ``staging [num_layers, num_staged, WORDS]`` are viewed as int32 words,
    whatever their dtype, so all bits are kept. ``blocks`` int64 ``[num_staged]``.
    """
    words = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = words < WORDS
    entry, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    in_pool = pool + (layer * num_blocks + tl.load(blocks + entry)) * WORDS + words
    in_staging = staging + (layer * num_staged + entry) * WORDS + words
    if GATHER:
        tl.store(in_staging, tl.load(in_pool, mask=inside), mask=inside)
    else:
        tl.store(in_pool, tl.load(in_staging, mask=inside), mask=inside)
