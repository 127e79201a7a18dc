"""One measured point: a system on the torch backend replays a workload."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apex.replay.loop import STALL_TIMEOUT_S, replay_requests
from apex.replay.metrics import compute_metrics
from apex.replay.records import ReplayRequest
from apex.workloads.requests import Lengths, PromptTokens, Workload, load_prompt_tokens, make_workload
from evaluation.experiments.runner import Point, PointResult
from evaluation.results.other_work import OtherWork
from evaluation.results.progress import TokenProgress
from swiftllm.config import EngineConfig

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 4
ENGINE_FIELDS = ("dtype", "num_gpu_blocks", "num_cpu_blocks", "cpu_kernel", "cpu_threads")
"""Summary fields that an engine says of itself."""

EngineFactory = Callable[[str, EngineConfig], "Engine"]


@dataclass(frozen=True)
class TorchTask:
    """What a torch point runs. ``values`` are summary fields known beforehand (swept variables)."""

    system: str
    engine: EngineConfig
    lengths: Lengths
    values: Mapping[str, Any]
    stall_timeout_s: float = STALL_TIMEOUT_S
    duration_s: float | None = None
    """Seconds after which the measurement is cut; None runs until all requests have ended."""


def build_engine(system: str, config: EngineConfig) -> Engine:
    from apex.systems import build_system  # imported late: it loads torch, which only running points need

    return build_system(system, config)


def run_torch_point(
    point: Point, label: str, console: Console, engine_factory: EngineFactory = build_engine
) -> PointResult:
    """Build the system, warm it up, replay the workload, close it."""
    task: TorchTask = point.task
    engine = engine_factory(task.system, task.engine)
    try:
        warm_up_engine(engine, task)
        return measure(engine, task, label, console)
    finally:
        engine.close()


def warm_up_engine(engine: Engine, task: TorchTask) -> None:
    """Replay a few short requests. First calls fill caches and compile; the measurement must not contain that."""
    workload = make_workload(task.lengths, load_prompt_tokens(Path(task.engine.model)))
    replay_requests(engine, warm_up(workload).requests, stall_timeout_s=task.stall_timeout_s)


def measure(
    engine: Engine, task: TorchTask, label: str, console: Console, on_step: Callable[[], None] = lambda: None
) -> PointResult:
    """Replay the workload on a warm engine without requests. ``on_step`` is called before it, and again and again."""
    prompt_tokens = load_prompt_tokens(Path(task.engine.model))
    requests = open_loop_requests(make_workload(task.lengths, prompt_tokens))
    with TokenProgress(label, task.lengths.total_output_tokens, console) as progress:

        def update(tokens: int) -> None:
            on_step()
            progress.update(tokens)

        on_step()
        others = OtherWork()
        limits = {"stall_timeout_s": task.stall_timeout_s, "limit_s": task.duration_s or math.inf}
        result = replay_requests(engine, requests, update, **limits)
        others_busy_cores = others.busy_cores()
    description, device_type = engine.describe(), engine.backend.device.type
    values = {
        "system": task.system,
        "backend": f"torch-{device_type}",
        "gpu": description["device"] if device_type == "cuda" else None,
        "model": Path(task.engine.model).name,
        **{name: description[name] for name in ENGINE_FIELDS},
        **workload_values(task.lengths, prompt_tokens),
        **task.values,
        **compute_metrics(result.records, result.wall_s, result.stats, window_s=task.duration_s),
        **{name: result.stats.get(name) for name in ("iterations", "preemptions", "swapped_blocks")},
        "others_busy_cores": others_busy_cores,
    }
    return PointResult(values, result.records, {"engine": description, "engine_stats": dict(result.stats)})


def open_loop_requests(workload: Workload) -> tuple[ReplayRequest, ...]:
    """The requests of an open-loop workload, for an engine in this process.

    Raises:
        ValueError: the workload is a closed loop; only servers can replay these.
    """
    if workload.lengths.spec.concurrency is not None:
        raise ValueError("a closed loop needs a server; an engine in this process replays arrivals only")
    return workload.requests


def workload_values(lengths: Lengths, prompt_tokens: PromptTokens) -> dict[str, Any]:
    """Summary fields that describe the workload and the origin of its lengths."""
    spec = lengths.spec
    return {
        "workload": spec.name,
        "workload_title": lengths.title,
        "trace_origin": lengths.origin.kind,
        "trace_note": lengths.origin.note,
        "trace_file": lengths.origin.file,
        "prompts": prompt_tokens.kind,
        "num_requests": spec.num_requests,
        "scale": spec.scale,
        "arrivals": spec.arrivals,
        "request_rate": spec.request_rate,
        "concurrency": spec.concurrency,
        "input_len": lengths.mean_input_tokens,
        "output_len": lengths.mean_output_tokens if spec.output_len is None else spec.output_len * spec.scale,
        "output_len_mean": lengths.mean_output_tokens,
        "seed": spec.seed,
        **best_effort_values(lengths),
    }


def best_effort_values(lengths: Lengths) -> dict[str, Any]:
    """Summary fields that describe the best-effort stream, if there is one."""
    spec = lengths.best_effort
    if spec is None:
        return {}
    names = ("num_requests", "scale", "arrivals", "request_rate", "seed")
    return {"best_effort_workload": spec.name, **{f"best_effort_{name}": getattr(spec, name) for name in names}}


def warm_up(workload: Workload) -> Workload:
    """The first requests of a workload, all at once, shortened and renamed."""
    requests = tuple(
        dataclasses.replace(
            request,
            request_id=f"warm-up-{request.request_id}",
            arrival_s=0.0,
            prompt_token_ids=request.prompt_token_ids[:32],
            output_len=min(request.output_len, WARM_UP_TOKENS),
        )
        for request in workload.requests[:WARM_UP_REQUESTS]
    )
    return dataclasses.replace(workload, requests=requests)
