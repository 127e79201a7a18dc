"""The kernels of linear attention in Triton's interpreter: states are right, and no others are read or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from swiftllm.ops.interface import Ops, StateChunk, StateRows
from swiftllm.ops.triton import ops as triton_ops
from swiftllm.ops.triton.ops import TritonOps
from tests.reference.tolerances import assert_close
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

HOST = torch.device("cpu")
OPS = TritonOps(HOST, capability=75, num_multiprocessors=16)  # which has no other kernels than newer GPUs
SLOTS = 9
SHAPES = ((2, 4, 12, 10), (1, 1, 8, 40))  # key heads, value heads, and their dims: several tiles of each kind
WIDTHS = (4, 3, 2)
SHORT = StateChunk(0, 1, True), StateChunk(-1, 2, False), StateChunk(7, 2, False)
DECODES = (5, -1, 2, -1)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NaN wherever memory is not initialised."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **how: empty(*args, **how).fill_(torch.nan))
    yield


def state_rows(chunks: Sequence[StateChunk], decodes: Sequence[int]) -> StateRows:
    return StateRows.of(chunks, decodes, lambda tensor: tensor)


def read_slots(rows: StateRows) -> list[int]:
    of_chunks = [chunk.slot for chunk in rows.chunks if chunk.slot >= 0 and not chunk.is_first]
    return of_chunks + [slot for slot in rows.decode_slots.tolist() if slot >= 0]


def strided(draw: torch.Generator, rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows that lie apart, NaN between them."""
    size = torch.Size(shape).numel()
    wide = torch.full((rows, size + 24), torch.nan, dtype=dtype)
    wide[:, 8 : 8 + size] = torch.randn(rows, size, generator=draw)
    return wide[:, 8 : 8 + size].unflatten(1, shape)


def pool(draw: torch.Generator, rows: StateRows, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States of the slots that are read; all others are NaN."""
    states = torch.full((SLOTS, *shape), torch.nan, dtype=dtype)
    for slot in read_slots(rows):
        states[slot] = torch.randn(shape, generator=draw)
    return states


def draw_delta(draw: torch.Generator, count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v, log_decay and beta."""
    key_heads, heads, key_dim, value_dim = shape
    q, k = (strided(draw, count, key_heads, key_dim, dtype=dtype) for _ in "qk")
    v = strided(draw, count, heads, value_dim, dtype=dtype)
    return q, k, v, -strided(draw, count, heads).exp(), strided(draw, count, heads).sigmoid()


def check_states(states: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Those that nobody reads and nobody writes are still NaN."""
    written = expected.isfinite().flatten(1).all(1)
    assert torch.equal(states.isfinite().flatten(1).all(1), written) and states[~written].isnan().all()
    assert_close(states[written], expected[written], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolutions_are_those_of_the_reference(dtype) -> None:
    """Chunks longer and shorter than the convolution and than a tile, from a state and from zero, beside decodes and
    padding."""
    rows, channels = state_rows([StateChunk(3, 19, False), *SHORT], DECODES), 130
    for width in WIDTHS if dtype is torch.float32 else WIDTHS[:1]:
        draw = torch.Generator().manual_seed(width)
        x = strided(draw, rows.first_decode + len(DECODES), channels, dtype=dtype)
        weight = torch.randn(channels, width, generator=draw).to(dtype)
        inputs = pool(draw, rows, channels, width - 1, dtype=dtype)
        expected = inputs.to(torch.float32, copy=True)
        out = OPS.convolve(x, weight, inputs, rows)
        assert out.dtype is dtype
        assert_close(out, Ops().convolve(x.float(), weight.float(), expected, rows), dtype)
        check_states(inputs, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_and_results_are_those_of_the_reference(dtype) -> None:
    rows = state_rows([StateChunk(3, 5, False), *SHORT], DECODES)
    for shape in SHAPES if dtype is torch.float32 else SHAPES[:1]:
        draw = torch.Generator().manual_seed(shape[0])
        of_rows = draw_delta(draw, rows.first_decode + len(DECODES), shape, dtype)
        states = pool(draw, rows, *shape[1:])
        expected = states.clone()
        out = OPS.delta_rule(*of_rows, states, rows)
        assert_close(out, Ops().delta_rule(*(x.float() for x in of_rows), expected, rows), torch.float32)
        check_states(states, expected, torch.float32)


def test_however_a_prompt_is_cut_states_have_the_same_bits() -> None:
    """Also of equal keys, whose products with each other are as large as they can be."""
    shape, channels, count = (1, 1, 8, 8), 20, 18
    draw = torch.Generator().manual_seed(5)
    of_rows = draw_delta(draw, count, shape, torch.float16)
    of_rows[1][3:15] = of_rows[1][3]
    x, weight = torch.randn(count, channels, generator=draw).half(), torch.randn(channels, 4, generator=draw).half()

    def run(lengths: Sequence[int]) -> list[torch.Tensor]:
        nothing = state_rows([], [])
        states, inputs = pool(draw, nothing, *shape[1:]), pool(draw, nothing, channels, 3, dtype=torch.float16)
        results, first = [], 0
        for length in lengths:
            own, rows = slice(first, first + length), state_rows([StateChunk(4, length, first == 0)], [])
            of_chunk = [part[own] for part in of_rows]
            results.append((OPS.delta_rule(*of_chunk, states, rows), OPS.convolve(x[own], weight, inputs, rows)))
            first += length
        return [*map(torch.cat, zip(*results, strict=True)), states[4], inputs[4]]

    whole = run([count])
    assert all(part.isfinite().all() for part in whole)
    for lengths in ([1, 2, 15], [17, 1]):
        for part, right in zip(run(lengths), whole, strict=True):
            assert torch.equal(part, right), lengths


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_are_normed_and_gated(dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for heads, head_dim in ((10, 16), (3, 24)):
        x, gate = torch.randn(4, heads, head_dim, generator=draw), strided(draw, 4, heads, head_dim, dtype=dtype)
        weight = torch.rand(head_dim, generator=draw).to(dtype)
        gate[0, 0, 0] = -200.0  # where a careless exponential overflows
        expected = Ops().norm_and_gate(x, weight.float(), gate.float(), 1e-5)
        out = OPS.norm_and_gate(x, weight, gate, 1e-5)
        assert out.dtype is dtype
        assert_close(out, expected, dtype)


def test_nothing_is_launched_for_rows_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(triton_ops, "launch", lambda *about, **how: launched.append(about))
    draw, shape = torch.Generator().manual_seed(0), SHAPES[0]
    for chunks, decodes, launches in ((SHORT, DECODES, 2), ([], [1], 1), (SHORT[:1], [], 1), ([], [], 0)):
        rows = state_rows(chunks, decodes)
        OPS.delta_rule(*draw_delta(draw, 9, shape, torch.float32), pool(draw, rows, *shape[1:]), rows)
        assert len(launched) == launches
        launched.clear()
