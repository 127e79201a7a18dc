"""Triton kernels of linear attention: the convolution, the gated delta rule, and the norm of its heads.

Two of them continue states. A sequence is rows of one request that follow each other, and the slot of its state. Those
of chunks are in ``chunks``, int64 ``[chunks, 4]``: first row, number of rows, slot that is read and slot that is
written. Where ``chunks`` is None, sequence n is the decode in row ``first_row + n``, whose slot is ``slots[n]``. A slot
of -1 reads zero and writes nothing, and no other slot is touched. So a captured graph may hold the launches: its grid
is that of a number of rows, and rows that only fill it up have slot -1.

No two sequences of a launch have a slot in common. A program writes what it alone has read of a state. Arithmetic is in
float32; what is read and written otherwise is float16, bfloat16 or float32. There is no matrix product: a chunk of a
prompt goes through the rule row by row, as decodes do, its state in registers. So however a prompt is cut into chunks,
states and results have the same bits.
"""

# Tuples of Triton can be taken apart only in compiled code, which their annotations do not say.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sequence(chunks, slots, number, first_row):
    """First row, number of rows, slot to read and slot to write, all int64."""
    if chunks is None:
        source = tl.load(slots + number)
        target = source
        first = (first_row + number).to(tl.int64)
        count = tl.full([], 1, tl.int64)
    else:
        first = tl.load(chunks + 4 * number)
        count = tl.load(chunks + 4 * number + 1)
        source = tl.load(chunks + 4 * number + 2)
        target = tl.load(chunks + 4 * number + 3)
    return first, count, source, target


@triton.jit(do_not_specialize=["first_row"])
def convolve_kernel(
    x, weight, inputs, chunks, slots, out, first_row, x_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, ROWS_TILE: tl.constexpr, CHANNELS_TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(channel tiles, row tiles of the longest sequence, sequences)``: causal convolution of each channel, then
    SiLU, of rows ``x``; ``out [rows, CHANNELS]`` contiguous, ``weight [CHANNELS, WIDTH]``.

    ``inputs [slots, CHANNELS, WIDTH - 1]`` are the last rows of each state. Only the program of a sequence's first rows
    reads them, and it writes those after the last row. ``ROWS_TILE`` is 1 where no sequence is longer, else at least
    ``WIDTH - 1``.
    """
    number = tl.program_id(2)
    first, count, source, target = _sequence(chunks, slots, number, first_row)
    rows = tl.program_id(1) * ROWS_TILE + tl.arange(0, ROWS_TILE)  # of the sequence
    channels = tl.program_id(0) * CHANNELS_TILE + tl.arange(0, CHANNELS_TILE)
    inside = channels < CHANNELS
    is_first = tl.program_id(1) == 0
    read_channels = tl.where(is_first & (source >= 0), CHANNELS, 0)
    before = inputs + (source * CHANNELS + channels) * (WIDTH - 1)
    after = inputs + (target * CHANNELS + channels) * (WIDTH - 1)
    sequence = x + first * x_stride + channels

    total = tl.zeros([ROWS_TILE, CHANNELS_TILE], tl.float32)
    for tap in tl.static_range(WIDTH):
        factors = tl.load(weight + channels * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
        read = rows + (tap + 1 - WIDTH)
        is_row = ((read >= 0) & (read < count))[:, None] & inside[None, :]
        values = tl.load(sequence[None, :] + read.to(tl.int64)[:, None] * x_stride, mask=is_row, other=0.0)
        for place in tl.static_range(tap, WIDTH - 1):  # of the earlier inputs: row ``place - tap`` reads it here
            if place - tap < ROWS_TILE:
                old = tl.load(before + place, mask=channels < read_channels, other=0.0)
                values = tl.where((rows == place - tap)[:, None], old[None, :], values)
        total += values.to(tl.float32) * factors[None, :]
    at = out + (first + rows)[:, None] * CHANNELS + channels[None, :]
    tl.store(at, total / (1.0 + tl.exp(-total)), mask=(rows < count)[:, None] & inside[None, :])

    new_channels = tl.where(is_first & (target >= 0), CHANNELS, 0)
    for tap in tl.static_range(WIDTH - 1):
        # Places from zero on are rows. Those before are earlier inputs further on than ``tap``: none is written yet.
        place = count + (tap + 1 - WIDTH)
        kept = channels < tl.where(place < 0, read_channels, 0)
        old = tl.load(before + (place + WIDTH - 1), mask=kept, other=0.0)
        new = tl.load(sequence + place * x_stride, mask=channels < tl.where(place < 0, 0, new_channels), other=0.0)
        tl.store(after + tap, tl.where(place < 0, old, new), mask=channels < new_channels)


@triton.jit(do_not_specialize=["first_row"])
def delta_rule_kernel(
    q, k, v, log_decay, beta, states, chunks, slots, out, first_row, q_stride, k_stride, v_stride, decay_stride,
    beta_stride, query_scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(value tiles, NUM_HEADS, sequences)``, heads of values; see :meth:`swiftllm.ops.interface.Ops.delta_rule`.

    ``states`` float32 ``[slots, NUM_HEADS, KEY_DIM, VALUE_DIM]``, ``out`` float32 ``[rows, NUM_HEADS, VALUE_DIM]``,
    contiguous. ``KEY_TILE >= KEY_DIM``. Columns of a state do not mix, so each tile of them is a program's own, which
    reads it once and writes it once.
    """
    head = tl.program_id(1)
    first, count, source, target = _sequence(chunks, slots, tl.program_id(2), first_row)
    keys = tl.arange(0, KEY_TILE)
    values = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = keys < KEY_DIM, values < VALUE_DIM
    # A slot of -1 has no keys.
    is_read = (keys < tl.where(source >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    is_written = (keys < tl.where(target >= 0, KEY_DIM, 0))[:, None] & in_value[None, :]
    at = states + head * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    of_slot: tl.constexpr = NUM_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(at + source * of_slot, mask=is_read, other=0.0)
    of_key = head // GROUP * KEY_DIM + keys
    for row in tl.range(first, first + count):
        query = tl.load(q + row * q_stride + of_key, mask=in_key, other=0.0).to(tl.float32)
        key = tl.load(k + row * k_stride + of_key, mask=in_key, other=0.0).to(tl.float32)
        value = tl.load(v + row * v_stride + head * VALUE_DIM + values, mask=in_value, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * query_scale
        key *= tl.rsqrt(tl.sum(key * key) + 1e-6)
        state *= tl.exp(tl.load(log_decay + row * decay_stride + head))
        written = (value - tl.sum(key[:, None] * state, 0)) * tl.load(beta + row * beta_stride + head)
        state += key[:, None] * written[None, :]
        read = tl.sum(query[:, None] * state, 0)
        tl.store(out + (row * NUM_HEADS + head) * VALUE_DIM + values, read, mask=in_value)
    tl.store(at + target * of_slot, state, mask=is_written)


@triton.jit
def norm_and_gate_kernel(
    x, weight, gate, out, gate_stride, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(rows, head tiles)``: the norm of float32 heads ``x [rows, NUM_HEADS, HEAD_DIM]`` with ``weight
    [HEAD_DIM]``, times SiLU of ``gate``, in ``out``; x and out are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)
    dims = tl.arange(0, DIM_TILE)
    inside = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(x + row * (NUM_HEADS * HEAD_DIM) + offsets, mask=inside, other=0.0)
    scales = tl.load(weight + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse_norms = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)
    gated = values * inverse_norms[:, None] * scales[None, :] * (gates / (1.0 + tl.exp(-gates)))
    tl.store(out + row * (NUM_HEADS * HEAD_DIM) + offsets, gated, mask=inside)
