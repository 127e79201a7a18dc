"""The limit of streaming reads: one way to measure it, over more than caches hold."""

import pytest
import torch

import pacpu
from swiftllm.runtime import cpu_tuning as module
from swiftllm.runtime.cpu_tuning import read_limit, read_limit_bytes


@pytest.fixture
def passes(monkeypatch):
    """What was read, with made-up rates of 1, 3, 2, 1, 3, ... bytes/s."""
    seen = []

    def read(array: torch.Tensor, *, num_threads: int) -> float:
        seen.append((array, num_threads))
        return (1.0, 3.0, 2.0)[(len(seen) - 1) % 3]

    monkeypatch.setattr(pacpu, "read_bandwidth", read)
    monkeypatch.setattr(module, "MIN_BYTES", 1 << 20)
    monkeypatch.setattr(module, "last_level_cache_bytes", lambda: 0)
    return seen


def test_the_best_of_several_passes_counts(passes):
    assert read_limit(1, torch.ones(10)) == 3.0
    assert len(passes) > 3


def test_no_cache_holds_what_is_read(passes, monkeypatch):
    monkeypatch.setattr(module, "last_level_cache_bytes", lambda: 3 << 20)
    read_limit(2)
    assert all(array.nbytes == read_limit_bytes() >= 9 << 20 and threads == 2 for array, threads in passes)


def test_the_memory_read_has_been_written(passes):
    """Pages that nobody has written are all the same page of zeros, which a cache holds."""
    read_limit(2)
    assert all(bool((array != 0).all()) for array, _ in passes)


def test_memory_that_is_short_is_left_to_others(passes, monkeypatch):
    monkeypatch.setattr(module, "available_host_bytes", lambda: 1 << 20)
    read_limit(1)
    assert {array.nbytes for array, _ in passes} == {1 << 18}
