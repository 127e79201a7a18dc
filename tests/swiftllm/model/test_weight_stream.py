"""Streamed weights: every reader finds its boundary's, and every wait is needed."""

from __future__ import annotations

import pytest
import torch

from swiftllm.device.cuda import CudaDevice
from swiftllm.device.device import Device
from swiftllm.device.host import HostDevice
from swiftllm.model.weight_stream import SLOTS, WeightStream
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_streams import DEVICE

ITERATIONS = 3
SEEDS = range(20)


def buffers(device: Device, count: int) -> dict[int, torch.Tensor]:
    """Of ``count`` boundaries, every other one of the model, with different sizes."""
    result = {}
    for index in range(count):
        result[2 * index - 1] = device.pinned((5 + index,), torch.float32)
        result[2 * index - 1].copy_(torch.arange(5 + index) + 100.0 * index)
    return result


def read_all(device: Device, count: int) -> bool:
    """Whether two readers of each boundary, a lane and a rider, find its weights in each iteration."""
    weights = buffers(device, count)
    stream = WeightStream(device, weights, chunk_bytes=12)
    seen = []
    for _ in range(ITERATIONS):
        for boundary in weights:
            seen += [(boundary, stream.need(boundary) * 1.0) for _ in range(2)]
            stream.leave(boundary)
    sizes = [buffer.nbytes for buffer in weights.values()]
    assert stream.bytes_sent == sum(sizes[:SLOTS]) + ITERATIONS * sum(sizes)
    return all(row.tolist() == weights[boundary].tolist() for boundary, row in seen)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_host_copies_then_computes(count: int) -> None:
    assert read_all(HostDevice(), count)


def read_on_gpu(seed: int, count: int, ignored: str | None = None) -> tuple[bool, set[str]]:
    with FakeCuda(seed, ignored=ignored) as cuda, torch.inference_mode():
        device = CudaDevice()
        device.torch_device = DEVICE
        return read_all(device, count), cuda.sites


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_readers_find_their_weights_whatever_the_order_of_streams(count: int) -> None:
    assert all(read_on_gpu(seed, count)[0] for seed in SEEDS)


@pytest.mark.parametrize(("method", "caller"), [("need", "read_all"), ("_send", "WeightStream.leave")])
def test_each_wait_is_needed(method: str, caller: str) -> None:
    """A reader waits for its copy, and a copy for the slot's last readers."""
    start, end = f"wait_event in WeightStream.{method},", f" from {caller}"
    (site,) = (site for site in read_on_gpu(0, 5)[1] if site.startswith(start) and end in site)
    assert not all(read_on_gpu(seed, 5, site)[0] for seed in SEEDS)


def test_a_boundary_that_is_not_in_its_slot_is_refused() -> None:
    device = HostDevice()
    stream = WeightStream(device, buffers(device, 4))
    stream.leave(-1)
    assert stream.holds(3) and not stream.holds(-1)
    with pytest.raises(RuntimeError, match="boundary -1"):
        stream.need(-1)
    with pytest.raises(ValueError, match="at least one"):
        WeightStream(device, {})
