"""Triton kernels that make int8 codes of KV blocks before they leave the GPU, and elements of codes that come back.

Layout and arithmetic are those of :mod:`pacpu.int8`, bit by bit: compile without fused multiply-adds. A program has the
K and V of a tile, 16 tokens of one KV head, as words of four codes: of neighbouring dims in K, of tokens in V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pacpu.int8 import TILE_TOKENS

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
