"""The placement of an engine's weights on this machine, by times that are measured before the model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from apex.perf.progress import progress_bar
from apex.placement.budget import UniformLoad, best_budget, estimate_budget
from apex.placement.costs import StageCost
from apex.placement.memory import EngineMemory
from apex.placement.search import PlacementProblem, TimedPlacement, refined_placement
from apex.placement.timing import StageTimes, attention_bytes_per_s, time_stage
from swiftllm.config import EngineConfig
from swiftllm.device import open_device
from swiftllm.kv.format import cpu_format
from swiftllm.machine import GIB, usable_cores
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.stages.placement import Placement, all_resident
from swiftllm.ops.select import select_ops
from swiftllm.runtime.processors import resolve_dtype, resolve_kernel

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

    Raises:
        ValueError: there is no GPU, or the weights fit neither in the given memory nor in the host's.
    """
    if config.weights_gpu_memory is None:
        return WeightsPlan()
    device, model = open_device(config.device), ModelConfig.from_folder(config.model)
    if device.torch_device.type == "cpu":
        raise ValueError(
            "weights_gpu_memory has no effect without a GPU, since all weights are in host memory: drop it"
        )
    dtype = resolve_dtype(config, device.torch_device)
    memory = EngineMemory(config, model, dtype, device.free_bytes())
    kernel = resolve_kernel(config, dtype)
    ops = select_ops(device.torch_device, dtype, kernel)
    if config.weights_gpu_memory != "auto":
        gpu_bytes = memory.given_bytes(config.weights_gpu_memory)
        if gpu_bytes >= sum(memory.stage_bytes) + memory.embedding_bytes:
            return WeightsPlan()
        rows = sorted({1, max(2, config.max_num_seqs)})
        with progress_bar("measuring where weights belong") as progress:
            times = time_stage(model, dtype, device, ops, rows, progress)
        costs = times.costs(memory.stage_bytes, config.max_num_seqs)
        timed = refined_placement(PlacementProblem(costs, gpu_bytes, effect=times.rates().copy_effect))
        return WeightsPlan(timed.with_embedding(memory.embedding_bytes))
    workload = workload or assumed_workload(config, model)
    at_once = replace(workload, num_requests=min(config.max_num_seqs, workload.num_requests))
    if memory.holds_all(at_once):
        return WeightsPlan(reason=f"auto: all on the GPU, which has room for {workload.describe()} beside them")
    memory.check_tiers()
    rows = sorted({1, max(2, config.max_num_seqs), config.max_num_batched_tokens + config.max_num_seqs})
    with progress_bar("measuring where weights belong") as progress:
        times = time_stage(model, dtype, device, ops, rows, progress)
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
    """This machine's; see :class:`apex.placement.budget.CostModel`."""

    def __init__(self, memory: EngineMemory, times: StageTimes, gpu_attention: float, cpu_attention: float) -> None:
        """Attention rates are bytes of K and V a second."""
        self.stage_bytes, self.other_bytes = memory.stage_bytes, memory.other_bytes
        self.kv_bytes_per_token, self.cpu_kv_bytes_per_token = memory.kv_bytes_per_token, memory.cpu_kv_bytes_per_token
        self.layer_groups = memory.layer_groups
        self.gpu_kv_bytes, self.cpu_kv_bytes = memory.gpu_kv_bytes, memory.cpu_kv_bytes
        self.rates = times.rates(cpu_attention)
        self._times = times
        self._gpu_attention = gpu_attention
        model = memory.model
        self._vocabulary_share = model.vocab_size * model.hidden_size * memory.dtype.itemsize / times.weight_bytes

    def costs(self, rows: float) -> list[StageCost]:
        return self._times.costs(self.stage_bytes, rows)

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """Attention at its measured rate; the vocabulary's matrix takes its share of a stage's time."""
        attention_s = on_gpu * self.layer_groups.slots(context) * self.kv_bytes_per_token / self._gpu_attention
        return attention_s + self._vocabulary_share * self._times.gpu(requests)
