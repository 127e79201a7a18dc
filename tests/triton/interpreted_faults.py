"""Kernels with one fault each: ``watch_memory`` must find it, or what it says of the engine's kernels means nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.triton.memory_check import watch_memory

watch_memory()


@triton.jit
def copy_kernel(x, out, SIZE: tl.constexpr, TILE: tl.constexpr, SHIFT: tl.constexpr):
    """Sound with a SHIFT of 0."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at + SHIFT, mask=at < SIZE), mask=at < SIZE)


@triton.jit
def overlapping_kernel(x, out, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE // 2 + tl.arange(0, TILE)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def reads_back_kernel(x, TILE: tl.constexpr):
    at = x + tl.arange(0, TILE)
    tl.store(at, tl.load(at) + 1)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def turns_round_kernel(x, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    tl.store(x + TILE - 1 - lanes, tl.load(x + lanes))


@triton.jit
def collides_kernel(x, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    tl.store(x + lanes // 2, lanes)


@triton.jit
def forgets_other_kernel(x, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    lanes = tl.arange(0, TILE)
    tl.store(out, tl.sum(tl.load(x + lanes, mask=lanes < SIZE)))


@triton.jit
def splits_elements_kernel(x):
    tl.store((x.to(tl.int64) + 1).to(x.dtype), 0)


def test_a_sound_kernel_passes():
    x, out = torch.randn(10), torch.zeros(12)
    copy_kernel[(3,)](x, out[:10], 10, 4, 0)
    assert torch.equal(out[:10], x) and not out[10:].any()
    copy_kernel[(3,)](x, x, 10, 4, 0)  # in place: each lane writes what it has read itself


WIDE = torch.arange(24)


@pytest.mark.parametrize(
    "fault, kernel, programs, arguments",
    [
        ("outside x", copy_kernel, 3, (WIDE[:10], WIDE.clone(), 10, 4, 1)),
        ("outside x", copy_kernel, 3, (WIDE[2:12], WIDE.clone(), 10, 4, -1)),
        ("outside x", copy_kernel, 1, (WIDE.view(12, 2)[:, 0], WIDE.clone(), 4, 4, 0)),
        ("outside every tensor", copy_kernel, 1, (WIDE, WIDE.clone(), 4, 4, 2**40)),
        ("between two elements of x", splits_elements_kernel, 1, (WIDE.clone(),)),
        ("two programs write to one place of out", overlapping_kernel, 2, (WIDE, WIDE.clone(), 8)),
        ("reads what another writes to x and out", copy_kernel, 3, (WIDE[4:], WIDE[8:20], 12, 4, 0)),
        ("writes what another reads of x and out", copy_kernel, 3, (WIDE[4:], WIDE[:12], 12, 4, 0)),
        ("reads what it has written to x", reads_back_kernel, 1, (WIDE.clone(), 8)),
        ("another lane of its program has read of x", turns_round_kernel, 1, (WIDE.clone(), 8)),
        ("two lanes write to one place of x", collides_kernel, 1, (WIDE.clone(), 8)),
    ],
)
def test_a_fault_is_found(fault, kernel, programs, arguments):
    with pytest.raises(InterpreterError, match=f"MemoryFault.*{fault}"):
        kernel[(programs,)](*arguments)


def test_lanes_without_a_value_are_not_zero():
    total = torch.zeros(1)
    forgets_other_kernel[(1,)](torch.ones(5), total, 5, 8)
    assert total.isnan()
