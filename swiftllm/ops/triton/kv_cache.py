"""Triton kernels that store, copy and encode KV blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from pacpu.int8 import TILE_TOKENS

# -- storing and copying -----------------------------------------------------------------------------------------------
# Triton kernels that store and copy KV cache data.
#
# Layout: one layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, and a pool is ``[num_layers, ...]`` of
# layers; both contiguous. Offsets have 64 bits, since a pool may hold more than 2^31 elements.


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


# -- int8 codes --------------------------------------------------------------------------------------------------------
# Triton kernels that make int8 codes of KV blocks before they leave the GPU, and elements of codes that come back.
#
# Layout and arithmetic are those of :mod:`pacpu.int8`, bit by bit: compile without fused multiply-adds. A program has
# the K and V of a tile, 16 tokens of one KV head, as words of four codes: of neighbouring dims in K, of tokens in V.

TOKENS = tl.constexpr(TILE_TOKENS)


@triton.jit
def _scales(largest, is_finite):
    scales = tl.maximum(largest * (1.0 / 127.0), 1.1920928955078125e-07)  # 2^-23
    rounded = ((scales.to(tl.int32, bitcast=True) + 0x80) & -256).to(tl.float32, bitcast=True)
    return tl.where(is_finite, rounded, float("nan"))


@triton.jit
def _codes(x, scales, is_finite):
    nearest = 12582912.0  # 1.5 * 2^23: what is added to it loses its fraction, ties to even
    codes = (x * tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales) + nearest) - nearest
    return tl.where(is_finite, codes, 0.0).to(tl.int32)


@triton.jit(do_not_specialize=["num_staged", "num_blocks"])
def quantise_blocks_kernel(
    pool,
    codes,
    scales,
    blocks,
    num_staged,
    num_blocks,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Grid ``(num_staged * BLOCK_SIZE / 16, NUM_KV_HEADS, num_layers)``.

    ``pool [num_layers, num_blocks, NUM_KV_HEADS, 2, BLOCK_SIZE, HEAD_DIM]``; ``blocks`` int64 ``[num_staged]``.
    ``codes`` int32 and ``scales`` float32 are the same ``[num_layers, num_staged, NUM_KV_HEADS, head_bytes / 4]``.
    """
    tiles: tl.constexpr = BLOCK_SIZE // TOKENS
    tile_words: tl.constexpr = 8 * HEAD_DIM + 2 * TOKENS
    entry, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = layer * num_blocks + tl.load(blocks + entry)
    keys = pool + (block * NUM_KV_HEADS + head) * (2 * BLOCK_SIZE * HEAD_DIM) + tile * (TOKENS * HEAD_DIM)
    out = (((layer * num_staged + entry) * NUM_KV_HEADS + head) * tiles + tile) * tile_words
    four, tokens = tl.arange(0, 4), tl.arange(0, TOKENS)

    words = tl.arange(0, DIM_TILE // 4)
    inside = (words < HEAD_DIM // 4)[None, :]
    dims = 4 * words[None, :, None] + four[None, None, :]
    x = tl.load(keys + tokens[:, None, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(x), axis=2), axis=1)
    finite = tl.sum(tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=2), axis=1)
    of_keys = _scales(largest, finite == DIM_TILE)
    of_each = tl.broadcast_to(of_keys[:, None, None], x.shape)
    packed = tl.sum((_codes(x, of_each, of_each == of_each) + 128) << (8 * four[None, None, :]), axis=2)
    tl.store(codes + out + words[None, :] * TOKENS + tokens[:, None], packed, mask=inside)
    tl.store(scales + out + 8 * HEAD_DIM + tokens, of_keys)

    fours, columns = tl.arange(0, TOKENS // 4), tl.arange(0, DIM_TILE)
    rows = 4 * fours[:, None, None] + four[None, :, None]
    values = keys + BLOCK_SIZE * HEAD_DIM + rows * HEAD_DIM + columns[None, None, :]
    x = tl.load(values, mask=(columns < HEAD_DIM)[None, None, :], other=0.0).to(tl.float32)
    finite = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=2)
    of_values = _scales(tl.max(tl.abs(x), axis=2), finite == DIM_TILE)
    of_each = tl.broadcast_to(of_values[:, :, None], x.shape)
    packed = tl.sum((_codes(x, of_each, of_each == of_each) & 0xFF) << (8 * four[None, :, None]), axis=1)
    at = out + 4 * HEAD_DIM + fours[:, None] * HEAD_DIM + columns[None, :]
    tl.store(codes + at, packed, mask=(columns < HEAD_DIM)[None, :])
    tl.store(scales + out + 8 * HEAD_DIM + TOKENS + 4 * fours[:, None] + four[None, :], of_values)


@triton.jit(do_not_specialize=["num_staged", "num_blocks"])
def dequantise_blocks_kernel(
    pool,
    codes,
    scales,
    blocks,
    num_staged,
    num_blocks,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """The way back; grid and arguments are the same."""
    tiles: tl.constexpr = BLOCK_SIZE // TOKENS
    tile_words: tl.constexpr = 8 * HEAD_DIM + 2 * TOKENS
    entry, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    head, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    block = layer * num_blocks + tl.load(blocks + entry)
    keys = pool + (block * NUM_KV_HEADS + head) * (2 * BLOCK_SIZE * HEAD_DIM) + tile * (TOKENS * HEAD_DIM)
    source = (((layer * num_staged + entry) * NUM_KV_HEADS + head) * tiles + tile) * tile_words
    four, tokens = tl.arange(0, 4), tl.arange(0, TOKENS)

    words = tl.arange(0, DIM_TILE // 4)
    packed = tl.load(codes + source + words[None, :] * TOKENS + tokens[:, None], mask=(words < HEAD_DIM // 4)[None, :])
    of_keys = tl.load(scales + source + 8 * HEAD_DIM + tokens)
    dims = 4 * words[None, :, None] + four[None, None, :]
    x = (((packed[:, :, None] >> (8 * four[None, None, :])) & 0xFF) - 128).to(tl.float32) * of_keys[:, None, None]
    target = keys + tokens[:, None, None] * HEAD_DIM + dims
    tl.store(target, x.to(pool.dtype.element_ty), mask=dims < HEAD_DIM)

    fours, columns = tl.arange(0, TOKENS // 4), tl.arange(0, DIM_TILE)
    inside = (columns < HEAD_DIM)[None, :]
    packed = tl.load(codes + source + 4 * HEAD_DIM + fours[:, None] * HEAD_DIM + columns[None, :], mask=inside)
    of_values = tl.load(scales + source + 8 * HEAD_DIM + TOKENS + 4 * fours[:, None] + four[None, :])
    signed = (packed[:, None, :] << (24 - 8 * four[None, :, None])) >> 24
    rows = 4 * fours[:, None, None] + four[None, :, None]
    target = keys + BLOCK_SIZE * HEAD_DIM + rows * HEAD_DIM + columns[None, None, :]
    x = signed.to(tl.float32) * of_values[:, :, None]
    tl.store(target, x.to(pool.dtype.element_ty), mask=(columns < HEAD_DIM)[None, None, :])
