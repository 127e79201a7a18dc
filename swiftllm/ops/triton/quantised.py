"""Triton kernels for 4-bit weights in the layout of :mod:`swiftllm.ops.quantised_matrix`.

A program of ``quantised_linear_kernel`` computes a tile of rows and outputs over a split of the blocks of inputs. It
loads a tile of 16 words once and shifts it eight times. Each shift gives the codes of 16 neighbouring inputs, which is
the depth of a tensor core's multiplication, so no code changes its lane before it is a number. Codes become float32
without a conversion: or-ed into the mantissa of 2^23 they are that number plus the code. Sums are float32.

With few rows there are few tiles, and splits fill the GPU. Each writes its own partial sums, which
``combine_splits_kernel`` adds in a fixed order, so a result does not depend on which program ends first.

Where Triton has no tensor cores, it multiplies very few rows by multiply-adds.

``dequantise_kernel`` writes the matrix out, for many rows, and for more than very few on such a GPU: a library
multiplies then.

In the kernels, 16 is ``BLOCK_WORDS`` of that layout, 8 ``CODES_PER_WORD``, 4 ``BITS`` and 128 ``BLOCK_INPUTS``.
"""

# Ranges and tuples of Triton can be iterated only in compiled code, which their annotations do not say.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


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
