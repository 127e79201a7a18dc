"""One measured point of a vLLM server that the harness starts itself, with the model and pool of our engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apex.workloads.requests import Lengths, load_prompt_tokens
from evaluation.experiments.http_point import HttpTask, run_http_point, wide_warm_up
from evaluation.experiments.runner import Point, PointResult
from evaluation.results.other_work import OtherWork
from swiftllm.config import EngineConfig
from swiftllm.machine import first_card

if TYPE_CHECKING:
    from evaluation.measure.server import LaunchedServer, ServerCommand

REQUEST_TIMEOUT_S = 24 * 3600.0
"""A request waits as long as the replay takes: all come at once."""


@dataclass(frozen=True)
class LaunchedTask:
    """What a server's point runs. ``program`` is the ``vllm`` command; ``engine`` holds the model, pools and limits.

    ``values`` are summary fields that are known beforehand.
    """

    system: str
    program: Path
    engine: EngineConfig
    lengths: Lengths
    values: Mapping[str, Any]
    stall_timeout_s: float


def server_command(task: LaunchedTask) -> ServerCommand:
    from evaluation.measure.vllm import vllm_command  # the HTTP client is needed only here

    engine = task.engine
    limits = ("dtype", "block_size", "num_gpu_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    return vllm_command(
        task.program,
        Path(engine.model),
        device_type=engine.device,
        dummy_weights=engine.load_format == "dummy",
        **{name: getattr(engine, name) for name in limits},
    )


def run_launched_point(point: Point, running: LaunchedServer, label: str, console: Console) -> PointResult:
    """Replay the point's workload against its running server, timed at the client.

    Raises:
        ServerNotReady, ServerEnded, NothingServed: the server died or served nothing.
    """
    task: LaunchedTask = point.task
    engine, model = task.engine, Path(task.engine.model)
    http = HttpTask(
        running.server,
        model,
        task.lengths,
        task.values,
        task.stall_timeout_s,
        REQUEST_TIMEOUT_S,
        prompt_tokens=load_prompt_tokens(model),
        launched=running,
        warm_up=wide_warm_up,
    )
    start, others, own_s = time.monotonic(), OtherWork(), running.processor_s()
    result = run_http_point(replace(point, task=http), label, console)
    busy, own_cores = others.busy_cores(), (running.processor_s() - own_s) / (time.monotonic() - start)
    card = first_card() if engine.device == "cuda" else None
    values = {
        **result.values,
        "system": task.system,
        "backend": "server",
        "server": f"vllm {running.server.version or 'of unknown version'}",
        "gpu": None if card is None else card.name,
        "model": model.name,
        "dtype": engine.dtype,
        "num_gpu_blocks": engine.num_gpu_blocks,
        "num_cpu_blocks": 0,
        "others_busy_cores": None if busy is None else max(0.0, busy - own_cores),
    }
    return PointResult(values, result.records, {**result.details, "command": server_command(task).describe()})
