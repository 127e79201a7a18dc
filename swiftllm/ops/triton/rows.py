"""Triton kernels that work on rows (tokens): norms of rows and of heads, rotary embedding, SiLU-and-mul.

Layout: every row is contiguous in its last dimensions; rows are ``*_stride`` elements apart. Dtypes are float16,
bfloat16 and float32, with sums in float32 and one rounding at the end. The rows that are normed, and a residual, may be
float32 beside weights and results of 16 bits. Programs share no data, so the kernels may run in place. A row must fit
into the registers of one program (65536 elements are far beyond the largest Llama).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(rows,)``; ``x`` rows of ``SIZE`` elements, ``weight [SIZE]``, ``out`` contiguous; ``TILE >= SIZE``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    tl.store(out + row * SIZE + columns, values * inverse_norm * scales, mask=inside)


@triton.jit
def embed_kernel(token_ids, embedding, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(tokens, column tiles)``: int64 ``token_ids`` to rows of the contiguous ``embedding [vocabulary, SIZE]``,
    which may be in host memory."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    token = tl.load(token_ids + row).to(tl.int64)
    tl.store(out + row * SIZE + columns, tl.load(embedding + token * SIZE + columns, mask=inside), mask=inside)


@triton.jit
def add_rms_norm_kernel(
    residual, addend, weight, out, residual_stride, addend_stride, eps, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Grid ``(rows,)``: ``residual += addend``, and the norm of that in the contiguous ``out``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    residual_at = residual + row * residual_stride + columns
    left = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(addend + row * addend_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # The rounded sum is normalised, since the next layers use it.
    rounded = (left + right).to(residual.dtype.element_ty)
    tl.store(residual_at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    tl.store(out + row * SIZE + columns, values * inverse_norm * scales, mask=inside)


@triton.jit
def norm_heads_kernel(
    x,
    weights,
    x_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    DIM_TILE: tl.constexpr,
):
    """Grid ``(rows, head tiles)``; ``x [rows, NUM_HEADS, HEAD_DIM]`` in place, ``weights [NUM_HEADS, HEAD_DIM]``."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, DIM_TILE)
    inside = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(x + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse_norms = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)
    tl.store(x + row * x_stride + offsets, values * inverse_norms[:, None] * scales, mask=inside)


@triton.jit
def rotary_kernel(
    x,
    rotary_rows,
    x_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr,
    HALF_TILE: tl.constexpr,
):
    """Grid ``(rows, head tiles)``; rotates ``x [rows, NUM_HEADS, HEAD_DIM]`` in place; ``rotary_rows`` is contiguous.

    ``HALF_TILE >= HEAD_DIM / 2``. A program holds both halves of its heads, since they rotate together.
    """
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, HALF_TILE)
    inside = (heads < NUM_HEADS)[:, None] & (dims < half)[None, :]
    first_at = x + row * x_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + half, mask=inside, other=0.0).to(tl.float32)

    angles = rotary_rows + row * 2 * HEAD_DIM + dims
    in_half = dims < half
    first_cos = tl.load(angles, mask=in_half, other=0.0)
    second_cos = tl.load(angles + half, mask=in_half, other=0.0)
    first_sin = tl.load(angles + HEAD_DIM, mask=in_half, other=0.0)
    second_sin = tl.load(angles + HEAD_DIM + half, mask=in_half, other=0.0)
    tl.store(first_at, first * first_cos[None, :] + second * first_sin[None, :], mask=inside)
    tl.store(first_at + half, second * second_cos[None, :] + first * second_sin[None, :], mask=inside)


@triton.jit
def silu_and_mul_kernel(gate_up, out, gate_up_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(rows, column tiles)``; ``gate_up`` rows of ``2 * SIZE`` elements, ``out [rows, SIZE]`` contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)
