"""Triton kernels for an FFN of experts, whose weights are as :class:`swiftllm.ops.experts.ExpertWeights` has them.

``choose_experts_kernel`` chooses experts row by row, ``sort_pairs_kernel`` sorts the pairs of rows and slots by their
experts. The pairs of an expert are cut into tiles of rows. How many each expert has is known on the device alone, so a
program of a product finds its tile there, and those beyond the last tile do nothing. ``add_slots_kernel`` adds up a
row's products in the order of its slots. There are no atomic operations: a result does not depend on which program ends
first.

Rows from ``num_rows`` on are padding: they have no tiles, and their results are 0.
"""

# Ranges and tuples of Triton can be iterated only in compiled code, which their annotations do not say.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from swiftllm.ops.triton.quantised import _weights


@triton.jit
def _is_row(row, num_rows, HAS_PADDING: tl.constexpr):
    return row < tl.load(num_rows) if HAS_PADDING else row >= 0


@triton.jit
def choose_experts_kernel(
    logits, num_rows, ids, likelihoods,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS_TILE: tl.constexpr, SLOTS_TILE: tl.constexpr,
    NORMALISES: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Grid ``(rows,)``; float32 ``logits [rows, EXPERTS]``; int32 ``ids`` and float32 ``likelihoods [rows, SLOTS]``.

    The id of a padding row is ``EXPERTS``, which no expert has; ``num_rows`` is not read without ``HAS_PADDING``.
    """
    row = tl.program_id(0)
    experts, slots = tl.arange(0, EXPERTS_TILE), tl.arange(0, SLOTS_TILE)
    left = tl.load(logits + row * EXPERTS + experts, mask=experts < EXPERTS, other=float("-inf"))
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    chosen = tl.zeros([SLOTS_TILE], tl.int32)
    parts = tl.zeros([SLOTS_TILE], tl.float32)
    for slot in tl.static_range(SLOTS):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, experts, EXPERTS - 1), 0)  # NaN equals nothing: some expert spreads it
        chosen = tl.where(slots == slot, expert, chosen)
        parts = tl.where(slots == slot, tl.exp(best - highest), parts)
        left = tl.where(experts == expert, float("-inf"), left)
    parts = parts / (tl.sum(parts, 0) if NORMALISES else total)
    is_row = _is_row(row, num_rows, HAS_PADDING)
    at, is_slot = row * SLOTS + slots, slots < SLOTS
    tl.store(ids + at, tl.where(is_row, chosen, EXPERTS), mask=is_slot)
    tl.store(likelihoods + at, tl.where(is_row, parts, 0.0), mask=is_slot)


@triton.jit(do_not_specialize=["num_pairs"])
def sort_pairs_kernel(ids, pairs, starts, num_pairs, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(EXPERTS + 1,)``: pair i has expert ``ids[i]``. int32 ``pairs [num_pairs]``, sorted by experts, stable;
    ``starts [EXPERTS + 1]``: those of expert e are ``pairs[starts[e] : starts[e + 1]]``. Pairs of padding come last.
    Each program counts alone."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    place = 0
    for first in tl.range(0, num_pairs, TILE):
        own = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=EXPERTS)
        place += tl.sum((own < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    for first in tl.range(0, num_pairs, TILE):
        own = tl.load(ids + first + lanes, mask=first + lanes < num_pairs, other=-1)
        is_here = (own == expert).to(tl.int32)
        tl.store(pairs + place + tl.cumsum(is_here, 0) - 1, first + lanes, mask=is_here > 0)
        place += tl.sum(is_here, 0)


@triton.jit
def _tile(starts, EXPERTS: tl.constexpr, EXPERTS_TILE: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Of the program's tile: its expert, where its pairs begin, and where the expert's end. Beyond the last tile the
    expert is ``EXPERTS`` or more, and there are no pairs."""
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_TILE)
    is_expert = experts < EXPERTS
    first = tl.load(starts + experts, mask=is_expert, other=0)
    stop = tl.load(starts + experts + 1, mask=is_expert, other=0)
    tiles = (stop - first + ROWS_TILE - 1) // ROWS_TILE
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    is_own = experts == expert
    begin = tl.sum(tl.where(is_own, first + (tile - (ends - tiles)) * ROWS_TILE, 0), 0)
    return expert, begin, tl.sum(tl.where(is_own, stop, 0), 0)


@triton.jit
def _rows_and_places(pairs, begin, stop, SLOTS: tl.constexpr, ROWS_TILE: tl.constexpr, TAKES_ROWS: tl.constexpr):
    """Of a tile's pairs: what row of the input each multiplies, what row of the output it writes, and whether it is
    one. ``TAKES_ROWS``: the input has rows, and the output is sorted by experts; else the reverse, with pairs."""
    sorted_at = begin + tl.arange(0, ROWS_TILE)
    is_pair = sorted_at < stop
    pair = tl.load(pairs + sorted_at, mask=is_pair, other=0)
    rows = pair // SLOTS if TAKES_ROWS else sorted_at
    places = sorted_at if TAKES_ROWS else pair
    return rows.to(tl.int64), places.to(tl.int64), is_pair


@triton.jit
def _biases(bias, expert, columns, in_matrix, OUT: tl.constexpr):
    """Of a tile's outputs, as a row to be added to its sums."""
    return tl.load(bias + expert * OUT + columns, mask=in_matrix, other=0.0).to(tl.float32)[None, :]


@triton.jit
def expert_product_kernel(
    x, weights, bias, pairs, starts, out, x_stride,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TAKES_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EXPERTS_TILE: tl.constexpr, ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr,
    BY_DOT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles, output tiles)``; ``weights [EXPERTS, OUT, IN]``, ``bias [EXPERTS, OUT]``, ``out [pairs, OUT]``.
    Without ``BY_DOT`` each input of a step has sums of its own, as in ``quantised_linear_kernel``. ``bias`` is not read
    without ``HAS_BIAS``."""
    expert, begin, stop = _tile(starts, EXPERTS, EXPERTS_TILE, ROWS_TILE)
    if expert < EXPERTS:
        rows, places, is_pair = _rows_and_places(pairs, begin, stop, SLOTS, ROWS_TILE, TAKES_ROWS)
        columns = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
        in_matrix = columns < OUT
        depth = tl.arange(0, DEPTH)
        weights_at = weights + (expert.to(tl.int64) * OUT + columns)[None, :] * IN
        if BY_DOT:
            sums = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
        else:
            sums = tl.zeros([ROWS_TILE, DEPTH, COLUMNS_TILE], tl.float32)
        for start in tl.range(0, IN, DEPTH):
            inputs = start + depth
            in_row = inputs < IN
            values_at = x + rows[:, None] * x_stride + inputs[None, :]
            values = tl.load(values_at, mask=is_pair[:, None] & in_row[None, :], other=0.0)
            matrix = tl.load(weights_at + inputs[:, None], mask=in_row[:, None] & in_matrix[None, :], other=0.0)
            if BY_DOT:
                sums = tl.dot(values, matrix, sums)
            else:
                sums += values.to(tl.float32)[:, :, None] * matrix.to(tl.float32)[None, :, :]
        if not BY_DOT:
            sums = tl.sum(sums, 1)
        if HAS_BIAS:
            sums += _biases(bias, expert, columns, in_matrix, OUT)
        tl.store(out + places[:, None] * OUT + columns[None, :], sums, mask=is_pair[:, None] & in_matrix[None, :])


@triton.jit
def _mxfp4_weights(words, scales, group, columns, in_matrix, shift: tl.constexpr, OUT: tl.constexpr):
    """As ``_weights`` of MXFP4. A code has the bits of a float16, 2^14 times smaller, at the ends of its exponent."""
    scale = tl.load(scales + group * OUT + columns, mask=in_matrix, other=0).to(tl.int32)
    power = tl.where(scale == 0, 1 << 22, tl.where(scale == 255, 0x7FC00000, scale << 23)).to(tl.float32, bitcast=True)
    codes = words >> (4 * shift)
    numbers = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return numbers.to(tl.float32) * 16384.0 * power[None, :]


@triton.jit
def expert_codes_kernel(
    x, codes, scales, zeros, bias, pairs, starts, out, x_stride,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TAKES_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EXPERTS_TILE: tl.constexpr, ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr,
    BY_DOT: tl.constexpr, GROUP: tl.constexpr, IS_MXFP4: tl.constexpr,
):  # fmt: skip
    """The same of 4-bit weights, whose outputs lie expert beside expert; see ``quantised_linear_kernel``. ``zeros`` are
    not read with ``IS_MXFP4``."""
    expert, begin, stop = _tile(starts, EXPERTS, EXPERTS_TILE, ROWS_TILE)
    if expert < EXPERTS:
        rows, places, is_pair = _rows_and_places(pairs, begin, stop, SLOTS, ROWS_TILE, TAKES_ROWS)
        own_columns = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
        in_matrix = own_columns < OUT
        columns = expert * OUT + own_columns
        all_columns: tl.constexpr = EXPERTS * OUT
        num_blocks: tl.constexpr = (IN + 128 - 1) // 128
        depth = tl.arange(0, 16)
        if BY_DOT:
            sums = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
        else:
            sums = tl.zeros([ROWS_TILE, 16, COLUMNS_TILE], tl.float32)
        for block in tl.range(0, num_blocks):
            words_at = codes + (block * 16 + depth).to(tl.int64)[:, None] * all_columns + columns[None, :]
            words = tl.load(words_at, mask=in_matrix[None, :], other=0)
            for shift in tl.static_range(8):
                start = block * 128 + shift * 16
                inputs = start + depth
                in_row = inputs < IN
                values_at = x + rows[:, None] * x_stride + inputs[None, :]
                values = tl.load(values_at, mask=is_pair[:, None] & in_row[None, :], other=0.0)
                group = tl.minimum(start, IN - 1) // GROUP
                if IS_MXFP4:
                    matrix = _mxfp4_weights(words, scales, group, columns, in_matrix, shift, all_columns)
                else:
                    matrix = _weights(words, scales, zeros, group, columns, in_matrix, shift, all_columns)
                matrix = matrix.to(values.dtype)
                if BY_DOT:
                    sums = tl.dot(values, matrix, sums)
                else:
                    sums += values.to(tl.float32)[:, :, None] * matrix.to(tl.float32)[None, :, :]
        if not BY_DOT:
            sums = tl.sum(sums, 1)
        if HAS_BIAS:
            sums += _biases(bias, expert, own_columns, in_matrix, OUT)
        at = out + places[:, None] * OUT + own_columns[None, :]
        tl.store(at, sums, mask=is_pair[:, None] & in_matrix[None, :])


@triton.jit
def clamped_swiglu_kernel(gate_up, out, limit, alpha, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid ``(rows, column tiles)``; ``gate_up [rows, 2 * SIZE]``, ``out [rows, SIZE]``. NaN stays NaN."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    tl.store(out + row * SIZE + columns, (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate)), mask=inside)


@triton.jit
def add_slots_kernel(
    products, likelihoods, num_rows, out,
    SLOTS: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, HAS_PADDING: tl.constexpr,
):  # fmt: skip
    """Grid ``(rows, tiles)``; ``products [rows, SLOTS, SIZE]``, ``out [rows, SIZE]``. Products of padding, which were
    never made, are not read."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_row = columns < SIZE
    is_made = columns < tl.where(_is_row(row, num_rows, HAS_PADDING), SIZE, 0)
    total = tl.zeros([TILE], tl.float32)
    for slot in tl.static_range(SLOTS):
        product = tl.load(products + (row * SLOTS + slot) * SIZE + columns, mask=is_made, other=0.0)
        total += product.to(tl.float32) * tl.load(likelihoods + row * SLOTS + slot)
    tl.store(out + row * SIZE + columns, total, mask=in_row)
