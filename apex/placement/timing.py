"""What placements cost on this machine, timed before the model is loaded: one stage of random weights in each place,
and attention in each tier."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import Any

import torch

import pacpu
from apex.perf.model import Curve
from apex.placement.costs import Rates, StageCost, stage_costs
from swiftllm.device.device import Device
from swiftllm.kv.format import KVFormat
from swiftllm.machine import usable_cores
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.stages.loaded_weights import LoadedWeights, host_memory
from swiftllm.model.stages.placement import Place, Placement
from swiftllm.model.stages.weight_slots import CHUNK_BYTES
from swiftllm.model.weights.llama_weights import dummy_weights
from swiftllm.model.weights.sizes import stage_bytes
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.read_limit import read_limit

REPEATS = 5
ENOUGH_S = 3.0  # of repetitions: a CPU takes seconds for hundreds of rows of a large stage
SAMPLE_VOCABULARY = 16  # the sample's embedding need not be large
ATTENDED_BYTES = 256 << 20  # of K and V: more than caches hold
MOST_OF_DRAM = 0.9  # that a link takes: one as fast as DRAM would leave the CPU nothing
SAMPLE_LAYER = 0  # the stage between the sample's two layers
ATTENDING = 32  # requests, where attention is timed
BLOCK_SIZE = 16  # of their KV cache


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one stage of ``weight_bytes``: on GPU and CPU over rows, and over PCIe.

    ``read_bytes_per_s`` is the limit of the CPU's streaming reads.
    """

    weight_bytes: float
    gpu: Curve
    cpu: Curve
    stream_s: float
    read_bytes_per_s: float

    def costs(self, sizes: Sequence[float], rows: float) -> list[StageCost]:
        """Of stages of these sizes in bytes: each takes its share of the times."""
        pcie_bytes_per_s = self.weight_bytes / self.stream_s
        return stage_costs(sizes, self.weight_bytes, self.gpu(rows), self.cpu(rows), pcie_bytes_per_s)

    def rates(self, cpu_attention_bytes_per_s: float = inf) -> Rates:
        pcie_bytes_per_s = self.weight_bytes / self.stream_s
        dram_bytes_per_s = max(self.read_bytes_per_s, pcie_bytes_per_s / MOST_OF_DRAM)
        return Rates(pcie_bytes_per_s, cpu_attention_bytes_per_s, dram_bytes_per_s, CHUNK_BYTES)


def time_stage(
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    ops: Ops,
    rows: Sequence[int],
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> StageTimes:
    """Time one stage of a model in each place, with these numbers of rows, ascending, at least two."""
    sample = replace(model, num_layers=2, vocab_size=SAMPLE_VOCABULARY)
    seconds: dict[Place, list[float]] = {}
    host_ops = CpuOps(num_threads=usable_cores())
    for place in Place:
        progress(len(seconds) / len(Place), f"one stage, {place.value}")
        placement = Placement((Place.RESIDENT, place, Place.RESIDENT))
        tensors = dummy_weights(sample, device.torch_device, dtype, on_host=host_memory(placement, device))
        weights = LoadedWeights(sample, tensors, ops, placement, device, host_ops)
        if place is Place.STREAMED:
            seconds[place] = [_median_s(device, lambda weights=weights: _copy(weights))]
        else:
            llama = LlamaModel(sample, weights, ops)
            seconds[place] = [_median_s(device, _crossing(llama, device, dtype, count)) for count in rows]
    return StageTimes(
        stage_bytes(sample, dtype)[SAMPLE_LAYER + 1],
        Curve(tuple(rows), tuple(seconds[Place.RESIDENT])),
        Curve(tuple(rows), tuple(seconds[Place.CPU])),
        seconds[Place.STREAMED][0],
        read_limit(usable_cores()),
    )


def attention_bytes_per_s(
    model: ModelConfig, dtype: torch.dtype, device: Device, ops: Ops, kernel: str, threads: int, on_host: KVFormat
) -> tuple[float, float]:
    """Bytes of K and V a second that decode attention reads: on the device, and by the CPU in the host's memory, where
    their format is ``on_host``."""

    def on_cpu(*arguments: Any) -> None:
        pacpu.paged_attention(*arguments, num_threads=threads, kernel=kernel)

    exact, host = KVFormat.exact(dtype), torch.device("cpu")
    return (
        _attention_rate(model, dtype, device, device.torch_device, ops.decode_attention, exact),
        _attention_rate(model, dtype, device, host, on_cpu, on_host),
    )


@torch.inference_mode()
def _attention_rate(
    model: ModelConfig,
    dtype: torch.dtype,
    device: Device,
    where: torch.device,
    attend: Callable[..., object],
    kv_format: KVFormat,
) -> float:
    """Of :data:`ATTENDING` requests whose caches are more than the machine's caches hold."""
    block = (model.num_kv_heads, *kv_format.head_shape(BLOCK_SIZE, model.head_dim))
    block_bytes = math.prod(block) * kv_format.dtype.itemsize
    blocks_each = max(1, ATTENDED_BYTES // block_bytes // ATTENDING)
    pool = torch.zeros(ATTENDING * blocks_each, *block, dtype=kv_format.dtype, device=where)
    counts = model.num_heads, model.num_kv_heads, model.num_kv_heads  # of Q, K and V
    heads = [torch.zeros(ATTENDING, n, model.head_dim, dtype=dtype, device=where) for n in counts]
    tables = torch.arange(ATTENDING * blocks_each, dtype=torch.int32, device=where).view(ATTENDING, blocks_each)
    lens = torch.full((ATTENDING,), blocks_each * BLOCK_SIZE, dtype=torch.int32, device=where)
    out = torch.zeros_like(heads[0])
    seconds = _median_s(device, lambda: attend(*heads, pool, tables, lens, out, model.head_dim**-0.5))
    return pool.nbytes / seconds


def _copy(weights: LoadedWeights) -> None:
    """Leave the only streamed stage, which sends it again, and wait for it."""
    weights.enter(SAMPLE_LAYER + 1)
    weights.enter(SAMPLE_LAYER)


def _crossing(model: LlamaModel, device: Device, dtype: torch.dtype, rows: int) -> Callable[[], object]:
    """Of random rows: equal ones would pick equal experts, and the weights of all others would not be read."""
    config, where = model.config, {"device": device.torch_device, "dtype": dtype}
    attention_out = torch.randn(rows, config.num_heads, config.head_dim, **where)
    residual = torch.randn(rows, config.hidden_size, **where)
    rotary_rows = model.rotary_table[torch.zeros(rows, dtype=torch.int64, device=device.torch_device)]
    return lambda: model.stage(SAMPLE_LAYER, attention_out, residual, rotary_rows)


@torch.inference_mode()
def _median_s(device: Device, work: Callable[[], object]) -> float:
    """Seconds until the device has done some work, after a first time that does not count."""
    found: list[float] = []
    for _ in range(1 + REPEATS):
        start_s = time.perf_counter()
        work()
        device.compute.mark().synchronize()
        found.append(time.perf_counter() - start_s)
        if len(found) > 1 and sum(found) > ENOUGH_S:
            break
    return median(found[1:])
