"""Triton kernels that work on rows (tokens): norms of rows and of heads, rotary embedding, SiLU-and-mul.

Layout: every row is contiguous in its last dimensions; rows are ``*_stride`` elements apart. Dtypes are float16,
bfloat16 and float32, with sums in float32 and one rounding at the end. The rows that are normed, and a residual, may be
float32 beside weights and results of 16 bits. Programs share no data, so the kernels may run in place. A row must fit
into the registers of one program (65536 elements are far beyond the largest Llama).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from swiftllm.ops import interface

# -- norms, rotary embedding, activation -------------------------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, weight, out, x_stride, eps, offset, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(rows,)``; ``x`` rows of ``SIZE`` elements, ``weight [SIZE]``, to which ``offset`` is added, ``out``
    contiguous; ``TILE >= SIZE``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    inverse_norm = tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    tl.store(out + row * SIZE + columns, values * inverse_norm * (scales + offset), mask=inside)


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
    residual, addend, weight, out, residual_stride, addend_stride, eps, offset, SIZE: tl.constexpr, TILE: tl.constexpr
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
    tl.store(out + row * SIZE + columns, values * inverse_norm * (scales + offset), mask=inside)


@triton.jit
def norm_heads_kernel(
    x,
    weights,
    x_stride,
    eps,
    offset,
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
    tl.store(x + row * x_stride + offsets, values * inverse_norms[:, None] * (scales + offset), mask=inside)


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


# -- draws of tokens ---------------------------------------------------------------------------------------------------
# A Triton kernel that draws tokens from rows of logits, all attempts in one launch.
#
# Weights and the order of tokens are those of :mod:`swiftllm.sampling.sampler`, and so is each step: from equal weights
# follows the same token. Weights and their sums are integers, so no order of additions shows in a result.

WEIGHT_OF_THE_LIKELIEST = tl.constexpr(interface.WEIGHT_OF_THE_LIKELIEST)
LEAST_EXPONENT = tl.constexpr(interface.LEAST_EXPONENT)
# A weight is an upper and a lower half, each at most 2**17. An int32 holds the sum of a tile's halves.
HALF_BITS = tl.constexpr(interface.WEIGHT_BITS // 2)
HALF = tl.constexpr(2.0 ** (interface.WEIGHT_BITS // 2))
HALF_UNIT = tl.constexpr(2.0 ** -(interface.WEIGHT_BITS // 2))
MOST_TILE = 1 << (30 - interface.WEIGHT_BITS // 2)
UNIFORM_SCALE = tl.constexpr(2.0**interface.UNIFORM_BITS)
UNIFORM_UNIT = tl.constexpr(2.0**-interface.UNIFORM_BITS)
DROPPED_BITS = tl.constexpr(64 - interface.UNIFORM_BITS)
STEP, FIRST_FACTOR = tl.constexpr(interface.STEP), tl.constexpr(interface.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(interface.SECOND_FACTOR)


@triton.jit
def _weights(logits, ids, highest, temperature, SIZE: tl.constexpr):
    values = tl.load(logits + ids, mask=ids < SIZE, other=float("-inf")).to(tl.float32)
    # Division and exponential are those of torch's CUDA kernels: of the same logits they make the same weights.
    exponents = tl.maximum(tl.div_rn(highest - values, -temperature), LEAST_EXPONENT)
    return tl.floor(libdevice.exp(exponents) * WEIGHT_OF_THE_LIKELIEST)


@triton.jit
def _halves_before(weights, ids, own, token):
    """Both halves of the weights of tokens that come before ``token``, whose weight is ``own``; zeros for others."""
    weights = tl.where((weights > own) | ((weights == own) & (ids < token)), weights, 0.0)
    upper = (weights * HALF_UNIT).to(tl.int32)
    return upper, (weights - upper.to(tl.float32) * HALF).to(tl.int32)


@triton.jit
def _joined(upper, lower):
    return (upper.to(tl.int64) << HALF_BITS) + lower


@triton.jit
def _sum_before(logits, highest, temperature, own, token, SIZE: tl.constexpr, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    uppers, lowers = tl.zeros([TILE], tl.int32), tl.zeros([TILE], tl.int32)
    for start in range(0, SIZE, TILE):
        weights = _weights(logits, start + lanes, highest, temperature, SIZE)
        upper, lower = _halves_before(weights, start + lanes, own, token)
        uppers += upper
        lowers += lower
    return tl.sum(_joined(uppers, lowers))


@triton.jit
def _uniform_of(first, attempt):
    bits = (first * UNIFORM_SCALE).to(tl.int64).to(tl.uint64) + attempt.to(tl.uint64) * STEP
    bits = (bits ^ (bits >> 30)) * FIRST_FACTOR
    bits = (bits ^ (bits >> 27)) * SECOND_FACTOR
    return ((bits ^ (bits >> 31)) >> DROPPED_BITS).to(tl.int64).to(tl.float64) * UNIFORM_UNIT


@triton.jit(do_not_specialize=["count"])
def draw_kernel(
    logits, rows, likeliest, settings, tokens, logits_stride, count, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Grid ``(count,)``: int64 ``tokens [count]`` drawn from ``rows`` of logits of ``SIZE`` tokens each.

    int64 ``rows [count]``, ``likeliest`` of each row of the logits; float64 ``settings [3, count]``: uniform number,
    temperature, top_p. A row without a finite highest logit has no distribution and gets its likeliest token.

    ``TILE`` is at most ``MOST_TILE``, and a row has at most 2**13 tiles: lanes are summed over them in int32.
    """
    place = tl.program_id(0)
    row = tl.load(rows + place)
    likely = tl.load(likeliest + row)
    logits += row * logits_stride
    first_uniform = tl.load(settings + place)
    temperature = tl.load(settings + count + place).to(tl.float32)
    top_p = tl.load(settings + 2 * count + place)
    highest = tl.load(logits + likely).to(tl.float32)

    token, lanes = likely, tl.arange(0, TILE)
    if tl.abs(highest) < float("inf"):  # which NaN is not
        # What is left to draw from is what comes before a token that was rejected. At first these are all tokens with
        # a weight, which come before one without.
        own, token = 0.0, tl.zeros([], tl.int64)
        total = _sum_before(logits, highest, temperature, own, token, SIZE, TILE)
        left, uniform, attempt, is_kept = total, first_uniform, tl.zeros([], tl.int32), False
        while not is_kept:
            # The first token at which the cumulative sum exceeds the target, an integer as all sums are.
            target = (uniform * left.to(tl.float64)).to(tl.int64)
            start, passed, is_reached = tl.zeros([], tl.int32), tl.zeros([], tl.int64), False
            while not is_reached:
                weights = _weights(logits, start + lanes, highest, temperature, SIZE)
                upper, lower = _halves_before(weights, start + lanes, own, token)
                behind = passed + _joined(tl.sum(upper), tl.sum(lower))
                is_reached = (behind > target) | (start + TILE >= SIZE)
                passed, start = tl.where(is_reached, passed, behind), tl.where(is_reached, start, start + TILE)
            weights = _weights(logits, start + lanes, highest, temperature, SIZE)
            upper, lower = _halves_before(weights, start + lanes, own, token)
            reached = passed + _joined(tl.cumsum(upper), tl.cumsum(lower))
            lane = tl.sum((reached <= target).to(tl.int32))
            token = (start + lane).to(tl.int64)
            own = tl.sum(tl.where(lanes == lane, weights, 0.0))
            is_kept = top_p >= 1.0
            if top_p < 1.0:
                left = _sum_before(logits, highest, temperature, own, token, SIZE, TILE)
                is_kept = left.to(tl.float64) < top_p * total.to(tl.float64)
                attempt += 1
                uniform = _uniform_of(first_uniform, attempt)
    tl.store(tokens + place, token)
