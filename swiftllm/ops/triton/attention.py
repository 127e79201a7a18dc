"""Paged decode attention in Triton: split-KV flash-decoding, by one kernel for partial results and one to combine them.

Layout: one KV layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, contiguous. Rows of q, k and v are
``*_stride`` elements apart; heads and dims are contiguous. Query head h uses KV head ``h // GROUP``.

A program of the first kernel computes one KV head of one request over one split: ``split_tokens`` of its context, or of
the last ``WINDOW`` tokens of it. Splits have a fixed length, so a long request gets more programs, not longer ones.
Programs beyond a request's context return at once. If no context is longer than one split (``ONE_SPLIT``), the first
kernel writes the output itself, to the bit what the second would make of it.

The newest token is not read from the cache. The program whose split contains it takes its K and V from this step's
rows, starts its running softmax with them, and stores them. No program reads a slot that another one writes, and slots
beyond a context or before a window are never read.

``sinks`` are float32 ``[num_heads]`` or None: each is the score of one more token, whose value is zero. It is counted
where the output is written, not in each split.

Two formulations of the same sum (Flash-Decoding, with the running maximum in units of log2):

- ``decode_partials_dot_kernel`` is for 16-bit types on tensor cores. The heads of a group are padded to the 16 rows of
  an ``mma``, so K and V are read once per group, with few instructions.
- ``decode_partials_lanes_kernel`` is for float32, which must not lose bits, and for sm_75. There Triton emits no
  tensor-core code, and padded rows would make the kernel compute-bound. Each slot of a tile has its own softmax. These
  are merged after the loop, so the loop needs no exchange between warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store_newest(
    key, value, kv_layer, block_tables, row, kv_head, newest, table_stride, dims,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the newest token's key and value ``[DIM_TILE]`` to its slot."""
    block = tl.load(block_tables + row * table_stride + newest // BLOCK_SIZE).to(tl.int64)
    slot = (block * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM) + newest % BLOCK_SIZE * HEAD_DIM
    tl.store(kv_layer + slot + dims, key, mask=dims < HEAD_DIM)
    tl.store(kv_layer + slot + BLOCK_SIZE * HEAD_DIM + dims, value, mask=dims < HEAD_DIM)


@triton.jit
def _store_nothing(out, row, heads, in_group, dims, out_stride, HEAD_DIM: tl.constexpr):
    """The output of a row without tokens is zero."""
    at = out + row * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, tl.zeros(in_group.shape, tl.float32), mask=in_group)


@triton.jit
def _store_result(
    result, log2_sum, partial_out, partial_lse, sinks, row, heads, split, in_group, group, dims, out_stride, num_splits,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ONE_SPLIT: tl.constexpr,
):  # fmt: skip
    """Write a group's result of one split, ``[GROUP_TILE, DIM_TILE]``, as the output or as one of its parts."""
    if ONE_SPLIT:
        if sinks is not None:
            sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0)
            result = result / (1.0 + tl.exp2(sink * LOG2_E - log2_sum))[:, None]
        at = partial_out + row * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(at, result, mask=in_group)
    else:
        partial = (row * NUM_HEADS + heads) * num_splits + split
        tl.store(partial_out + partial[:, None] * HEAD_DIM + dims[None, :], result, mask=in_group)
        tl.store(partial_lse + partial, log2_sum, mask=group < GROUP)


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_partials_dot_kernel(
    q, k, v, kv_layer, block_tables, seq_lens, partial_out, partial_lse, sinks, scale_log2,
    q_stride, k_stride, v_stride, out_stride, table_stride, num_splits, split_tokens,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr, ONE_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid ``(num_splits, NUM_KV_HEADS, rows)``.

    ``block_tables`` int32 ``[rows, table_stride]``; ``seq_lens`` int32, including the newest token; ``scale_log2`` is
    the softmax scale times log2(e). Writes float32 ``partial_out [rows, num_heads, num_splits, HEAD_DIM]``, normalised,
    and ``partial_lse [rows, num_heads, num_splits]``, log2 of the sum of exponentials, for the splits that hold tokens.
    With ``ONE_SPLIT`` (``num_splits`` is 1) ``partial_out`` is the output, its rows ``out_stride`` elements apart, and
    there is no ``partial_lse``. Tiles are powers of two: ``GROUP_TILE >= 16``, ``TILE >= 16``.
    """
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first = split * split_tokens
    if WINDOW is not None:
        first += tl.maximum(seq_len - WINDOW, 0)
    group = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < HEAD_DIM
    heads = kv_head * GROUP + group
    in_group = (group < GROUP)[:, None] & in_head[None, :]
    if first >= seq_len:
        if ONE_SPLIT:
            _store_nothing(partial_out, row, heads, in_group, dims, out_stride, HEAD_DIM)
        return
    newest = seq_len - 1
    is_last = newest < first + split_tokens
    stop = tl.minimum(first + split_tokens, newest)

    queries = tl.load(q + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_group, other=0.0)
    key = tl.load(k + row * k_stride + kv_head * HEAD_DIM + dims, mask=in_head, other=0.0)
    value = tl.load(v + row * v_stride + kv_head * HEAD_DIM + dims, mask=in_head, other=0.0)

    score = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale_log2
    peak = tl.where(is_last, score, float("-inf"))
    total = tl.zeros([GROUP_TILE], tl.float32) + tl.where(is_last, 1.0, 0.0)
    attended = tl.zeros([GROUP_TILE, DIM_TILE], tl.float32) + tl.where(is_last, value.to(tl.float32), 0.0)[None, :]

    for tile_first in tl.range(first, stop, TILE):
        tokens = tile_first + tl.arange(0, TILE)
        visible = tokens < stop
        blocks = tl.load(block_tables + row * table_stride + tokens // BLOCK_SIZE, mask=visible, other=0)
        slots = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
        at = kv_layer + (slots + tokens % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
        in_tile = visible[:, None] & in_head[None, :]
        keys = tl.load(at, mask=in_tile, other=0.0)
        values = tl.load(at + BLOCK_SIZE * HEAD_DIM, mask=in_tile, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale_log2
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        correction = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        total = total * correction + tl.sum(weights, 1)
        attended = tl.dot(weights.to(values.dtype), values, attended * correction[:, None])
        peak = new_peak

    _store_result(
        attended / total[:, None], peak + tl.log2(total), partial_out, partial_lse, sinks,
        row, heads, split, in_group, group, dims, out_stride, num_splits,
        NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, ONE_SPLIT,
    )  # fmt: skip
    if is_last:
        _store_newest(
            key, value, kv_layer, block_tables, row, kv_head, newest, table_stride, dims,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "num_splits"])
def decode_partials_lanes_kernel(
    q, k, v, kv_layer, block_tables, seq_lens, partial_out, partial_lse, sinks, scale_log2,
    q_stride, k_stride, v_stride, out_stride, table_stride, num_splits, split_tokens,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr, ONE_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """As ``decode_partials_dot_kernel``, with float32 multiply-adds; tiles of 1 and more."""
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    first = split * split_tokens
    if WINDOW is not None:
        first += tl.maximum(seq_len - WINDOW, 0)
    group = tl.arange(0, GROUP_TILE)
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < HEAD_DIM
    heads = kv_head * GROUP + group
    in_group = (group < GROUP)[:, None] & in_head[None, :]
    if first >= seq_len:
        if ONE_SPLIT:
            _store_nothing(partial_out, row, heads, in_group, dims, out_stride, HEAD_DIM)
        return
    newest = seq_len - 1
    is_last = newest < first + split_tokens
    stop = tl.minimum(first + split_tokens, newest)

    queries = tl.load(q + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_group, other=0.0)
    queries = queries.to(tl.float32) * scale_log2
    key = tl.load(k + row * k_stride + kv_head * HEAD_DIM + dims, mask=in_head, other=0.0)
    value = tl.load(v + row * v_stride + kv_head * HEAD_DIM + dims, mask=in_head, other=0.0)

    # Axes: heads of the group, slots of the tile, dims. A slot without a token has a finite peak far below any score,
    # so differences of peaks are never NaN and its final weight is zero.
    score = tl.sum(queries * key.to(tl.float32)[None, :], 1)
    has_newest = (tl.arange(0, TILE) == 0) & is_last
    peak = tl.where(has_newest[None, :], score[:, None], -1e30)
    total = tl.zeros([GROUP_TILE, TILE], tl.float32) + tl.where(has_newest, 1.0, 0.0)[None, :]
    attended = tl.zeros([GROUP_TILE, TILE, DIM_TILE], tl.float32)
    attended += tl.where(has_newest[:, None], value.to(tl.float32)[None, :], 0.0)[None, :, :]

    for tile_first in tl.range(first, stop, TILE):
        tokens = tile_first + tl.arange(0, TILE)
        visible = tokens < stop
        blocks = tl.load(block_tables + row * table_stride + tokens // BLOCK_SIZE, mask=visible, other=0)
        slots = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * (2 * BLOCK_SIZE * HEAD_DIM)
        at = kv_layer + (slots + tokens % BLOCK_SIZE * HEAD_DIM)[None, :, None] + dims[None, None, :]
        in_tile = visible[None, :, None] & in_head[None, None, :]
        keys = tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
        values = tl.load(at + BLOCK_SIZE * HEAD_DIM, mask=in_tile, other=0.0).to(tl.float32)
        scores = tl.where(visible[None, :], tl.sum(queries[:, None, :] * keys, 2), float("-inf"))
        new_peak = tl.maximum(peak, scores)
        correction = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak)
        total = total * correction + weights
        attended = attended * correction[:, :, None] + weights[:, :, None] * values
        peak = new_peak

    group_peak = tl.max(peak, 1)
    shares = tl.exp2(peak - group_peak[:, None])
    group_total = tl.sum(total * shares, 1)
    out = tl.sum(attended * shares[:, :, None], 1) / group_total[:, None]
    _store_result(
        out, group_peak + tl.log2(group_total), partial_out, partial_lse, sinks,
        row, heads, split, in_group, group, dims, out_stride, num_splits,
        NUM_KV_HEADS * GROUP, GROUP, HEAD_DIM, ONE_SPLIT,
    )  # fmt: skip
    if is_last:
        _store_newest(
            key, value, kv_layer, block_tables, row, kv_head, newest, table_stride, dims,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def decode_combine_kernel(
    partial_out, partial_lse, seq_lens, sinks, out, out_stride, num_splits, split_tokens,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid ``(NUM_HEADS, rows)``: the mean of the splits that hold tokens, weighted by their sums of exponentials."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(seq_lens + row)
    if WINDOW is not None:
        num_tokens = tl.minimum(num_tokens, WINDOW)
    used_splits = (num_tokens + split_tokens - 1) // split_tokens
    dims = tl.arange(0, DIM_TILE)
    in_head = dims < HEAD_DIM
    base = (row * NUM_HEADS + head) * num_splits
    peak = float("-inf")
    total = 0.0
    combined = tl.zeros([DIM_TILE], tl.float32)
    for tile_first in tl.range(0, used_splits, TILE):
        splits = tile_first + tl.arange(0, TILE)
        used = splits < used_splits
        lse = tl.load(partial_lse + base + splits, mask=used, other=float("-inf"))
        at = partial_out + (base + splits)[:, None] * HEAD_DIM + dims[None, :]
        partials = tl.load(at, mask=used[:, None] & in_head[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        correction = tl.exp2(peak - new_peak)
        weights = tl.exp2(lse - new_peak)
        total = total * correction + tl.sum(weights, 0)
        combined = combined * correction + tl.sum(weights[:, None] * partials, 0)
        peak = new_peak
    if sinks is not None:
        total += tl.where(num_tokens > 0, tl.exp2(tl.load(sinks + head) * LOG2_E - peak), 0.0)
    # The split with the peak adds 1 to the total, so the maximum affects only rows without tokens, which become zero.
    tl.store(out + row * out_stride + head * HEAD_DIM + dims, combined / tl.maximum(total, 1.0), mask=in_head)
