"""Park and Egger's split of a layer: their equations, on times that are easy to add up."""

from __future__ import annotations

import itertools

import pytest

from evaluation.studies.split_point import Operation, best_split, in_pieces, single_splits, split_at

OPERATIONS = [
    Operation("Q", cpu_s=2.0, host_to_device_s=4.0),
    Operation("Scores", cpu_s=16.0, host_to_device_s=8.0, gpu_s=1.0, kv_s=8.0),
    Operation("FC", cpu_s=5.0, host_to_device_s=6.0, gpu_s=0.5),
]


def test_times_of_a_split_add_up() -> None:
    split = split_at(OPERATIONS, 1, 2)
    assert (split.cpu_s, split.host_to_device_s, split.latency_s) == (7.0, 8.0, 8.0)
    assert [s.latency_s for s in single_splits(OPERATIONS)] == [18.0, 14.0, 18.0]
    assert best_split(OPERATIONS) == split


def test_decompression_begins_after_the_first_transfer() -> None:
    compressed = [Operation(name, 9.0, 1.0, decompress_s=3.0) for name in "AB"]
    assert split_at(compressed, 0, 2).decompress_s == 7.0
    assert split_at(compressed, 0, 2).latency_s == 7.0
    assert split_at(compressed, 1, 2).latency_s == 9.0


def test_batches_send_weights_once_and_kv_cache_each() -> None:
    split = split_at(OPERATIONS, 1, 3, batches=3)
    assert split.cpu_s == 6.0
    assert split.host_to_device_s == 14.0 + 2 * (1.5 + 8.0)


@pytest.mark.parametrize("batches", [1, 4])
def test_the_search_is_exhaustive(batches: int) -> None:
    pieces = in_pieces(OPERATIONS, "Scores", 8)
    ranges = itertools.combinations(range(len(pieces) + 1), 2)
    assert best_split(pieces, batches).latency_s == min(split_at(pieces, i, j, batches).latency_s for i, j in ranges)
    assert best_split(pieces, batches).latency_s <= best_split(OPERATIONS, batches).latency_s


def test_pieces_add_up_to_the_operation() -> None:
    pieces = in_pieces(OPERATIONS, "Scores", 8)
    assert [op.name for op in pieces] == ["Q", *(f"Scores.{k}" for k in range(8)), "FC"]
    for time in ("cpu_s", "host_to_device_s", "gpu_s", "kv_s"):
        assert sum(getattr(op, time) for op in pieces) == pytest.approx(sum(getattr(op, time) for op in OPERATIONS))
