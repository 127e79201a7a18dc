"""Streamed weights: every reader finds its stage's, and every wait is needed."""

from __future__ import annotations

import random

import pytest
import torch

from swiftllm.device import CudaDevice, Device, HostDevice
from swiftllm.model.placement import SLOTS
from swiftllm.model.weight_memory import WeightSlots
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_streams import DEVICE

ITERATIONS = 3
SEEDS = range(20)


def chunks_of(device: Device, count: int) -> dict[int, list[torch.Tensor]]:
    """Of ``count`` stages, every other one of the model, with different sizes, in chunks of 3 bytes."""
    result = {}
    for index in range(count):
        pieces = (torch.arange(5 + index) + 20 * index).split(3)
        result[2 * index - 1] = [device.pinned((len(piece),), torch.uint8).copy_(piece) for piece in pieces]
    return result


def read(stream: WeightSlots, stage: int) -> torch.Tensor:
    stream.enter(stage)
    return stream.slot_of(stage) + 1


def read_all(device: Device, count: int, jumps: bool = False) -> bool:
    """Whether two readers of each stage, a GPU batch and a joined CPU batch, find its weights in each iteration."""
    weights = chunks_of(device, count)
    stream = WeightSlots(device, weights)
    order = list(weights) * ITERATIONS
    if jumps:
        random.Random(count).shuffle(order)
    seen = []
    for stage in order:
        for tells in (True, False):
            seen.append((stage, read(stream, stage)))
            if tells:
                stream.launched()
        stream.enter(stage + 1)  # one that is not streamed
    if not jumps:
        sizes = [sum(map(len, chunks)) for chunks in weights.values()]
        assert stream.bytes_sent == sum(sizes[:SLOTS]) + ITERATIONS * sum(sizes)
    return all(row.tolist() == (torch.cat(weights[stage]) + 1).tolist() for stage, row in seen)


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_host_copies_then_computes(count: int, jumps: bool) -> None:
    assert read_all(HostDevice(), count, jumps)


def read_on_gpu(seed: int, count: int, ignored: str | None = None, jumps: bool = False) -> tuple[bool, set[str]]:
    with FakeCuda(seed, ignored=ignored) as cuda, torch.inference_mode():
        device = CudaDevice()
        device.torch_device = DEVICE
        return read_all(device, count, jumps), cuda.sites


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_readers_find_their_weights_whatever_the_order_of_streams(count: int, jumps: bool) -> None:
    assert all(read_on_gpu(seed, count, jumps=jumps)[0] for seed in SEEDS)


@pytest.mark.parametrize(("method", "caller"), [("enter", ""), ("_send", "WeightSlots._fill")])
def test_each_wait_is_needed(method: str, caller: str) -> None:
    """A reader waits for its copy, and a copy for the slot's last readers."""
    sites = read_on_gpu(0, 5)[1]
    (site,) = (site for site in sites if site.startswith(f"wait_event in WeightSlots.{method},") and caller in site)
    assert not all(read_on_gpu(seed, 5, site)[0] for seed in SEEDS)


def test_what_is_held_needs_no_copy_now() -> None:
    device = HostDevice()
    stream = WeightSlots(device, chunks_of(device, 4))
    assert stream.holds(0) and not stream.holds(-1)
    stream.enter(-1)
    assert stream.holds(-1) and not stream.holds(1)
    before = stream.bytes_sent
    stream.enter(-1)
    assert stream.bytes_sent == before
    stream.enter(1)  # stage 3 comes after 1, in the slot of -1
    assert stream.bytes_sent == before + 7
    with pytest.raises(ValueError, match="at least one"):
        WeightSlots(device, {})
