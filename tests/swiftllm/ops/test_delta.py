"""The operations of linear attention, by torch and by pacpu: chunks and steps agree, and only the states of their slots
change."""

from __future__ import annotations

import pytest
import torch

from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import DELTA_ROWS, Ops, StateChunk, StateRows

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 8, 12
CHANNELS, WIDTH, SLOTS = 10, 4, 5
every_ops = pytest.mark.parametrize("ops", [Ops(), CpuOps(num_threads=2)], ids=["torch", "pacpu"])


def steps(slot: int) -> StateRows:
    return StateRows((), torch.tensor([slot]))


def chunk(slot: int, rows: int, *, is_first: bool) -> StateRows:
    return StateRows((StateChunk(slot, rows, is_first),), torch.empty(0, dtype=torch.int64))


def draw_rows(count: int, seed: int) -> tuple[torch.Tensor, ...]:
    """q, k, v, log_decay and beta."""
    draw = torch.Generator().manual_seed(seed)
    heads = [(KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)]
    q, k, v = (torch.randn(count, *shape, generator=draw) for shape in heads)
    log_decay, beta = torch.randn(2, count, VALUE_HEADS, generator=draw)
    return q, k, v, -log_decay.exp(), beta.sigmoid()


def pool() -> torch.Tensor:
    return torch.full((SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), torch.nan)


def by_definition(rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results and the last state from zero, in float64, written as the rule is."""
    q, k, v, log_decay, beta = (x.double() for x in rows)
    out = torch.empty_like(v)
    states = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    for row in range(len(q)):
        for head in range(VALUE_HEADS):
            of_key = head * KEY_HEADS // VALUE_HEADS
            key, query = (x[row, of_key] / (x[row, of_key].square().sum() + 1e-6).sqrt() for x in (k, q))
            state = states[head] * log_decay[row, head].exp()
            states[head] = state + torch.outer(key, beta[row, head] * (v[row, head] - key @ state))
            out[row, head] = query @ states[head] / KEY_DIM**0.5
    return out, states


@every_ops
@pytest.mark.parametrize("length", [1, 2, DELTA_ROWS - 1, DELTA_ROWS, DELTA_ROWS + 1, 3 * DELTA_ROWS + 5])
def test_chunks_and_steps_are_the_rule(ops: Ops, length: int) -> None:
    """A chunk from a slot that counts as zero; the same cut in two; the same step by step after a first chunk."""
    rows = draw_rows(length, seed=length)
    expected, last = by_definition(rows)
    cuts = {"one": [length], "two": [1, length - 1], "steps": [1] * length}
    for name, lengths in cuts.items():
        states, results, first = pool(), [], 0
        for count in filter(None, lengths):
            part = [x[first : first + count] for x in rows]
            as_step = name == "steps" and first > 0
            where = steps(2) if as_step else chunk(2, count, is_first=first == 0)
            results.append(ops.delta_rule(*part, states, where))
            first += count
        torch.testing.assert_close(torch.cat(results), expected.float(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(states[2], last.float(), rtol=2e-5, atol=2e-5)
        assert states[[0, 1, 3, 4]].isnan().all(), name


@every_ops
def test_each_row_of_a_mixed_batch_has_its_own_state(ops: Ops) -> None:
    """Two chunks, one of them padding, and three decodes, of which one is padding."""
    states = pool()
    before = {slot: draw_rows(3, seed=slot) for slot in (0, 3, 4)}
    for slot, rows in before.items():
        ops.delta_rule(*rows, states, chunk(slot, 3, is_first=True))
    new = draw_rows(4 + 2 + 3, seed=9)
    mixed = StateRows((StateChunk(0, 4, False), StateChunk(-1, 2, False)), torch.tensor([4, -1, 3]), has_padding=True)
    out = ops.delta_rule(*new, states, mixed)

    for slot, own in ((0, slice(0, 4)), (4, slice(6, 7)), (3, slice(8, 9))):
        joined = tuple(torch.cat([old, x[own]]) for old, x in zip(before[slot], new, strict=True))
        expected, last = by_definition(joined)
        torch.testing.assert_close(out[own], expected[3:].float(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(states[slot], last.float(), rtol=2e-5, atol=2e-5)
    for padding in (slice(4, 6), slice(7, 8)):
        expected, _ = by_definition(tuple(x[padding] for x in new))
        torch.testing.assert_close(out[padding], expected.float(), rtol=2e-5, atol=2e-5)
    assert states[[1, 2]].isnan().all()


@every_ops
def test_the_convolution_reads_the_last_inputs_of_its_request(ops: Ops) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(CHANNELS, WIDTH, generator=draw), torch.randn(11, CHANNELS, generator=draw)
    padded = torch.cat([torch.zeros(WIDTH - 1, CHANNELS), x])
    windows = torch.stack([padded[row : row + WIDTH] for row in range(len(x))])  # [rows, width, channels]
    expected = torch.nn.functional.silu((windows * weight.t()).sum(1))
    for lengths in ([11], [1] * 11, [2, 5, 4], [3, 1, 7]):
        inputs, results, first = torch.full((SLOTS, CHANNELS, WIDTH - 1), torch.nan), [], 0
        for count in lengths:
            as_step = count == 1 and first > 0
            where = steps(1) if as_step else chunk(1, count, is_first=first == 0)
            results.append(ops.convolve(x[first : first + count], weight, inputs, where))
            first += count
        torch.testing.assert_close(torch.cat(results), expected)
        assert torch.equal(inputs[1], x[-(WIDTH - 1) :].t()) and inputs[[0, 2, 3, 4]].isnan().all()

    inputs[1:3] = 7.0
    old = inputs.clone()
    padding = StateRows((StateChunk(-1, 2, False),), torch.tensor([-1, 2]), has_padding=True)
    out = ops.convolve(x[:4], weight, inputs, padding)
    alone = ops.convolve(x[2:3], weight, inputs, chunk(-1, 1, is_first=True))
    assert torch.equal(out[2:3], alone) and not torch.equal(inputs[2], old[2])
    assert torch.equal(inputs[[0, 1, 3, 4]].isnan(), old[[0, 1, 3, 4]].isnan()) and torch.equal(inputs[1], old[1])


def test_heads_are_normed_and_gated_in_float32() -> None:
    draw = torch.Generator().manual_seed(1)
    x, gate = torch.randn(2, 3, 4, 16, generator=draw)
    weight = torch.rand(16, generator=draw)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    expected = wide * gate.double() * gate.double().sigmoid()
    torch.testing.assert_close(Ops().norm_and_gate(x, weight, gate, 1e-5), expected.float())
    rounded = Ops().norm_and_gate(x, weight.bfloat16(), gate.bfloat16(), 1e-5)
    assert rounded.dtype is torch.bfloat16
