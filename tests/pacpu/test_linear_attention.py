"""Linear attention by pacpu, in every element type and instruction set, against torch in float32."""

from __future__ import annotations

import pytest
import torch

from pacpu import _pacpu, rows
from swiftllm.ops.interface import Ops, StateChunk, StateRows
from tests.pacpu.cases import BEST_ISA
from tests.pacpu.test_rows import Rows, every_dtype, every_isa, use

CHUNKS = (StateChunk(4, 11, True), StateChunk(1, 19, False), StateChunk(-1, 2, False))
DECODE_SLOTS = torch.tensor([5, -1, 0, 2])
WHERE = StateRows(CHUNKS, DECODE_SLOTS, has_padding=True)
NUM_ROWS, NUM_SLOTS = 11 + 19 + 2 + 4, 7
FIRST, WRITTEN, OF_NOBODY = 4, [0, 1, 2, 4, 5], [3, 6]


@pytest.fixture(autouse=True)
def same_draws_and_isa():
    torch.manual_seed(0)
    yield
    _pacpu.select_isa(BEST_ISA)


def pool(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """States ``[slots, *shape]``: NaN in the slots of nobody, and in the one that counts as zero."""
    states = torch.randn(NUM_SLOTS, *shape).to(dtype)
    states[[FIRST, *OF_NOBODY]] = torch.nan
    return states


def check_delta_rule(
    dtype: torch.dtype, key_heads: int, value_heads: int, key_dim: int, value_dim: int, *, num_threads: int
) -> None:
    q, k = (Rows.random(NUM_ROWS, key_heads, key_dim, dtype=dtype) for _ in range(2))
    v = Rows.random(NUM_ROWS, value_heads, value_dim, dtype=dtype)
    log_decay = Rows.random(NUM_ROWS, value_heads, dtype=torch.float32).exp().neg()
    beta = Rows.random(NUM_ROWS, value_heads, dtype=torch.float32).sigmoid()
    out, states = Rows(NUM_ROWS, value_heads, value_dim, dtype=torch.float32), pool(value_heads, key_dim, value_dim)
    expected_states = states.clone()
    expected = Ops().delta_rule(q, k, v, log_decay, beta, expected_states, WHERE)
    rows.delta_rule(q, k, v, log_decay, beta, states, CHUNKS, DECODE_SLOTS, out.view, num_threads=num_threads)
    for mine, wanted in ((out.view, expected), (states[WRITTEN], expected_states[WRITTEN])):
        assert (mine - wanted).norm() <= 1e-5 * wanted.norm()
    assert states[OF_NOBODY].isnan().all()
    out.check(expected)


def check_convolve(dtype: torch.dtype, width: int, *, channels: int = 300, num_threads: int) -> None:
    x, out = Rows.random(NUM_ROWS, channels, dtype=dtype), Rows(NUM_ROWS, channels, dtype=dtype)
    weight, inputs = torch.randn(channels, width).to(dtype), pool(channels, width - 1, dtype=dtype)
    expected_inputs = inputs.clone().float()
    expected = Ops().convolve(x.float(), weight.float(), expected_inputs, WHERE)
    rows.convolve(x, weight, inputs, CHUNKS, DECODE_SLOTS, out.view, num_threads=num_threads)
    out.check(expected)
    assert torch.equal(inputs[WRITTEN].float(), expected_inputs[WRITTEN]) and inputs[OF_NOBODY].isnan().all()


@every_isa
@every_dtype
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    "sizes", [(16, 48, 128, 128), (1, 1, 128, 128), (4, 32, 64, 40), (2, 6, 8, 12), (3, 3, 5, 33), (1, 2, 130, 1)]
)
def test_the_delta_rule_is_that_of_torch(isa, dtype, num_threads, sizes):
    """Chunks from a slot that counts as zero, from one that does not and of padding, and decodes."""
    use(isa)
    check_delta_rule(dtype, *sizes, num_threads=num_threads)


@every_isa
@every_dtype
@pytest.mark.parametrize(("channels", "num_threads"), [(1, 1), (130, 1), (300, 2), (10240, 3)])
@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_the_convolution_is_that_of_torch(isa, dtype, channels, num_threads, width):
    use(isa)
    check_convolve(dtype, width, channels=channels, num_threads=num_threads)


@every_isa
def test_a_row_is_the_same_whatever_comes_with_it(isa):
    """Bit by bit: in a chunk and as a decode, in a batch on several threads and alone."""
    use(isa)
    sizes, no_decodes = (5, 6, 24, 72), torch.empty(0, dtype=torch.int64)
    q, k = torch.randn(2, 5, 2, 24)
    v, states, inputs = torch.randn(5, 6, 72), torch.randn(sizes), torch.randn(5, 40, 3)
    log_decay, beta, x, weight = -torch.rand(5, 6), torch.rand(5, 6), torch.randn(5, 40), torch.randn(40, 4)
    slots = torch.tensor([3, 0, 4, 1, 2])
    together = states.clone(), inputs.clone(), torch.empty(5, 6, 72), torch.empty(5, 40)
    rows.delta_rule(q, k, v, log_decay, beta, together[0], [], slots, together[2], num_threads=3)
    rows.convolve(x, weight, together[1], [], slots, together[3], num_threads=3)
    alone = states.clone(), inputs.clone(), torch.empty(5, 6, 72), torch.empty(5, 40)
    for row, slot in enumerate(slots.tolist()):
        own, where = slice(row, row + 1), ([(slot, 1, False)], no_decodes)
        rows.delta_rule(*(part[own] for part in (q, k, v, log_decay, beta)), alone[0], *where, alone[2][own])
        rows.convolve(x[own], weight, alone[1], *where, alone[3][own])
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one, other)


@every_isa
def test_a_state_that_has_decayed_is_forgotten(isa):
    """A decay of zero is none of NaN, and a key of zeros has no direction."""
    use(isa)
    zeros, v, states, out = torch.zeros(1, 1, 8), torch.ones(1, 1, 4), torch.ones(1, 1, 8, 4), torch.empty(1, 1, 4)
    decay, beta, slots = torch.full((1, 1), -1e4), torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    rows.delta_rule(zeros, zeros, v, decay, beta, states, [], slots, out)
    assert not states.any() and not out.any()


Q, V, STATES, SLOTS = torch.ones(2, 1, 8), torch.ones(2, 2, 6), torch.ones(3, 2, 8, 6), torch.tensor([2])
OF_HEADS, CHUNK = torch.ones(2, 2), [(0, 1, True)]
X, WEIGHT, INPUTS = torch.ones(2, 6), torch.ones(6, 4), torch.ones(3, 6, 3)


def delta_rule(**changed):
    arguments = {"q": Q, "k": Q, "v": V, "log_decay": OF_HEADS, "beta": OF_HEADS, "states": STATES, "chunks": CHUNK}
    rows.delta_rule(**arguments | {"decode_slots": SLOTS, "out": V} | changed)


def convolve(**changed):
    arguments = {"x": X, "weight": WEIGHT, "inputs": INPUTS, "chunks": CHUNK, "decode_slots": SLOTS, "out": X}
    rows.convolve(**arguments | changed)


@pytest.mark.parametrize(
    ("call", "changed", "message"),
    [
        (delta_rule, {"k": Q.half()}, "k must have the dtype of q, float32"),
        (delta_rule, {"states": STATES.half()}, "states must have dtype float32, not float16"),
        (delta_rule, {"q": Q.repeat(1, 4, 1)}, "states must have a multiple of the 4 heads of k, not 2"),
        (delta_rule, {"states": torch.ones(3, 2, 7, 6)}, r"states must have shape .* = \[3, 2, 8, 6\]"),
        (delta_rule, {"states": torch.ones(3, 2, 6, 8).mT}, "states must be contiguous"),
        (delta_rule, {"beta": OF_HEADS[:1]}, r"beta must have shape .* = \[2, 2\]"),
        (delta_rule, {"decode_slots": SLOTS + 1}, r"decode_slots\[0\] must be below 3, not 3"),
        (delta_rule, {"decode_slots": SLOTS - 4}, r"decode_slots\[0\] must be below 3, not -2"),
        (delta_rule, {"decode_slots": torch.tensor([1, 2])}, r"decode_slots must have shape \[rows\] = \[1\]"),
        (delta_rule, {"chunks": [(3, 1, True)]}, "the slot of a chunk must be at most 2, not 3"),
        (delta_rule, {"chunks": [(0, 3, True)]}, "the rows of a chunk must be at most 2, not 3"),
        (delta_rule, {"chunks": [(0, 0, True)]}, "the rows of a chunk must be at least 1, not 0"),
        (delta_rule, {"chunks": [(0, 1)]}, "each of chunks must be a tuple of slot, rows and"),
        (convolve, {"weight": torch.ones(6, 9)}, "weight must have a width from 2 to 8, not 9"),
        (convolve, {"inputs": INPUTS[:, :, :2]}, r"inputs must have shape .* = \[3, 6, 3\]"),
        (convolve, {"out": X[:1]}, r"out must have shape \[rows, channels\] = \[2, 6\]"),
        (convolve, {"chunks": [(0, 1, "yes")]}, "whether a chunk is first cannot be 'yes'"),
    ],
)
def test_refusals(call, changed, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**changed)
