"""Compares this engine's server with vLLM's on this machine: the same requests over HTTP, on the same cores.

    python evaluation/compare_vllm.py [--help]

vLLM is its CPU build in a separate environment (scripts/install_vllm.sh --cpu). Servers start once and stay idle while
another one is measured. A measurement begins when they use no processor time; what they use meanwhile is measured too.
A round measures every system once, and each round starts with another system. Ratios are to vLLM with as many cores in
the same round.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any

import tyro
from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.http_point import HttpTask, run_http_point
from evaluation.experiments.runner import Point, PointResult, print_failure, run_experiment
from evaluation.figures.servers import (
    BASELINE,
    ROUND_COLUMNS,
    cores_text,
    draw_servers,
    median_rows,
    results_table,
    with_ratios,
)
from evaluation.measure.bench_serve import BenchFailed, bench_serve
from evaluation.measure.server import LaunchedServer, ServerCommand, launched_server
from evaluation.measure.sessions import stop_on_sigterm
from evaluation.measure.vllm import READY_TIMEOUT_S, how_to_install, vllm_command, vllm_path
from evaluation.results.folder import markdown_table
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity
from evaluation.traces.catalogue import Origin, TraceRow
from evaluation.traces.workloads import Lengths, PromptTokens, WorkloadSpec, load_prompt_tokens
from swiftllm.files import write_atomically

NAME = "compare_vllm"
DEFAULT_VLLM = vllm_path("cpu")
INSTALL = how_to_install("cpu")
BLOCK_SIZE = 16
DTYPE = "bfloat16"
VLLM_KV_CACHE_BYTES = 2 * 2**30  # enough for all requests at once
MAX_NUM_BATCHED_TOKENS = 2048  # vLLM's default, for all: with fewer, running requests wait less and new ones longer
IDLE_SHARE_THAT_DISTURBS = 0.05  # cores
QUIET_CHECK_S, MOST_QUIET_CHECKS = 1.0, 20


@dataclass(frozen=True)
class Options:
    """Compare our servers with vLLM's CPU build on this machine.

    On one core, all processes of the server share that core and the client runs on others. On all cores, the client
    shares them with the server. Running the same command again continues an interrupted run.
    """

    model: Path | None = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    systems: tuple[str, ...] = ()
    """Systems to measure (swiftllm, apex, vllm, vllm-all-cores); by default all of them."""
    rounds: int = 3
    """How many times to measure every system, interleaved; the table shows medians."""
    num_requests: int = 64
    """Number of requests, all sent at the start."""
    input_len: int = 128
    """Prompt tokens of each request, drawn at random."""
    output_len: int = 128
    """Output tokens of each request."""
    quick: bool = False
    """One round of 16 requests with 32 prompt and 32 output tokens, to see whether everything works."""
    vllm: Annotated[Path, tyro.conf.arg(metavar="FILE")] = DEFAULT_VLLM
    """The vllm command; if it does not exist, only our servers are measured."""
    bench_serve: bool = False
    """Afterwards also send our servers as many requests with vLLM's own client, `vllm bench serve`."""
    seed: int = 0
    """Seed of the prompts."""
    results_dir: Path = RESULTS_DIR
    """Results go to compare_vllm/<run>/ in this folder."""


@dataclass(frozen=True)
class System:
    """A server to measure, and the cores on which it may run."""

    name: str
    command: ServerCommand

    @property
    def cores(self) -> int:
        return len(self.command.cores)

    @property
    def key(self) -> str:
        return f"{self.name}-{self.cores}core"


@dataclass(frozen=True)
class RoundTask:
    """The measurement of one system in one round."""

    system: System
    round: int
    lengths: Lengths
    model: Path
    prompt_tokens: PromptTokens


def make_systems(options: Options, model: Path) -> list[System]:
    """The systems, on one core and on all cores; vLLM only if its command exists."""
    usable = sorted(os.sched_getaffinity(0))
    one, everything = tuple(usable[:1]), tuple(usable)
    blocks_each = -(-(options.input_len + options.output_len) // BLOCK_SIZE)
    blocks = str((options.num_requests + 1) * blocks_each)
    max_model_len = blocks_each * BLOCK_SIZE + BLOCK_SIZE

    def ours(system: str, cores: Sequence[int]) -> System:
        arguments = (sys.executable, "-m", "apex", "serve", str(model), "--system", system)
        limits = ("--dtype", DTYPE, "--max-model-len", str(max_model_len))
        limits += ("--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS))
        sizes = ("--num-gpu-blocks", blocks, "--num-cpu-blocks", blocks)
        environment = {"PYTHONPATH": str(REPO_ROOT)}
        return System(system, ServerCommand(system, (*arguments, *limits, *sizes), environment, tuple(cores)))

    def vllm(name: str, cores: Sequence[int], threads: str | None = None) -> System:
        command = vllm_command(
            options.vllm,
            model,
            device_type="cpu",
            dtype=DTYPE,
            max_model_len=max_model_len,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            kv_cache_bytes=VLLM_KV_CACHE_BYTES,
            cores=cores,
            threads=threads,
            name=name,
        )
        return System(name, command)

    systems = [ours("swiftllm", one)]
    if options.vllm.is_file():
        systems.append(vllm(BASELINE, one))
    if len(everything) > 1:
        systems.append(ours("apex", everything))
        if options.vllm.is_file():
            # By default vLLM computes on all cores but one, and reserves that one for the rest of its work.
            systems.append(vllm(BASELINE, everything, "auto"))
            systems.append(vllm("vllm-all-cores", everything))
    names = {system.name for system in systems}
    if unknown := set(options.systems) - names:
        install = "" if options.vllm.is_file() else f"; vLLM itself comes with {INSTALL}"
        there = ", ".join(sorted(names))
        raise ValueError(f"no systems {', '.join(sorted(unknown))} here; there are {there}{install}")
    return [system for system in systems if not options.systems or system.name in options.systems]


def make_points(options: Options, systems: Sequence[System], model: Path) -> list[Point]:
    """The points, round by round; each round starts with another system.

    Raises:
        ValueError: a count is below 1.
    """
    for name in ("rounds", "num_requests", "input_len", "output_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    row = TraceRow(options.input_len, options.output_len, 0.0)
    origin = Origin("synthetic", "requests of one size, all at once")
    vocabulary = PromptTokens(load_prompt_tokens(model).vocab_size)
    points = []
    for number in range(options.rounds):
        name = f"fixed-{options.input_len}-{options.output_len}"
        spec = WorkloadSpec(name, options.num_requests, seed=options.seed + number)
        lengths = Lengths(spec, "Requests of one size", origin, (row,) * options.num_requests)
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            key = f"{system.key}-round{number}"
            label = f"round {number + 1}, {system.name} on {cores_text(system.cores)}"
            points.append(Point(key, key, label, RoundTask(system, number, lengths, model, vocabulary)))
    return points


class RunningServers:
    """Servers, started when first needed and stopped at the end. A context manager."""

    def __init__(self, logs: Path, console: Console) -> None:
        self.logs = logs
        self.console = console
        self.by_key: dict[str, LaunchedServer] = {}
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> RunningServers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stack.__exit__(*exception)

    def get_server(self, system: System) -> LaunchedServer:
        """The ready server of a system, started unless it is running."""
        running = self.by_key.get(system.key)
        if running is None:
            start = time.monotonic()
            self.console.print(f"starting {system.name} on {cores_text(system.cores)} ...", highlight=False)
            log = self.logs / f"{system.key}.log"
            running = self.stack.enter_context(launched_server(system.command, log, READY_TIMEOUT_S))
            self.by_key[system.key] = running
            self.console.print(f"  ready after {time.monotonic() - start:.0f} s", highlight=False)
        return running

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Measure one system in one round."""
        measured: RoundTask = point.task
        running = self.get_server(measured.system)
        others = [server for server in self.by_key.values() if server is not running]
        _await_quiet(others)
        prompts = measured.prompt_tokens
        task = HttpTask(running.server, measured.model, measured.lengths, {}, prompt_tokens=prompts, launched=running)
        start, own, idle = time.monotonic(), running.processor_s(), sum(other.processor_s() for other in others)
        result = run_http_point(replace(point, task=task), label, console)
        seconds = time.monotonic() - start
        values = {
            **result.values,
            "system": measured.system.name,
            "server": f"version {running.server.version}",
            "panel": cores_text(measured.system.cores),
            "cores": measured.system.cores,
            "round": measured.round,
            "server_cores_busy": (running.processor_s() - own) / seconds,
            "idle_servers_cores_busy": (sum(other.processor_s() for other in others) - idle) / seconds,
            "resident_gib": running.resident_bytes() / 2**30,
        }
        if values["idle_servers_cores_busy"] > IDLE_SHARE_THAT_DISTURBS:
            text = f"the idle servers used {values['idle_servers_cores_busy']:.2f} cores meanwhile"
            console.print(f"warning: {text}", style="yellow", highlight=False)
        return PointResult(values, result.records, {**result.details, "command": measured.system.command.describe()})


def _await_quiet(servers: Sequence[LaunchedServer]) -> None:
    """Wait until idle servers leave the cores alone, some seconds at most: vLLM's go on after their last request."""
    for _ in range(MOST_QUIET_CHECKS):
        before = sum(server.processor_s() for server in servers)
        time.sleep(QUIET_CHECK_S)
        if sum(server.processor_s() for server in servers) - before < IDLE_SHARE_THAT_DISTURBS * QUIET_CHECK_S:
            return


def run_vllm_client(
    options: Options, systems: Sequence[System], model: Path, servers: RunningServers, folder: Path, console: Console
) -> list[str]:
    """Send requests to our servers with vLLM's client. Returns a line for each server that failed some."""
    problems = []
    for system in systems:
        if system.name.startswith(BASELINE):
            continue
        server, result = servers.get_server(system).server, folder / "bench_serve" / f"{system.key}.json"
        sizes = (options.num_requests, options.input_len, options.output_len)
        try:
            figures = bench_serve(options.vllm, server, model, *sizes, result)
        except BenchFailed as error:
            problems.append(f"{system.name}: {error}")
            continue
        completed, failed, rate = (figures[name] for name in ("completed", "failed", "output_throughput"))
        text = f"{completed} requests completed, {failed} failed, {rate:.1f} tokens/s"
        console.print(f"vllm bench serve, {system.name} on {cores_text(system.cores)}: {text}")
        if failed or completed != options.num_requests:
            problems.append(f"{system.name}: vllm bench serve: {text}")
    return problems


def main(options: Options, console: Console | None = None) -> int:
    """Measure, print, draw. Returns the exit status: 0 when everything was measured and no request failed."""
    console = console or stdout_console()
    if options.quick:
        options = replace(options, rounds=1, num_requests=16, input_len=32, output_len=32)
    try:
        model = model_folder(options.model)
        if options.bench_serve and not options.vllm.is_file():
            raise ValueError(f"--bench-serve needs vLLM, and there is none at {options.vllm}: run {INSTALL}")
        systems = make_systems(options, model)
        points = make_points(options, systems, model)
    except ValueError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    if not options.vllm.is_file():
        text = f"no vLLM at {options.vllm}: only our servers are measured; {INSTALL} installs it"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)
    configuration = {
        "experiment": NAME,
        "model": model_identity(model),
        "workload": asdict(points[0].task.lengths.spec),
        "rounds": options.rounds,
        "commands": {system.key: system.command.describe() for system in systems},
    }
    logs = options.results_dir / NAME / "logs"
    with RunningServers(logs, console) as servers:
        outcome = run_experiment(
            NAME, configuration, points, servers.run_point, options.results_dir, console, complete=with_ratios
        )
        problems = [f"{label}, see errors/ in the results" for label in outcome.failed]
        if options.bench_serve:
            problems += run_vllm_client(options, systems, model, servers, outcome.folder, console)
    rows = outcome.summary
    if rows:
        write_atomically(outcome.folder / "summary.md", markdown_table(rows, ROUND_COLUMNS))
        middle = median_rows(rows)
        console.print(results_table(middle, rows))
        console.print(f"figure: {draw_servers(middle, outcome.folder)}", highlight=False, soft_wrap=True)
    for problem in problems:
        print_failure(problem, console)
    console.print(f"summary, raw records and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return 1 if problems or any(row["failed"] for row in rows) else 0


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main(parse_options(Options, prog="evaluation/compare_vllm.py")))
