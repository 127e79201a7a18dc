"""One simulated point: a system on predicted hardware replays a workload over a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apex.perf.model import ProfileTable
from apex.replay.loop import STALL_TIMEOUT_S, replay_requests
from apex.replay.metrics import Targets, compute_metrics
from apex.replay.records import RequestRecord
from apex.simulator.build import build_simulated
from apex.simulator.virtual.cpu_hosts import RemoteHosts
from apex.simulator.virtual.cpu_path import Interconnect
from apex.simulator.virtual.runtime import OWN_ENGINE, VLLM, vllm_runtime
from apex.simulator.virtual.weight_path import SimulatedWeights
from apex.strategy import StrategyConfig
from apex.workloads.requests import Lengths, PromptTokens, with_prompts
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.torch_point import open_loop_requests, workload_values
from evaluation.results.progress import TokenProgress
from swiftllm.core.request import ServiceClass, Tier
from swiftllm.scheduling.admission import SchedulerLimits

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

PLACEHOLDER_PROMPTS = PromptTokens(vocab_size=1, text_ids=(0,))


@dataclass(frozen=True)
class SimulatedHardware:
    """A machine and model as the simulator knows them; ``table`` holds one layer's times.

    ``gpu``, ``model`` and ``dtype`` are names for the rows. ``launch_s`` (seconds), ``interconnect``, ``remote_hosts``
    and ``weights`` are not in the table.
    """

    gpu: str
    model: str
    dtype: str
    table: ProfileTable
    num_layers: int
    launch_s: float = 0.0
    interconnect: Interconnect | None = None
    remote_hosts: RemoteHosts | None = None
    weights: SimulatedWeights | None = None


@dataclass(frozen=True)
class SimulatedTask:
    """What a simulated point runs; picklable. ``values`` are summary fields known beforehand."""

    system: str
    hardware: SimulatedHardware
    num_gpu_blocks: int
    num_cpu_blocks: int
    lengths: Lengths
    limits: SchedulerLimits
    block_size: int = 16
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    values: Mapping[str, Any] = field(default_factory=dict)
    stall_timeout_s: float = STALL_TIMEOUT_S
    believed: ProfileTable | None = None
    """From which the scheduler predicts, where that is not the hardware's table."""
    one_class: bool = False
    """The system is told of one class only, as it knows no other; metrics still have both."""
    duration_s: float | None = None
    """Virtual seconds after which the run is cut; None runs until all requests have ended."""
    synchronous: bool = False
    """The GPU is idle while the CPU attends."""
    whole_swaps: bool = False
    """KV cache is copied between the tiers as a whole, while nothing computes; else layer by layer."""
    vllm_defaults: bool = False
    """Whether `vllm` runs as vLLM 0.19 does by default; else as the papers ran it."""
    cached_tiers: tuple[Tier, ...] = ()
    """Where the system caches prefixes."""
    prompts: Callable[[int], tuple[int, ...]] | None = None
    """Token ids of the prompt of a row, by its place: for workloads that share beginnings. None: placeholders."""


def build_engine(task: SimulatedTask) -> Engine:
    hardware, as_vllm = task.hardware, task.vllm_defaults and task.system == VLLM
    return build_simulated(
        task.system,
        hardware.table,
        hardware.num_layers,
        num_gpu_blocks=task.num_gpu_blocks,
        num_cpu_blocks=task.num_cpu_blocks,
        block_size=task.block_size,
        max_num_batched_tokens=task.limits.max_num_batched_tokens,
        max_num_seqs=task.limits.max_num_seqs,
        max_model_len=task.limits.max_model_len,
        strategy=task.strategy,
        vocab_size=PLACEHOLDER_PROMPTS.vocab_size if task.prompts is None else 1 << 31,
        launch_s=hardware.launch_s,
        interconnect=hardware.interconnect,
        remote_hosts=hardware.remote_hosts,
        scheduler_table=task.believed,
        weights=hardware.weights,
        cached_tiers=task.cached_tiers,
        synchronous=task.synchronous,
        whole_swaps=task.whole_swaps,
        runtime=vllm_runtime(task.limits.max_num_seqs) if as_vllm else OWN_ENGINE,
    )


def run_simulated_point(point: Point, label: str, console: Console) -> PointResult:
    """Build the system and replay the workload. All times are virtual, and the row says so (``backend``)."""
    task: SimulatedTask = point.task
    engine = build_engine(task)
    with TokenProgress(label, task.lengths.total_output_tokens, console) as progress:
        told = told_lengths(task)
        requests = open_loop_requests(with_prompts(told, prompts_of(task)))
        limits = {"stall_timeout_s": task.stall_timeout_s, "wait": engine.backend.sleep}
        result = replay_requests(engine, requests, progress.update, limit_s=task.duration_s or math.inf, **limits)
    records = with_classes(result.records, task.lengths)
    busy, wall_s = engine.backend.busy, result.wall_s
    targets = Targets(task.strategy.ttft_slo_s, task.strategy.tpot_slo_s)
    values = {
        "system": task.system,
        "backend": "simulated",
        "gpu": task.hardware.gpu,
        "model": task.hardware.model,
        "dtype": task.hardware.dtype,
        "num_gpu_blocks": task.num_gpu_blocks,
        "num_cpu_blocks": task.num_cpu_blocks,
        "cpu_kernel": task.hardware.table.identity.get("cpu_kernel"),
        "cpu_threads": task.hardware.table.identity.get("cpu_threads"),
        **workload_values(task.lengths, PLACEHOLDER_PROMPTS),
        "prompts": "placeholder token ids" if task.prompts is None else "token ids that share beginnings",
        "cpu_bandwidth_gb_s": None,
        **task.values,
        **compute_metrics(records, wall_s, result.stats, targets, task.duration_s),
        "iterations": result.stats["iterations"],
        "preemptions": result.stats["preemptions"],
        "swapped_blocks": result.stats["swapped_blocks"],
        "gpu_busy_fraction": busy.gpu_s / wall_s if wall_s else None,
        "extrapolated": ", ".join(sorted(engine.backend.extrapolated)) or None,
    }
    return PointResult(values, records, {"engine": engine.describe(), "engine_stats": dict(result.stats)})


def told_lengths(task: SimulatedTask) -> Lengths:
    """The workload as the system sees it."""
    if not task.one_class:
        return task.lengths
    rows = (replace(row, service_class=ServiceClass.LATENCY_SENSITIVE) for row in task.lengths.rows)
    return replace(task.lengths, rows=tuple(rows))


def with_classes(records: Sequence[RequestRecord], lengths: Lengths) -> tuple[RequestRecord, ...]:
    """The records, which are in the order of the rows, with the classes of these."""
    return tuple(
        replace(record, service_class=row.service_class.value)
        for record, row in zip(records, lengths.rows, strict=True)
    )


def prompts_of(task: SimulatedTask) -> list[tuple[int, ...]]:
    """Prompts of the right lengths. A simulation reads of their tokens only which beginnings are the same."""
    rows = task.lengths.rows
    if task.prompts is None:
        return [(0,) * row.input_tokens for row in rows]
    return [task.prompts(index) for index in range(len(rows))]
