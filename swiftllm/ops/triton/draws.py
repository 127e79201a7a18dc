"""A Triton kernel that draws tokens from rows of logits, all attempts in one launch.

Weights and the order of tokens are those of :mod:`swiftllm.sampling.draws`, and so is each step: from equal weights
follows the same token. Weights and their sums are integers, so no order of additions shows in a result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from swiftllm.ops import draw_rules

WEIGHT_OF_THE_LIKELIEST = tl.constexpr(draw_rules.WEIGHT_OF_THE_LIKELIEST)
LEAST_EXPONENT = tl.constexpr(draw_rules.LEAST_EXPONENT)
# A weight is an upper and a lower half, each at most 2**17. An int32 holds the sum of a tile's halves.
HALF_BITS = tl.constexpr(draw_rules.WEIGHT_BITS // 2)
HALF = tl.constexpr(2.0 ** (draw_rules.WEIGHT_BITS // 2))
HALF_UNIT = tl.constexpr(2.0 ** -(draw_rules.WEIGHT_BITS // 2))
MOST_TILE = 1 << (30 - draw_rules.WEIGHT_BITS // 2)
UNIFORM_SCALE = tl.constexpr(2.0**draw_rules.UNIFORM_BITS)
UNIFORM_UNIT = tl.constexpr(2.0**-draw_rules.UNIFORM_BITS)
DROPPED_BITS = tl.constexpr(64 - draw_rules.UNIFORM_BITS)
STEP, FIRST_FACTOR = tl.constexpr(draw_rules.STEP), tl.constexpr(draw_rules.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(draw_rules.SECOND_FACTOR)


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
