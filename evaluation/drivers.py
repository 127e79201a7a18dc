"""Drivers run a workload on one thing: a simulation, an engine in this process, or a server over HTTP.

A point's task says which of them runs it (:func:`run_point`), and describes what it runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from apex.perf.model import ProfileTable
from apex.replay.loop import STALL_TIMEOUT_S, replay_requests
from apex.replay.metrics import DEFAULT_TARGETS, Targets, compute_metrics
from apex.replay.records import ReplayRequest, RequestRecord, summary_of
from apex.simulator.backend import OWN_ENGINE, VLLM, vllm_runtime
from apex.simulator.bound import Bound, BoundMachine, BoundWorkload, bound, why_no_bound
from apex.simulator.build import build_simulated
from apex.simulator.links import Interconnect, RemoteHosts, SimulatedStates, SimulatedWeights
from apex.strategy import StrategyConfig
from apex.workloads.requests import Lengths, PromptTokens, Workload, load_prompt_tokens, make_workload, with_prompts
from evaluation.results.progress import TokenProgress
from evaluation.results.provenance import OtherWork
from evaluation.run import Point, PointResult
from swiftllm.config import EngineConfig
from swiftllm.core.request import ServiceClass, Tier
from swiftllm.scheduling.validation import SchedulerLimits

if TYPE_CHECKING:
    from evaluation.measure.server import LaunchedServer, Server, ServerCommand
    from swiftllm.engine.engine import Engine


# -- in this process --------------------------------------------------------------------------------------------------

WARM_UP_REQUESTS = 2
WARM_UP_TOKENS = 4
ENGINE_FIELDS = ("dtype", "num_gpu_blocks", "num_cpu_blocks", "cpu_kernel", "cpu_threads")
"""Summary fields that an engine says of itself."""

EngineFactory = Callable[[str, EngineConfig], "Engine"]


@dataclass(frozen=True)
class TorchTask:
    """What a point runs on this machine: an engine, or a server with its model, pools and limits. ``values`` are
    summary fields known beforehand (swept variables)."""

    system: str
    engine: EngineConfig
    lengths: Lengths
    values: Mapping[str, Any]
    stall_timeout_s: float = STALL_TIMEOUT_S
    program: Path | None = None
    """The ``vllm`` command that serves the system in place of an engine."""
    duration_s: float | None = None
    """Seconds after which the measurement is cut; None runs until all requests have ended."""


def build_engine(system: str, config: EngineConfig) -> Engine:
    from apex.build import build_system  # imported late: it loads torch, which only running points need

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
            after=None,
        )
        for request in workload.requests[:WARM_UP_REQUESTS]
    )
    return dataclasses.replace(workload, requests=requests)


# -- simulated --------------------------------------------------------------------------------------------------------

WITH_BOUND = "with_bound"
"""A field of a task's values: whether its row also has what no schedule can exceed (:mod:`apex.simulator.bound`)."""
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
    states: SimulatedStates | None = None


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


def build_simulated_engine(task: SimulatedTask) -> Engine:
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
        states=hardware.states,
        cached_tiers=task.cached_tiers,
        synchronous=task.synchronous,
        whole_swaps=task.whole_swaps,
        runtime=vllm_runtime(task.limits.max_num_seqs) if as_vllm else OWN_ENGINE,
    )


def run_simulated_point(point: Point, label: str, console: Console) -> PointResult:
    """Build the system and replay the workload. All times are virtual, and the row says so (``backend``)."""
    task: SimulatedTask = point.task
    engine = build_simulated_engine(task)
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
    if task.values.get(WITH_BOUND):
        limit = bound_of(task)
        rate = None if values["failed"] else values["output_tokens_per_s"]  # the bound has the tokens of all
        values |= {
            "schedule_bound_tokens_per_s": limit.tokens_per_s,
            "of_the_bound": None if rate is None else rate / limit.tokens_per_s,
            "binds": limit.binding,
        }
    return PointResult(values, records, {"engine": engine.describe(), "engine_stats": dict(result.stats)})


def bound_of(task: SimulatedTask) -> Bound:
    """What no schedule of the task's machine and requests can exceed.

    Raises:
        ValueError: the bound is not made for such a task; the message says what it lacks.
    """
    hardware, rows = task.hardware, task.lengths.rows
    reason = why_no_bound(
        weights_off_gpu=hardware.weights is not None,
        several_hosts=hardware.remote_hosts is not None,
        windows=False,
        arrivals=any(row.arrival_s for row in rows),
        prefixes=task.lengths.are_shared,
        is_cut=task.duration_s is not None,
        one_token=all(row.output_tokens < 2 for row in rows),
    )
    if reason:
        raise ValueError(reason)
    machine = BoundMachine(
        hardware.table,
        hardware.num_layers,
        float(task.num_gpu_blocks * task.block_size),
        float(task.num_cpu_blocks * task.block_size),
        task.limits.max_num_batched_tokens,
        task.limits.max_num_seqs,
        has_host_work=not (task.vllm_defaults and task.system == VLLM),  # vLLM's host works beside the GPU
    )
    return bound(machine, BoundWorkload.of([(row.input_tokens, row.output_tokens) for row in rows]))


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
        if task.lengths.are_shared:
            raise ValueError("the workload's prompts share beginnings, and the task does not give their tokens")
        return [(0,) * row.input_tokens for row in rows]
    return [task.prompts(index) for index in range(len(rows))]


# -- over HTTP --------------------------------------------------------------------------------------------------------

FRESH_TOKENS = 2
WIDE_REQUESTS = 34
WIDE_PROMPT_TOKENS = 4
WIDE_OUTPUT_TOKENS = 12
END_GRACE_S = 10.0  # a server that fails answers with errors, or not at all, for some seconds before it ends


def wide_warm_up(workload: Workload) -> Workload:
    """The longest prompt of a workload, and a batch of short requests that shrinks step by step.

    GPU servers compile attention kernels when they meet a new kind of batch: a prompt, decodes, one request, a multiple
    of 16 requests. The batch takes all of them. Its requests fit one block of 16 tokens each, so small pools hold it.
    """
    longest = max(workload.requests, key=lambda request: len(request.prompt_token_ids))
    requests = [replace(longest, request_id="warm-up-longest", arrival_s=0.0, output_len=1, after=None)]
    for index, request in zip(range(WIDE_REQUESTS), itertools.cycle(workload.requests), strict=False):
        prompt, output_len = request.prompt_token_ids[:WIDE_PROMPT_TOKENS], 1 + index % WIDE_OUTPUT_TOKENS
        requests.append(ReplayRequest(f"warm-up-{index}", 0.0, prompt, output_len, request.service_class))
    return replace(workload, requests=tuple(requests))


@dataclass(frozen=True)
class HttpTask:
    """What an HTTP point runs. ``model`` is the folder whose tokenizer makes the prompts; ``values`` are summary
    fields that are known beforehand (swept variables), or better known than from the server."""

    server: Server
    model: Path
    lengths: Lengths
    values: Mapping[str, Any]
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 1800.0
    duration_s: float | None = None
    """Seconds after which the measurement is broken off; None runs until all requests have ended."""
    ready_timeout_s: float = 60.0
    targets: Targets = DEFAULT_TARGETS
    prompt_tokens: PromptTokens | None = None
    """Tokens of the prompts; by default a text in the model's tokens."""
    launched: LaunchedServer | None = None
    """The server's process if this program started it: if it ends, the point fails at once and says why."""
    warm_up: Callable[[Workload], Workload] = warm_up
    """Makes the requests sent before the measurement; :func:`wide_warm_up` suits servers that compile kernels late."""


class NothingServed(RuntimeError):
    """No request was completed; the message gives a reason."""


def run_http_point(point: Point, label: str, console: Console) -> PointResult:
    """Check that the server still runs, warm it up, and send the workload.

    Raises:
        ServerNotReady: the server is not ready, or is another one than when the run began.
        ServerEnded: the launched server ended while requests were running.
        NothingServed: no request was completed; the point is not saved and runs again with the next command.
    """
    from evaluation.measure.http import replay_workload  # only points that really run need the HTTP client
    from evaluation.measure.server import connect_server, still_running

    task: HttpTask = point.task
    ended = task.launched.ended if task.launched else still_running
    server = connect_server(task.server.name, task.server.url, task.ready_timeout_s, expected=task.server, ended=ended)
    prompt_tokens = task.prompt_tokens or load_prompt_tokens(task.model)
    workload = make_workload(task.lengths, prompt_tokens)
    limits = {"stall_timeout_s": task.stall_timeout_s, "request_timeout_s": task.request_timeout_s, "ended": ended}
    warmed = replay_workload(server, with_fresh_prompts(task.warm_up(workload), prompt_tokens.vocab_size), **limits)
    check_served(task, warmed.records)
    with TokenProgress(label, task.lengths.total_output_tokens, console) as progress:
        limits["duration_s"] = task.duration_s
        result = replay_workload(server, with_fresh_prompts(workload, prompt_tokens.vocab_size), progress, **limits)
    check_served(task, result.records)
    values = {
        "system": server.name,
        "backend": "http",
        "gpu": None,  # what the server runs on is unknown here
        "model": Path(server.model).name,
        "server": server.url if server.version is None else f"{server.url} (version {server.version})",
        **dict.fromkeys(ENGINE_FIELDS),
        "max_model_len": server.max_model_len,
        **workload_values(task.lengths, prompt_tokens),
        **task.values,
        **compute_metrics(result.records, result.wall_s, targets=task.targets, window_s=task.duration_s),
        **result.stats,
    }
    return PointResult(values, result.records, {"server": asdict(server)})


def run_on_launched(point: Point, task: HttpTask, command: ServerCommand, label: str, console: Console) -> PointResult:
    """Send the workload to ``task.launched``, which ``command`` has started on this machine.

    The row also has the cores that the server kept busy, and those that other work did.

    Raises:
        ServerNotReady, ServerEnded, NothingServed: the server died or served nothing.
    """
    running = task.launched
    start, others, own_s = time.monotonic(), OtherWork(), running.processor_s()
    result = run_http_point(replace(point, task=task), label, console)
    own = (running.processor_s() - own_s) / (time.monotonic() - start)
    busy = others.busy_cores()
    cores = {"server_cores_busy": own, "others_busy_cores": None if busy is None else max(0.0, busy - own)}
    return PointResult({**result.values, **cores}, result.records, {**result.details, "command": command.describe()})


def with_fresh_prompts(workload: Workload, vocab_size: int) -> Workload:
    """The workload with the first tokens of its prompts drawn anew, without a seed; those that begin alike still do.

    A server may cache the KV of earlier prompts (vLLM does by default), and the points of a figure share prompts.
    A prompt that begins differently has no cached prefix, so every point starts with a cold cache.
    """
    rng = np.random.default_rng()
    heads: dict[tuple[int, ...], tuple[int, ...]] = {}

    def fresh(prompt: tuple[int, ...]) -> tuple[int, ...]:
        head = prompt[:FRESH_TOKENS]
        if head not in heads:
            heads[head] = tuple(rng.integers(0, vocab_size, len(head)).tolist())
        return (*heads[head], *prompt[len(head) :])

    requests = (replace(request, prompt_token_ids=fresh(request.prompt_token_ids)) for request in workload.requests)
    return replace(workload, requests=tuple(requests))


def check_served(task: HttpTask, records: tuple[RequestRecord, ...]) -> None:
    """Raise if the server ended, or completed nothing. Some failed requests are a result; a server's end is none.

    In a run of fixed duration a token is enough, since all requests may be unfinished at its end.
    """
    if task.launched and task.duration_s is None and not all(record.completed for record in records):
        task.launched.check_running(within_s=END_GRACE_S)
    if not any(record.completed or (task.duration_s is not None and record.token_times_s) for record in records):
        server = task.server
        raise NothingServed(
            f"{server.name} at {server.url} completed none of {len(records)} requests; the first: {records[0].failure}"
        )


# -- any of them ------------------------------------------------------------------------------------------------------


def run_point(point: Point, label: str, console: Console) -> PointResult:
    """Run a point according to the type of its task.

    Simulations keep summaries of requests, without the times of single tokens. Full records of thousands of requests
    are large, and a simulation can be repeated bit for bit.

    Raises:
        TypeError: no backend runs such a task.
    """
    if isinstance(point.task, SimulatedTask):
        result = run_simulated_point(point, label, console)
        return replace(result, records=[summary_of(record) for record in result.records])
    if isinstance(point.task, TorchTask):
        return run_torch_point(point, label, console)
    if isinstance(point.task, HttpTask):
        return run_http_point(point, label, console)
    raise TypeError(f"nothing runs a {type(point.task).__name__}")
