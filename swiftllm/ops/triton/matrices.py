"""Triton kernels for 4-bit weights and for the FFN of experts."""

# Ranges and tuples of Triton can be iterated only in compiled code, which their annotations do not say.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl

from swiftllm.ops.library import GroupedProduct
from swiftllm.ops.matrices import ExpertWeights, QuantisedMatrix, Router
from swiftllm.ops.triton.tiles import cdiv, next_power_of_2

# -- 4-bit weights -----------------------------------------------------------------------------------------------------
# Triton kernels for 4-bit weights in the layout of :mod:`swiftllm.ops.matrices`.
#
# A program of ``quantised_linear_kernel`` computes a tile of rows and outputs over a split of the blocks of inputs. It
# loads a tile of 16 words once and shifts it eight times. Each shift gives the codes of 16 neighbouring inputs, which
# is the depth of a tensor core's multiplication, so no code changes its lane before it is a number. Codes become
# float32 without a conversion: or-ed into the mantissa of 2^23 they are that number plus the code. Sums are float32.
#
# With few rows there are few tiles, and splits fill the GPU. Each writes its own partial sums, which
# ``combine_splits_kernel`` adds in a fixed order, so a result does not depend on which program ends first.
#
# Where Triton has no tensor cores, it multiplies very few rows by multiply-adds.
#
# ``dequantise_kernel`` writes the matrix out, for many rows, and for more than very few on such a GPU: a library
# multiplies then.
#
# In the kernels, 16 is ``BLOCK_WORDS`` of that layout, 8 ``CODES_PER_WORD``, 4 ``BITS`` and 128 ``BLOCK_INPUTS``.


@triton.jit
def _weights(words, scales, zeros, group, columns, in_matrix, shift: tl.constexpr, OUT: tl.constexpr):
    """The float32 weights ``[16, columns]`` of one shift; their inputs belong to one ``group``."""
    at = group * OUT + columns
    scale = tl.load(scales + at, mask=in_matrix, other=0.0).to(tl.float32)
    zero = tl.load(zeros + at, mask=in_matrix, other=0).to(tl.float32) + 8388608.0
    codes = ((words >> (4 * shift)) & 15) | 0x4B000000  # the bits of 2^23
    return (codes.to(tl.float32, bitcast=True) - zero[None, :]) * scale[None, :]


@triton.jit
def _group(runs, start, IN: tl.constexpr, GROUP: tl.constexpr, HAS_RUNS: tl.constexpr):
    """The group of 16 inputs from ``start`` on; padded inputs take some group."""
    first = tl.minimum(start, IN - 1)
    return tl.load(runs + first // 16) if HAS_RUNS else first // GROUP


@triton.jit(do_not_specialize=["num_rows", "blocks_per_split"])
def quantised_linear_kernel(
    x, codes, scales, zeros, runs, partial, x_stride, num_rows, blocks_per_split,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, HAS_RUNS: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, BY_DOT: tl.constexpr,
):  # fmt: skip
    """Grid ``(row tiles, output tiles, splits)``; float32 ``partial [splits, num_rows, OUT]``.

    Row tiles come first, so that programs which run together share codes: memory is read once, then the L2 cache.
    Tiles are powers of two, of at least 16 with ``BY_DOT``. ``GROUP`` is a multiple of 16, or as large as ``IN``.
    ``runs`` is not read without ``HAS_RUNS``, nor is ``GROUP`` with it.

    Without ``BY_DOT`` each of the 16 inputs of a shift has sums of its own, which are added up after the loop: so the
    loop has no exchange between threads.
    """
    rows = tl.program_id(0) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    columns = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    split = tl.program_id(2)
    in_matrix, in_batch = columns < OUT, rows < num_rows
    depth = tl.arange(0, 16)
    num_blocks: tl.constexpr = (IN + 128 - 1) // 128
    first = split * blocks_per_split
    stop = tl.minimum(first + blocks_per_split, num_blocks)
    rows_at = x + rows.to(tl.int64)[:, None] * x_stride

    if BY_DOT:
        sums = tl.zeros([ROWS_TILE, COLUMNS_TILE], tl.float32)
    else:
        sums = tl.zeros([ROWS_TILE, 16, COLUMNS_TILE], tl.float32)
    for block in tl.range(first, stop):
        words_at = codes + (block * 16 + depth).to(tl.int64)[:, None] * OUT + columns[None, :]
        words = tl.load(words_at, mask=in_matrix[None, :], other=0)
        for shift in tl.static_range(8):
            start = block * 128 + shift * 16
            inputs = start + depth
            in_row = inputs < IN
            values = tl.load(rows_at + inputs[None, :], mask=in_batch[:, None] & in_row[None, :], other=0.0)
            group = _group(runs, start, IN, GROUP, HAS_RUNS)  # the values of padded inputs are 0
            weights = _weights(words, scales, zeros, group, columns, in_matrix, shift, OUT)
            weights = weights.to(values.dtype)  # those of the matrix written out
            if BY_DOT:
                sums = tl.dot(values, weights, sums)
            else:
                sums += values.to(tl.float32)[:, :, None] * weights.to(tl.float32)[None, :, :]
    if not BY_DOT:
        sums = tl.sum(sums, 1)

    at = (split * num_rows + rows).to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(partial + at, sums, mask=in_batch[:, None] & in_matrix[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def combine_splits_kernel(
    partial, bias, out, out_stride, num_rows, num_splits,
    OUT: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(num_rows, output tiles)``: the sum of all splits and the bias, rounded once; ``bias`` is not read
    without ``HAS_BIAS``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_matrix = columns < OUT
    total = tl.zeros([TILE], tl.float32)
    for split in tl.range(0, num_splits):
        total += tl.load(partial + (split * num_rows + row) * OUT + columns, mask=in_matrix, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=in_matrix, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, total, mask=in_matrix)


@triton.jit
def dequantise_kernel(
    codes, scales, zeros, runs, out,
    IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr, HAS_RUNS: tl.constexpr, COLUMNS_TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(output tiles, blocks of inputs)``; ``out [IN, OUT]``: the matrix transposed, inputs in its order."""
    columns = tl.program_id(0) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    block = tl.program_id(1)
    in_matrix = columns < OUT
    depth = tl.arange(0, 16)
    words_at = codes + (block * 16 + depth).to(tl.int64)[:, None] * OUT + columns[None, :]
    words = tl.load(words_at, mask=in_matrix[None, :], other=0)
    for shift in tl.static_range(8):
        start = block * 128 + shift * 16
        inputs = start + depth
        group = _group(runs, start, IN, GROUP, HAS_RUNS)
        weights = _weights(words, scales, zeros, group, columns, in_matrix, shift, OUT)
        at = out + inputs.to(tl.int64)[:, None] * OUT + columns[None, :]
        tl.store(at, weights, mask=(inputs < IN)[:, None] & in_matrix[None, :])


# -- experts -----------------------------------------------------------------------------------------------------------
# Triton kernels for an FFN of experts, whose weights are as :class:`swiftllm.ops.matrices.ExpertWeights` has them.
#
# ``choose_experts_kernel`` chooses experts row by row, ``sort_pairs_kernel`` sorts the pairs of rows and slots by their
# experts. The pairs of an expert are cut into tiles of rows. How many each expert has is known on the device alone, so
# a program of a product finds its tile there, and those beyond the last tile do nothing. ``add_slots_kernel`` adds up a
# row's products in the order of its slots. There are no atomic operations: a result does not depend on which program
# ends first.
#
# Rows from ``num_rows`` on are padding: they have no tiles, and their results are 0.


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


# -- an FFN of experts -------------------------------------------------------------------------------------------------
# An FFN of experts by the kernels of :mod:`swiftllm.ops.triton.matrices`.

PAIRS_TILE = 1024
COLUMNS_TILE = 1024
# Rows, outputs and, in 16 bits, inputs of a tile: with tensor cores, and where Triton has none.
DOT_ROWS, DOT_COLUMNS, DOT_DEPTH = (16, 32, 64), 64, 64
SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH = 4, 32, 16


class GroupedExperts:
    """See :data:`swiftllm.ops.matrices.Experts`. Own products read weights where they are, call by call."""

    def __init__(
        self,
        weights: ExpertWeights,
        silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
        has_tensor_cores: Callable[[torch.Tensor], bool],
        launch: Callable[..., None],
        products: Sequence[GroupedProduct] = (),
    ) -> None:
        """``launch``: that of :mod:`swiftllm.ops.triton.ops`. ``products`` of gate and up and of down, with their
        biases, take the place of own ones; the matrices are not kept then."""
        self._router = Router(weights)
        self._num_experts, self._per_token, self._normalises = (
            weights.num_experts,
            weights.per_token,
            weights.normalises,
        )
        self._activation = weights.activation
        self._silu_and_mul, self._has_tensor_cores, self._launch = silu_and_mul, has_tensor_cores, launch
        if products:
            self._gate_up, self._down = (partial(self._multiply_sorted, product) for product in products)
        else:
            gate_up, down = weights.stacks
            self._gate_up = partial(self._multiply, gate_up, weights.gate_up_bias)
            self._down = partial(self._multiply, down, weights.down_bias)

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        (rows, hidden), experts, slots = x.shape, self._num_experts, self._per_token
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        logits = self._router.logits(x)
        num_pairs, experts_tile = rows * slots, next_power_of_2(experts)
        ids, pairs = (torch.empty(num_pairs, dtype=torch.int32, device=x.device) for _ in range(2))
        likelihoods = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
        count, has_padding = (ids, False) if num_rows is None else (num_rows, True)
        self._launch(
            choose_experts_kernel, (rows,),
            logits, count, ids, likelihoods,
            experts, slots, experts_tile, next_power_of_2(slots), self._normalises, has_padding,
            num_warps=1,
        )  # fmt: skip
        sizes = num_pairs, experts, pairs_tile(num_pairs)
        self._launch(sort_pairs_kernel, (experts + 1,), ids, pairs, starts, *sizes, num_warps=4)
        routing = num_pairs, pairs, starts
        gate_up = self._gate_up(x, *routing, takes_rows=True)
        activated = self._activate(gate_up)
        products = self._down(activated, *routing, takes_rows=False)
        grid = rows, cdiv(hidden, COLUMNS_TILE)
        sizes = slots, hidden, COLUMNS_TILE, has_padding
        self._launch(add_slots_kernel, grid, products, likelihoods, count, out, *sizes, num_warps=4)
        return out

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._activation is None:
            return self._silu_and_mul(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out, kind = gate_up.new_empty((rows, size)), self._activation
        grid = rows, cdiv(size, COLUMNS_TILE)
        sizes = kind.limit, kind.alpha, size, COLUMNS_TILE
        self._launch(clamped_swiglu_kernel, grid, gate_up, out, *sizes, num_warps=4)
        return out

    def _multiply(
        self,
        stack: torch.Tensor | QuantisedMatrix,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        num_pairs: int,
        pairs: torch.Tensor,
        starts: torch.Tensor,
        takes_rows: bool,
    ) -> torch.Tensor:
        """``[num_pairs, out]``: sorted by experts where ``x`` has rows, else in the order of the pairs."""
        experts, slots, by_dot = self._num_experts, self._per_token, self._has_tensor_cores(x)
        is_plain = isinstance(stack, torch.Tensor)
        outputs, in_features = stack.shape if is_plain else (stack.out_features, stack.in_features)
        out_features = outputs // experts
        rows_tile, columns_tile, depth = SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH
        if by_dot:
            rows_tile, columns_tile, depth = tile_rows(num_pairs, experts), DOT_COLUMNS, DOT_DEPTH
        out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
        grid = most_tiles(num_pairs, experts, rows_tile), cdiv(out_features, columns_tile)
        routing = x if bias is None else bias, pairs, starts, out, x.stride(0)
        sizes = experts, slots, in_features, out_features, takes_rows, bias is not None
        tiles = next_power_of_2(experts), rows_tile, columns_tile, by_dot
        if is_plain:
            self._launch(expert_product_kernel, grid, x, stack, *routing, *sizes, *tiles, depth, num_warps=4)
        else:
            matrix = stack.codes, stack.scales, stack.codes if stack.is_mxfp4 else stack.zeros
            kind = stack.group_size, stack.is_mxfp4
            self._launch(expert_codes_kernel, grid, x, *matrix, *routing, *sizes, *tiles, *kind, num_warps=4)
        return out

    def _multiply_sorted(
        self,
        product: GroupedProduct,
        x: torch.Tensor,
        num_pairs: int,
        pairs: torch.Tensor,
        starts: torch.Tensor,
        takes_rows: bool,
    ) -> torch.Tensor:
        """The same by a product that takes and gives what is sorted by experts."""
        if takes_rows:
            return product(x.index_select(0, pairs // self._per_token), starts)
        products = product(x, starts)
        return torch.empty_like(products).index_copy_(0, pairs.long(), products)


def tile_rows(num_pairs: int, experts: int) -> int:
    """Rows of a tile: as many as an expert has on average."""
    return next((rows for rows in DOT_ROWS if rows * experts >= num_pairs), DOT_ROWS[-1])


def pairs_tile(num_pairs: int) -> int:
    """Pairs that a program of the sorting kernel looks at together."""
    return min(PAIRS_TILE, next_power_of_2(num_pairs))


def most_tiles(num_pairs: int, experts: int, rows_tile: int) -> int:
    """Tiles that there may be at most: each expert that is chosen has one that is not full."""
    chosen = min(num_pairs, experts)
    return chosen + (num_pairs - chosen) // rows_tile
