"""Zeros: all of an array and nothing beside it, by several threads, each of which gets its pages."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import pacpu
from swiftllm.kv.tensors import host_tensor

PIECE = 2 << 20


@pytest.mark.parametrize("num_threads", [1, 2, 5, 300])
@pytest.mark.parametrize("begin", [0, 3, PIECE - 1])
@pytest.mark.parametrize("size", [0, 1, 1001, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_all_of_an_array_and_nothing_beside_it(num_threads: int, begin: int, size: int) -> None:
    memory = host_tensor((begin + size + 100,), torch.uint8).fill_(7)
    pacpu.zero(memory[begin : begin + size], num_threads=num_threads)
    assert not memory[begin : begin + size].any()
    assert (memory[:begin] == 7).all() and (memory[begin + size :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_arrays_of_any_dtype_and_shape(dtype: torch.dtype) -> None:
    layers = torch.ones(2, 300, 4, 2, 16, 8, dtype=dtype)
    pacpu.zero(layers[0, :200], num_threads=2)
    assert not layers[0, :200].any() and layers[0, 200:].all() and layers[1].all()


@pytest.mark.parametrize(
    ("array", "num_threads", "message"),
    [
        (np.ones((4, 4)).T, 1, "contiguous"),
        (np.ones((4, 4))[::2], 1, "rows exactly 4"),
        ([1.0], 1, "DLPack"),
        (np.ones(4), 0, "num_threads must be at least 1, not 0"),
    ],
)
def test_what_is_refused(array, num_threads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pacpu.zero(array, num_threads=num_threads)
    assert np.all(np.asarray(array) == 1.0)


def page_faults() -> dict[str, int]:
    """Pages that each thread of this process was the first to touch."""
    faults = {}
    for thread in Path("/proc/self/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        faults[thread.name] = int(fields[7])
    return faults


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: pacpu has no helper")
def test_several_threads_are_the_first_to_touch_a_large_array() -> None:
    """On a busy machine a helper may come too late to one array; to some of many it does not."""

    def touching_threads() -> int:
        memory = host_tensor((32 * PIECE,), torch.uint8)
        before = page_faults()
        pacpu.zero(memory, num_threads=2)
        return sum(count >= before.get(thread, 0) + 4 for thread, count in page_faults().items())

    assert any(touching_threads() >= 2 for _ in range(200))
