"""Measured points of a figure: its workloads, scaled down, on this machine's torch backend or on servers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.experiments.http_point import HttpTask
from evaluation.experiments.runner import Point
from evaluation.experiments.torch_point import TorchTask
from evaluation.results.provenance import cpu_kernels, model_identity
from evaluation.traces.catalogue import UniformTrace, load_trace, synthetic_name
from evaluation.traces.workloads import Lengths, WorkloadSpec, make_lengths
from swiftllm.config import EngineConfig

if TYPE_CHECKING:
    from evaluation.measure.server import Server


@dataclass(frozen=True)
class WorkloadPlan:
    """One workload of the figure. ``output_lens`` sweeps the average output length in tokens, before scaling.

    ``input_len`` makes a synthetic workload of that average prompt length instead of reading the trace ``name``.
    ``request_rates`` (requests/s) sweeps Poisson arrivals instead of sending all requests at once.
    """

    panel: str
    num_requests: int
    scale: float
    name: str | None = None
    input_len: int | None = None
    output_lens: tuple[float, ...] = ()
    request_rates: tuple[float, ...] = ()

    @property
    def workload_name(self) -> str:
        return self.name or synthetic_name(self.input_len)


@dataclass(frozen=True)
class MeasuredPlan:
    """Everything that decides the figure's measured numbers, apart from machine and code.

    With ``servers`` the systems are those servers; then only the model of ``engine`` is used, to make the prompts.
    """

    systems: tuple[str, ...]
    baseline: str
    seed: int
    repeats: int
    workloads: tuple[WorkloadPlan, ...]
    gpu_requests: int
    engine: EngineConfig
    trace_dir: Path | None = None
    stall_timeout_s: float = 120.0
    servers: tuple[Server, ...] = ()
    request_timeout_s: float = 1800.0
    ready_timeout_s: float = 60.0


def pool_blocks(lengths: Lengths, gpu_requests: int, block_size: int) -> tuple[int, int]:
    """Numbers of GPU and CPU blocks for a workload.

    The GPU pool holds ``gpu_requests`` requests of average length, and at least the longest one. The CPU pool
    holds all requests at once.
    """
    blocks = [math.ceil((row.input_tokens + row.output_tokens) / block_size) for row in lengths.rows]
    mean = math.ceil(sum(blocks) / len(blocks))
    return max(gpu_requests * mean, max(blocks)), 1 << (sum(blocks) - 1).bit_length()


def make_measured_points(plan: MeasuredPlan) -> list[Point]:
    """All points. The systems of one workload run one after the other, so that slow drift affects them alike."""
    points = []
    for workload in plan.workloads:
        for output_len in workload.output_lens or (None,):
            for rate in workload.request_rates or (None,):
                points += _repeated_points(plan, workload, output_len, rate)
    return points


def _repeated_points(
    plan: MeasuredPlan, workload: WorkloadPlan, output_len: float | None, rate: float | None
) -> list[Point]:
    if workload.name is None:
        trace = UniformTrace(workload.input_len, output_len)
    else:
        trace = load_trace(workload.name, plan.trace_dir)
    arrivals = "at-once" if rate is None else "poisson"
    spec = WorkloadSpec(
        trace.name, workload.num_requests, workload.scale, output_len, arrivals, request_rate=rate, seed=plan.seed
    )
    lengths = make_lengths(spec, trace)
    swept = [f"{name}{value:g}" for name, value in (("out", output_len), ("rate", rate)) if value is not None]
    group = "-".join([trace.name, *swept])
    label = f"{trace.name}, {lengths.mean_output_tokens:.0f} output tokens"
    if rate is not None:
        label += f", {rate:g} requests/s"
    points = []
    for repeat in range(plan.repeats):
        first = repeat % len(plan.systems)  # otherwise one system would always be measured first
        for system in plan.systems[first:] + plan.systems[:first]:
            task = _task(plan, system, lengths, {"panel": workload.panel, "baseline": plan.baseline})
            key = f"{group}-{system}" + (f"-{repeat}" if plan.repeats > 1 else "")
            points.append(Point(key, f"{group}-{system}", f"{label}, {system}", task))
    return points


def _task(plan: MeasuredPlan, system: str, lengths: Lengths, values: Mapping[str, Any]) -> TorchTask | HttpTask:
    for server in plan.servers:
        if server.name == system:
            model, stall_s = Path(plan.engine.model), plan.stall_timeout_s
            return HttpTask(server, model, lengths, values, stall_s, plan.request_timeout_s, plan.ready_timeout_s)
    engine = with_pools(plan.engine, lengths, plan.gpu_requests)
    return TorchTask(system, engine, lengths, {**values, "gpu_requests": plan.gpu_requests}, plan.stall_timeout_s)


def with_pools(engine: EngineConfig, lengths: Lengths, gpu_requests: int) -> EngineConfig:
    """``engine`` with pool sizes from :func:`pool_blocks` where it has none."""
    gpu_blocks, cpu_blocks = pool_blocks(lengths, gpu_requests, engine.block_size)
    return replace(
        engine,
        num_gpu_blocks=gpu_blocks if engine.num_gpu_blocks is None else engine.num_gpu_blocks,
        num_cpu_blocks=cpu_blocks if engine.num_cpu_blocks is None else engine.num_cpu_blocks,
    )


def describe_measured_plan(plan: MeasuredPlan, points: Sequence[Point]) -> dict[str, Any]:
    """The plan for the run's identity: engine options or servers, and a digest of each point's lengths."""
    shared = {"model": model_identity(Path(plan.engine.model)), "repeats": plan.repeats}
    if not plan.servers:
        shared |= {"cpu_kernels": cpu_kernels(), "gpu_requests": plan.gpu_requests}
    return {**shared, "points": [_described(point.key, point.task) for point in points]}


def _described(key: str, task: TorchTask | HttpTask) -> dict[str, Any]:
    if isinstance(task, HttpTask):
        run = {"system": task.server.name, "server": asdict(task.server)}
    else:
        engine = {name: value for name, value in asdict(task.engine).items() if name != "model"}
        run = {"system": task.system, "engine": engine}
    return {
        "key": key,
        **run,
        "workload": asdict(task.lengths.spec),
        "trace": {**asdict(task.lengths.origin), "lengths": task.lengths.digest()},
    }
