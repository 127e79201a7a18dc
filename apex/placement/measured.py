"""The placement of an engine's weights on this machine, by times that are measured before the model is loaded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import median
from typing import Any

import torch

import pacpu
from apex.perf.model import Curve
from apex.placement.search import (
    MOST_ROWS,
    ExpertsCost,
    PlacementProblem,
    Rates,
    StageCost,
    TimedPlacement,
    UniformLoad,
    best_budget,
    estimate_budget,
    most_cpu_rows,
    refined_placement,
    stage_costs,
)
from apex.progress import progress_bar
from swiftllm.config import EngineConfig
from swiftllm.device import CONTEXT_BYTES, Device, open_device
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import KVFormat, cpu_format
from swiftllm.machine import GIB, available_host_bytes, gib_rounded_up, usable_cores
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Place, Placement, all_resident
from swiftllm.model.stages import LoadedWeights, host_memory
from swiftllm.model.weight_memory import CHUNK_BYTES
from swiftllm.model.weights import dummy_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops, StateChunk, StateRows
from swiftllm.runtime.cpu_tuning import read_limit
from swiftllm.runtime.execution_context import resolve_dtype, resolve_kernel, resolve_residual_dtype, select_ops
from swiftllm.runtime.memory import (
    CPU_TIER_SHARE,
    HOST_HEADROOM_BYTES,
    SNAPSHOT_SHARE,
    embedding_bytes,
    expert_bytes,
    stage_bytes,
)
from swiftllm.runtime.memory_estimate import estimate_memory

# -- the memory there is -----------------------------------------------------------------------------------------------
# The memory of GPU and host that an engine has for weights and KV cache, before the model is loaded.


class EngineMemory:
    """What fits where: a part of :class:`apex.placement.search.CostModel`. All sizes are bytes.

    Attributes:
        usable_bytes: GPU memory for weights and KV cache.
        host_bytes: host memory for both, beside the embedding.
        embedding_bytes: of an embedding that leaves the GPU before other weights do.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free_bytes: int) -> None:
        """``free_bytes``: the GPU's free memory."""
        self.config, self.model, self.dtype = config, model, dtype
        card_bytes = free_bytes + CONTEXT_BYTES  # the context has taken its memory already
        host_bytes = available_host_bytes()
        sizes = {"device_bytes": card_bytes, "host_bytes": host_bytes}
        residual_dtype = resolve_residual_dtype(config.model, dtype)
        budget = estimate_memory(config, model, dtype, residual_dtype=residual_dtype, **sizes)
        self.stage_bytes, self.expert_bytes = stage_bytes(model, dtype), expert_bytes(model, dtype)
        assert budget.weights is not None, "an estimate has them"
        self.weight_bytes, self.other_bytes = budget.weight_bytes, budget.weights.staying
        self.embedding_bytes = embedding_bytes(model, dtype)
        self.block_bytes = budget.bytes_per_block
        self.cpu_block_bytes = budget.host_block_bytes
        self.layer_groups = LayerGroups.of(model, config.block_size)
        self.kv_bytes_per_token = budget.bytes_per_block // config.block_size
        self.cpu_kv_bytes_per_token = budget.host_block_bytes // config.block_size
        self.usable_bytes = budget.usable_bytes
        self.host_bytes = host_bytes - HOST_HEADROOM_BYTES - self.embedding_bytes
        has_snapshots = model.linear is not None and config.enable_prefix_caching
        self._blocks_share = 1.0 - SNAPSHOT_SHARE if has_snapshots else 1.0  # of the CPU tier's bytes

    def given_bytes(self, memory_gib: float) -> float:
        """Bytes for resident stages and slots, and an embedding beside all of them, where weights may use
        ``memory_gib``."""
        gpu_bytes = memory_gib * GIB - self.other_bytes
        if gpu_bytes < 0:
            raise ValueError(
                f"weights_gpu_memory={memory_gib:g} GiB is less than vocabulary and norms, which stay on the GPU: "
                f"give at least {gib_rounded_up(self.other_bytes)}, or take a smaller model"
            )
        self._left_on_host(sum(self.stage_bytes) - gpu_bytes)
        return gpu_bytes

    def check_tiers(self) -> None:
        """Check that GPU and host together hold the weights."""
        gpu_bytes, host_bytes = max(0, self.usable_bytes), max(0, self.host_bytes)
        if self.other_bytes > gpu_bytes or self.weight_bytes - self.embedding_bytes > gpu_bytes + host_bytes:
            raise ValueError(
                f"the weights take {self.weight_bytes / GIB:.1f} GiB, of which {self.other_bytes / GIB:.1f} stay on "
                f"the GPU: it has {gpu_bytes / GIB:.1f} GiB for them and the host {host_bytes / GIB:.1f}: "
                f"{self._remedy}"
            )

    def holds_all(self, workload: UniformLoad) -> bool:
        """Whether the GPU has room for all weights and the KV cache of a workload: the blocks asked for, else all
        requests at once at their full lengths."""
        blocks = self.config.num_gpu_blocks
        if blocks is None:
            each = self.layer_groups.blocks_for(int(workload.input_len + workload.output_len))
            blocks = workload.num_requests * each
        return self.usable_bytes - self.weight_bytes >= blocks * self.block_bytes

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        """That of the blocks asked for, else what is left; see :class:`apex.placement.search.CostModel`."""
        asked = (self.config.num_gpu_blocks or 0) * self.block_bytes
        left = self.usable_bytes - weight_bytes
        if left < asked:
            raise ValueError(
                f"{weight_bytes / GIB:.2f} GiB of weights leave {max(0.0, left) / GIB:.2f} GiB of GPU memory, and the "
                f"KV blocks asked for take {asked / GIB:.2f}: lower num_gpu_blocks"
            )
        return left if self.config.num_gpu_blocks is None else asked

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        """That of the blocks asked for, else a share of what is left; snapshots of states lie beside them."""
        asked = (self.config.num_cpu_blocks or 0) * self.cpu_block_bytes
        left = self._left_on_host(off_gpu_bytes, asked / self._blocks_share)
        return left * CPU_TIER_SHARE * self._blocks_share if self.config.num_cpu_blocks is None else asked

    def _left_on_host(self, off_gpu_bytes: float, kv_bytes: float = 0) -> float:
        """Host memory beside so many bytes of weights, which must hold ``kv_bytes``."""
        left = self.host_bytes - off_gpu_bytes
        if left < kv_bytes:
            blocks = f" and {kv_bytes / GIB:.1f} GiB of KV blocks" if kv_bytes else ""
            raise ValueError(
                f"{off_gpu_bytes / GIB:.1f} GiB of weights{blocks} would be the host's, which has "
                f"{max(0, self.host_bytes) / GIB:.1f} GiB: {self._remedy}"
            )
        return left

    @property
    def _remedy(self) -> str:
        remedy = "take 4-bit weights" if self.model.quantisation is None else "take a smaller model"
        return f"{remedy}, a host with more memory, or a GPU that holds them"


# -- times of one stage ------------------------------------------------------------------------------------------------
# What placements cost on this machine, timed before the model is loaded: one stage of random weights in each place, and
# attention in each tier.

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

    ``read_bytes_per_s`` is the limit of the CPU's streaming reads. ``experts``: where the CPU computes the stage's
    experts of ``expert_bytes``, and the GPU all else; None: it has none.
    """

    weight_bytes: float
    gpu: Curve
    cpu: Curve
    stream_s: float
    read_bytes_per_s: float
    experts: Curve | None = None
    expert_bytes: float = 0.0

    def costs(self, sizes: Sequence[float], rows: float, expert_sizes: Sequence[float] = ()) -> list[StageCost]:
        """Of stages of these sizes in bytes: each takes its share of the times. ``expert_sizes``: of their experts."""
        pcie_bytes_per_s = self.weight_bytes / self.stream_s
        costs = stage_costs(sizes, self.weight_bytes, self.gpu(rows), self.cpu(rows), pcie_bytes_per_s)
        if self.experts is None:
            return costs
        whole_s = self.experts(rows)
        rest_s = min(whole_s, self.gpu(rows) * (1 - self.expert_bytes / self.weight_bytes))  # by bytes
        times = whole_s - rest_s, self._experts_copied_s, rest_s, rows > self.most_cpu_rows
        return [
            replace(cost, experts=ExpertsCost(size, *times)) if size else cost
            for cost, size in zip(costs, expert_sizes, strict=True)
        ]

    @property
    def most_cpu_rows(self) -> int:
        """See :func:`apex.placement.search.most_cpu_rows`."""
        if self.experts is None:
            return 0
        return most_cpu_rows(self.experts, lambda rows: max(self._experts_copied_s, self.gpu(rows)))

    @property
    def _experts_copied_s(self) -> float:
        return self.stream_s * self.expert_bytes / self.weight_bytes

    def rates(self, cpu_attention_bytes_per_s: float = inf) -> Rates:
        pcie_bytes_per_s = self.weight_bytes / self.stream_s
        dram_bytes_per_s = max(self.read_bytes_per_s, pcie_bytes_per_s / MOST_OF_DRAM)
        return Rates(pcie_bytes_per_s, cpu_attention_bytes_per_s, dram_bytes_per_s, CHUNK_BYTES)


def time_stage(
    model: ModelConfig,
    dtype: torch.dtype,
    residual_dtype: torch.dtype,
    device: Device,
    ops: Ops,
    rows: Sequence[int],
    progress: Callable[[float, str], None] = lambda done, what: None,
    most_decodes: int | None = None,
) -> StageTimes:
    """Time one stage of a model in each place, with these numbers of rows, ascending, at least two.

    ``most_decodes``: in models with linear attention, so many rows have states of their own, and those beyond are of
    one prompt. By default all have.
    """
    sample = replace(model, num_layers=2, vocab_size=SAMPLE_VOCABULARY)
    curves: dict[Place, Curve] = {}
    stream_s = 0.0
    host_ops = CpuOps(num_threads=usable_cores())
    has_experts = model.experts is not None and model.linear is None  # those of layers between have no place yet
    places = [place for place in Place if place is not Place.EXPERTS or has_experts]
    for number, place in enumerate(places):
        progress(number / len(places), f"one stage, {place.value}")
        placement = Placement((Place.RESIDENT, place, Place.RESIDENT), most_cpu_rows=MOST_ROWS)
        llama = weights = None  # the sample of the place before goes first
        tensors = dummy_weights(sample, device.torch_device, dtype, on_host=host_memory(placement, device))
        weights = LoadedWeights(sample, tensors, ops, placement, device, host_ops)
        if place is Place.STREAMED:
            stream_s = _median_s(device, partial(_copy, weights))
        else:
            num_slots = max(rows) if most_decodes is None else most_decodes + 1
            llama = LlamaModel(sample, weights, ops, residual_dtype=residual_dtype, num_slots=num_slots)
            if llama.states is not None:
                llama.states.draw()
            sizes = with_powers_of_two(rows) if place is Place.EXPERTS else rows
            of_rows = [_median_s(device, _crossing(llama, device, dtype, count)) for count in sizes]
            curves[place] = Curve(tuple(sizes), tuple(of_rows))
    return StageTimes(
        stage_bytes(sample, dtype)[SAMPLE_LAYER + 1],
        curves[Place.RESIDENT],
        curves[Place.CPU],
        stream_s,
        read_limit(usable_cores()),
        curves.get(Place.EXPERTS),
        expert_bytes(sample, dtype)[SAMPLE_LAYER + 1],
    )


def with_powers_of_two(rows: Sequence[int]) -> list[int]:
    """And all powers of two below the largest: the first rows touch most experts, so that time is not straight."""
    return sorted({*rows, *(1 << power for power in range(max(rows).bit_length()))})


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
    config, where = model.config, device.torch_device
    attention_out = torch.randn(rows, config.num_heads, config.head_dim, dtype=dtype, device=where)
    residual = torch.randn(rows, config.hidden_size, dtype=model.residual_dtype, device=where)
    rotary_rows = model.rotary_table[torch.zeros(rows, dtype=torch.int64, device=where)]
    states = None
    if model.states is not None:
        last = model.states.recurrent.shape[1] - 1
        chunks = [StateChunk(last, rows - last, is_first=False)] if rows > last + 1 else []
        states = StateRows.of(chunks, range(last if chunks else rows), lambda tensor: tensor.to(where))
    return lambda: model.stage(SAMPLE_LAYER, attention_out, residual, rotary_rows, state_rows=states)


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


# -- the placement -----------------------------------------------------------------------------------------------------

ASSUMED_INPUT_LEN, ASSUMED_OUTPUT_LEN = 1000, 200
"""Of a request where lengths are not known: as `apex simulate` has them by default."""


@dataclass(frozen=True)
class WeightsPlan:
    """Where the weights of an engine are, and why. ``timed`` None: all on the device; a plan may say nothing."""

    timed: TimedPlacement | None = None
    reason: str = ""

    @property
    def placement(self) -> Placement | None:
        return None if self.timed is None else self.timed.placement

    @property
    def stream_s(self) -> float:
        """Seconds of an iteration that the link copies weights."""
        return 0.0 if self.timed is None else self.timed.stream_s

    def describe(self) -> str:
        parts = (self.timed and self.timed.describe(), self.reason)
        return "; ".join(part for part in parts if part)


def place_weights(config: EngineConfig, workload: UniformLoad | None = None, *, offloads: bool = True) -> WeightsPlan:
    """Where the weights of an engine should be.

    Given memory is filled for iterations of ``max_num_seqs`` rows. ``auto`` takes the memory with the highest predicted
    rate for ``workload``, by default :func:`assumed_workload`. ``offloads``: whether the system decodes on the CPU.
    """
    if config.weights_gpu_memory is None:
        return WeightsPlan()
    device, model = open_device(config.device), ModelConfig.from_folder(config.model)
    if device.torch_device.type == "cpu":
        raise ValueError(
            "weights_gpu_memory has no effect without a GPU, since all weights are in host memory: drop it"
        )
    dtype = resolve_dtype(config, device.torch_device)
    residual_dtype = resolve_residual_dtype(config.model, dtype)
    memory = EngineMemory(config, model, dtype, device.free_bytes())
    kernel = resolve_kernel(config, dtype)
    ops = select_ops(device.torch_device, dtype, kernel)
    if config.weights_gpu_memory != "auto":
        gpu_bytes = memory.given_bytes(config.weights_gpu_memory)
        if gpu_bytes >= sum(memory.stage_bytes) + memory.embedding_bytes:
            return WeightsPlan()
        rows = sorted({1, max(2, config.max_num_seqs)})
        if model.experts is not None:  # beyond some rows they are copied
            rows = sorted({*rows, config.max_num_batched_tokens + config.max_num_seqs})
        with progress_bar("measuring where weights belong") as progress:
            times = time_stage(model, dtype, residual_dtype, device, ops, rows, progress, config.max_num_seqs)
        costs = times.costs(memory.stage_bytes, config.max_num_seqs, memory.expert_bytes)
        about = {"effect": times.rates().copy_effect, "most_cpu_rows": times.most_cpu_rows}
        timed = refined_placement(PlacementProblem(costs, gpu_bytes, **about))
        return WeightsPlan(timed.with_embedding(memory.embedding_bytes))
    workload = workload or assumed_workload(config, model)
    at_once = replace(workload, num_requests=min(config.max_num_seqs, workload.num_requests))
    if memory.holds_all(at_once):
        return WeightsPlan(reason=f"auto: all on the GPU, which has room for {workload.describe()} beside them")
    memory.check_tiers()
    rows = sorted({1, max(2, config.max_num_seqs), config.max_num_batched_tokens + config.max_num_seqs})
    with progress_bar("measuring where weights belong") as progress:
        times = time_stage(model, dtype, residual_dtype, device, ops, rows, progress, config.max_num_seqs)
        progress(1.0, "attention")
        threads = config.cpu_threads or usable_cores()
        rates = attention_bytes_per_s(
            model, dtype, device, ops, kernel, threads, cpu_format(config.cpu_kv_dtype, dtype)
        )
    costs = MeasuredCosts(memory, times, *rates)
    best = best_budget(costs, at_once, offloads=offloads)
    timed = refined_placement(best.problem).with_embedding(memory.embedding_bytes)
    reason = (
        f"auto: {best.weight_bytes / GIB:.2f} GiB of GPU memory for weights, {best.tokens_per_s:,.1f} tokens/s "
        f"predicted with {best.requests:,.0f} at once of {workload.describe()}"
    )
    if timed.placement == all_resident(model.num_layers):
        return WeightsPlan(reason=f"{reason}; all on the GPU")
    try:
        resident = estimate_budget(costs, memory.weight_bytes, at_once, offloads)
    except ValueError:
        return WeightsPlan(timed, f"{reason}; all on the GPU do not fit")
    return WeightsPlan(timed, f"{reason}; {resident.tokens_per_s:,.1f} with all on the GPU")


def assumed_workload(config: EngineConfig, model: ModelConfig) -> UniformLoad:
    """``max_num_seqs`` requests of 1,000 in and 200 out; both are less in proportion where ``max_model_len`` is."""
    longest = config.max_model_len or model.max_position_embeddings
    share = min(1.0, longest / (ASSUMED_INPUT_LEN + ASSUMED_OUTPUT_LEN))
    return UniformLoad(config.max_num_seqs, share * ASSUMED_INPUT_LEN, share * ASSUMED_OUTPUT_LEN, assumed=True)


class MeasuredCosts:
    """This machine's; see :class:`apex.placement.search.CostModel`."""

    def __init__(self, memory: EngineMemory, times: StageTimes, gpu_attention: float, cpu_attention: float) -> None:
        """Attention rates are bytes of K and V a second."""
        self.stage_bytes, self.other_bytes = memory.stage_bytes, memory.other_bytes
        self._expert_bytes, self.most_cpu_rows = memory.expert_bytes, times.most_cpu_rows
        self.kv_bytes_per_token, self.cpu_kv_bytes_per_token = memory.kv_bytes_per_token, memory.cpu_kv_bytes_per_token
        self.layer_groups = memory.layer_groups
        self.gpu_kv_bytes, self.cpu_kv_bytes = memory.gpu_kv_bytes, memory.cpu_kv_bytes
        self.rates = times.rates(cpu_attention)
        self._times = times
        self._gpu_attention = gpu_attention
        model = memory.model
        self._vocabulary_share = model.vocab_size * model.hidden_size * memory.dtype.itemsize / times.weight_bytes

    def costs(self, rows: float) -> list[StageCost]:
        return self._times.costs(self.stage_bytes, rows, self._expert_bytes)

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """Attention at its measured rate; the vocabulary's matrix takes its share of a stage's time."""
        attention_s = on_gpu * self.layer_groups.slots(context) * self.kv_bytes_per_token / self._gpu_attention
        return attention_s + self._vocabulary_share * self._times.gpu(requests)

    def cpu_attention_s(self, on_cpu: float, context: float) -> float:
        """Without the way to the worker and back, which is not measured."""
        kv_bytes = on_cpu * self.layer_groups.slots(context) * self.cpu_kv_bytes_per_token
        return kv_bytes / self.rates.cpu_attention
