"""The placement of an engine's weights on this machine, by times that are measured before the model is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

import pacpu
from apex.perf.progress import progress_bar
from apex.placement.costs import BoundaryCost, CopyEffect
from apex.placement.search import Choice, choose_exactly
from swiftllm.config import EngineConfig
from swiftllm.device import open_device
from swiftllm.device.device import Device
from swiftllm.kv.sizing import HOST_HEADROOM_BYTES, boundary_bytes, weight_bytes
from swiftllm.machine import GIB, available_host_bytes, usable_cores
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placed_weights import PlacedWeights
from swiftllm.model.placement import Place, Placement
from swiftllm.model.weight_stream import CHUNK_BYTES
from swiftllm.model.weights import dummy_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.ops.select import select_ops
from swiftllm.runtime.dtype_and_kernel import resolve_dtype, resolve_kernel

REPEATS = 5
SAMPLE_VOCABULARY = 16  # the sample's embedding need not be large
READ_BYTES = 256 << 20  # more than caches hold
MOST_OF_DRAM = 0.9  # that a link takes: one as fast as DRAM would leave the CPU nothing
SAMPLE_LAYER = 0  # the boundary between the sample's two layers


def place_weights(config: EngineConfig) -> Choice | None:
    """Where the weights of an engine should be, for iterations of ``max_num_seqs`` rows; None: all on the device.

    Raises:
        ValueError: there is no GPU, or the weights fit neither in the given memory nor in the host's.
    """
    if config.weights_gpu_memory is None:
        return None
    device, model = open_device(config.device), ModelConfig.from_folder(config.model)
    if device.torch_device.type == "cpu":
        raise ValueError(
            "weights_gpu_memory has no effect without a GPU, since all weights are in host memory: drop it"
        )
    dtype = resolve_dtype(config, device.torch_device)
    sizes = boundary_bytes(model, dtype)
    others = weight_bytes(model, dtype) - sum(sizes)
    gpu_bytes = config.weights_gpu_memory * GIB - others
    if gpu_bytes >= sum(sizes):
        return None
    if gpu_bytes < 0:
        raise ValueError(
            f"weights_gpu_memory={config.weights_gpu_memory:g} GiB is less than embedding, vocabulary and norms, which "
            f"stay on the GPU: give at least {others / GIB:.2f}, or take a smaller model"
        )
    off_gpu_bytes, host_bytes = sum(sizes) - gpu_bytes, available_host_bytes() - HOST_HEADROOM_BYTES
    if off_gpu_bytes > host_bytes:
        remedy = "take 4-bit weights" if model.quantisation is None else "take a smaller model"
        raise ValueError(
            f"{off_gpu_bytes / GIB:.1f} GiB of weights exceed weights_gpu_memory and the host has "
            f"{max(0, host_bytes) / GIB:.1f} GiB: {remedy}, a host with more memory, or a GPU that holds them"
        )
    ops = select_ops(device.torch_device, dtype, resolve_kernel(config, dtype))
    with progress_bar("measuring where weights belong") as progress:
        costs, effect = measure_costs(model, dtype, device, ops, sizes, config.max_num_seqs, progress)
    return choose_exactly(costs, gpu_bytes, effect=effect)


def measure_costs(
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    ops: Ops,
    sizes: list[int],
    rows: int,
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> tuple[list[BoundaryCost], CopyEffect]:
    """Costs of the boundaries, of which ``sizes`` are the bytes, and what copies do to the CPU.

    One boundary of random weights is measured in each place; those of other sizes take their share of its times.
    """
    sample = replace(model, num_layers=2, vocab_size=SAMPLE_VOCABULARY)
    seconds: dict[Place, float] = {}
    host_ops = CpuOps(num_threads=usable_cores())
    for place in Place:
        progress(len(seconds) / len(Place), f"one boundary, {place.value}")
        placement = Placement((Place.RESIDENT, place, Place.RESIDENT))
        weights = PlacedWeights(sample, dummy_weights(sample, "cpu", dtype), ops, device, placement, host_ops)
        if place is Place.STREAMED:
            seconds[place] = _median_s(device, lambda weights=weights: _copy(weights))
        else:
            seconds[place] = _median_s(device, _crossing(LlamaModel(sample, weights, ops), device, dtype, rows))
    size = boundary_bytes(sample, dtype)[SAMPLE_LAYER + 1]
    costs = [
        BoundaryCost(
            own,
            seconds[Place.RESIDENT] * own / size,
            seconds[Place.CPU] * own / size,
            seconds[Place.STREAMED] * own / size,
        )
        for own in sizes
    ]
    link_bytes_per_s = size / seconds[Place.STREAMED]
    beyond_caches = torch.zeros(READ_BYTES, dtype=torch.uint8)
    read_bytes_per_s = pacpu.read_bandwidth(beyond_caches, num_threads=usable_cores())
    share = min(MOST_OF_DRAM, link_bytes_per_s / read_bytes_per_s)
    return costs, CopyEffect(share, CHUNK_BYTES / link_bytes_per_s / 2)


def _copy(weights: PlacedWeights) -> None:
    """Leave the only streamed boundary, which sends it again, and wait for it."""
    weights.enter(SAMPLE_LAYER + 1)
    weights.enter(SAMPLE_LAYER)


def _crossing(model: LlamaModel, device: Device, dtype: torch.dtype, rows: int) -> Callable[[], object]:
    config, where = model.config, {"device": device.torch_device, "dtype": dtype}
    attention_out = torch.zeros(rows, config.num_heads, config.head_dim, **where)
    residual = torch.zeros(rows, config.hidden_size, **where)
    rotary_rows = model.rotary_table[torch.zeros(rows, dtype=torch.int64, device=device.torch_device)]
    return lambda: model.cross(SAMPLE_LAYER, attention_out, residual, rotary_rows)


@torch.inference_mode()
def _median_s(device: Device, work: Callable[[], object]) -> float:
    """Seconds until the device has done some work, after a first time that does not count."""
    found = []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        work()
        device.compute.mark().synchronize()
        found.append(time.perf_counter() - start_s)
    return median(found[1:])
