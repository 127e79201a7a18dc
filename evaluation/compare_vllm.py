"""Compares this engine's server with vLLM's on this machine: the same requests over HTTP, on the same cores.

    python evaluation/compare_vllm.py [--help]

vLLM is its CPU build in a separate environment (scripts/install_vllm.sh --cpu). Servers start once and stay idle while
another one is measured. A measurement begins when they use no processor time; what they use meanwhile is measured too.
A round measures every system once, and each round starts with another system. Ratios are to vLLM with as many cores in
the same round.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from apex.cli.output import number, stdout_console
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, load_prompt_tokens
from evaluation.drivers import HttpTask, run_on_launched
from evaluation.measure.processes import stop_on_sigterm
from evaluation.measure.server import LaunchedServer, Server, ServerCommand, launched_server
from evaluation.measure.vllm import ENVIRONMENT, READY_TIMEOUT_S, how_to_install, vllm_command, vllm_path
from evaluation.options import check_counts
from evaluation.plots.charts import BarPanel, Half, rate_bars, throughput_figure
from evaluation.plots.style import FigureText, save_figure
from evaluation.results.folder import FlatRecord, markdown_table, median_record
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity
from evaluation.results.rows import bases, distinct, frame_of, grouped, over, with_columns
from evaluation.results.tables import LATENCY_COLUMNS, rows_table
from evaluation.run import Point, PointResult, one_line_errors, print_failure
from evaluation.study import Study
from swiftllm.files import write_atomically
from swiftllm.machine import cpu_model

# -- servers in turn: all stay up, and those that are not asked must leave the cores alone ----------------------------

IDLE_SHARE_THAT_DISTURBS = 0.05  # cores
QUIET_CHECK_S, MOST_QUIET_CHECKS = 1.0, 20
BENCH_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class RoundTask:
    """The measurement of one server in one round."""

    command: ServerCommand
    round: int
    lengths: Lengths
    model: Path
    prompt_tokens: PromptTokens


def cores_text(cores: int) -> str:
    return f"{cores} core{'s' if cores > 1 else ''}"


def key_of(command: ServerCommand) -> str:
    return f"{command.name}-{len(command.cores)}core"


def label_of(command: ServerCommand) -> str:
    return f"{command.name} on {cores_text(len(command.cores))}"


class RunningServers(contextlib.ExitStack):
    """Servers, started when first needed and stopped at the end."""

    def __init__(self, logs: Path, console: Console) -> None:
        super().__init__()
        self.logs = logs
        self.console = console
        self.by_key: dict[str, LaunchedServer] = {}

    def get_server(self, command: ServerCommand) -> LaunchedServer:
        """The ready server of a command, started unless it is running."""
        if key_of(command) not in self.by_key:
            log = self.logs / f"{key_of(command)}.log"
            launched = launched_server(command, log, READY_TIMEOUT_S, self.console, label_of(command))
            self.by_key[key_of(command)] = self.enter_context(launched)
        return self.by_key[key_of(command)]

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Measure one server in one round."""
        measured: RoundTask = point.task
        command, running = measured.command, self.get_server(measured.command)
        others = [server for server in self.by_key.values() if server is not running]
        _await_quiet(others)
        prompts = measured.prompt_tokens
        task = HttpTask(running.server, measured.model, measured.lengths, {}, prompt_tokens=prompts, launched=running)
        start, idle = time.monotonic(), _processor_s(others)
        result = run_on_launched(point, task, command, label, console)
        seconds = time.monotonic() - start
        values = {
            **result.values,
            "system": command.name,
            "server": f"version {running.server.version}",
            "panel": cores_text(len(command.cores)),
            "cores": len(command.cores),
            "round": measured.round,
            "idle_servers_cores_busy": (_processor_s(others) - idle) / seconds,
            "resident_gib": running.resident_bytes() / 2**30,
        }
        if values["idle_servers_cores_busy"] > IDLE_SHARE_THAT_DISTURBS:
            text = f"the idle servers used {values['idle_servers_cores_busy']:.2f} cores meanwhile"
            console.print(f"warning: {text}", style="yellow", highlight=False)
        return replace(result, values=values)


def _processor_s(servers: Sequence[LaunchedServer]) -> float:
    return sum(server.processor_s() for server in servers)


def _await_quiet(servers: Sequence[LaunchedServer]) -> None:
    """Wait until idle servers leave the cores alone, some seconds at most: vLLM's go on after their last request."""
    for _ in range(MOST_QUIET_CHECKS):
        before = _processor_s(servers)
        time.sleep(QUIET_CHECK_S)
        if _processor_s(servers) - before < IDLE_SHARE_THAT_DISTURBS * QUIET_CHECK_S:
            return


class BenchFailed(RuntimeError):
    """vLLM's client produced no result; the message holds the end of its output."""


def bench_serve(
    vllm: Path, server: Server, model: Path, num_requests: int, input_len: int, output_len: int, result: Path
) -> dict[str, Any]:
    """Send random prompts by `vllm bench serve`, an independent client, all at once, and wait for all answers.

    Returns:
        The client's figures, with the numbers of ``completed`` and ``failed`` requests among them, as in ``result``.

    Raises:
        BenchFailed: the client ended with an error or took too long.
    """
    command = [
        str(vllm), "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", server.model, "--tokenizer", str(model), "--dataset-name", "random",
        "--num-prompts", str(num_requests), "--random-input-len", str(input_len),
        "--random-output-len", str(output_len), "--ignore-eos", "--disable-tqdm", "--save-result",
        "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=BENCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"vllm bench serve took longer than {BENCH_TIMEOUT_S:g} s") from None
    if done.returncode != 0 or not result.is_file():
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BenchFailed(f"vllm bench serve ended with status {done.returncode}:\n{end}")
    return json.loads(result.read_text())


# -- the command ------------------------------------------------------------------------------------------------------

NAME = "compare_vllm"
DEFAULT_VLLM = vllm_path("cpu")
INSTALL = how_to_install("cpu")
BLOCK_SIZE = 16
DTYPE = "bfloat16"
VLLM_KV_CACHE_BYTES = 2 * 2**30  # enough for all requests at once
MAX_NUM_BATCHED_TOKENS = 2048  # vLLM's default, for all: with fewer, running requests wait less and new ones longer
BASELINE = "vllm"


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


def make_systems(options: Options, model: Path) -> list[ServerCommand]:
    """The systems, on one core and on all cores; vLLM only if its command exists."""
    usable = sorted(os.sched_getaffinity(0))
    one, everything = tuple(usable[:1]), tuple(usable)
    blocks_each = -(-(options.input_len + options.output_len) // BLOCK_SIZE)
    blocks = str((options.num_requests + 1) * blocks_each)
    max_model_len = blocks_each * BLOCK_SIZE + BLOCK_SIZE

    def ours(system: str, cores: Sequence[int]) -> ServerCommand:
        # vLLM is started without a prefix cache, too: repeated rounds send the same prompts.
        arguments = [sys.executable, "-m", "apex", "serve", str(model), "--system", system, "--dtype", DTYPE]
        arguments += ["--no-enable-prefix-caching"]
        arguments += ["--max-model-len", str(max_model_len), "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
        arguments += ["--num-gpu-blocks", blocks, "--num-cpu-blocks", blocks]
        return ServerCommand(system, tuple(arguments), {"PYTHONPATH": str(REPO_ROOT)}, tuple(cores))

    def vllm(name: str, cores: Sequence[int], threads: str | None = None) -> list[ServerCommand]:
        if not options.vllm.is_file():
            return []
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
        return [command]

    systems = [ours("swiftllm", one), *vllm(BASELINE, one)]
    if len(everything) > 1:
        # By default vLLM computes on all cores but one, and reserves that one for the rest of its work.
        systems += [ours("apex", everything), *vllm(BASELINE, everything, "auto"), *vllm("vllm-all-cores", everything)]
    names = {system.name for system in systems}
    if unknown := set(options.systems) - names:
        install = "" if options.vllm.is_file() else f"; vLLM itself comes with {INSTALL}"
        there = ", ".join(sorted(names))
        raise ValueError(f"no systems {', '.join(sorted(unknown))} here; there are {there}{install}")
    return [system for system in systems if not options.systems or system.name in options.systems]


def make_points(options: Options, systems: Sequence[ServerCommand], model: Path) -> list[Point]:
    """The points, round by round; each round starts with another system.

    Raises:
        ValueError: a count is below 1.
    """
    check_counts(options, ("rounds", "num_requests", "input_len", "output_len"))
    row = TraceRow(options.input_len, options.output_len, 0.0)
    origin = Origin("synthetic", "requests of one size, all at once")
    vocabulary = PromptTokens(load_prompt_tokens(model).vocab_size)
    points = []
    for turn in range(options.rounds):
        name = f"fixed-{options.input_len}-{options.output_len}"
        spec = WorkloadSpec(name, options.num_requests, seed=options.seed + turn)
        lengths = Lengths(spec, "Requests of one size", origin, (row,) * options.num_requests)
        first = turn % len(systems)
        for system in (*systems[first:], *systems[:first]):
            key, task = f"{key_of(system)}-round{turn}", RoundTask(system, turn, lengths, model, vocabulary)
            points.append(Point(key, key, f"round {turn + 1}, {label_of(system)}", task))
    return points


def run_vllm_client(
    options: Options,
    systems: Sequence[ServerCommand],
    model: Path,
    servers: RunningServers,
    folder: Path,
    console: Console,
) -> list[str]:
    """Send requests to our servers with vLLM's client. Returns a line for each server that failed some."""
    problems, sizes = [], (options.num_requests, options.input_len, options.output_len)
    for system in systems:
        if system.name.startswith(BASELINE):
            continue
        try:
            server, result = servers.get_server(system).server, folder / f"{key_of(system)}.json"
            figures = bench_serve(options.vllm, server, model, *sizes, result)
        except BenchFailed as error:
            problems.append(f"{system.name}: {error}")
            continue
        completed, failed, rate = (figures[name] for name in ("completed", "failed", "output_throughput"))
        text = f"{completed} requests completed, {failed} failed, {rate:.1f} tokens/s"
        console.print(f"vllm bench serve, {label_of(system)}: {text}")
        if failed or completed != options.num_requests:
            problems.append(f"{system.name}: vllm bench serve: {text}")
    return problems


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with ``ratio``: output tokens/s over vLLM's with as many cores in the same round, or None."""
    frame = frame_of(rows)
    base = bases(frame, frame["system"] == BASELINE, ["cores", "round"])
    return with_columns(rows, ratio=over(frame["output_tokens_per_s"], base))


COLUMNS = (
    ("tok/s", "output_tokens_per_s", ".1f"), ("ratio", "ratio", ".2f"), *LATENCY_COLUMNS,
    ("cores busy", "server_cores_busy", ".2f"), ("failed", "failed", ".0f"),
)  # fmt: skip
# Columns of summary.md, which has a row for every round.
ROUND_COLUMNS = (
    ("cores", "cores", "{}"),
    ("system", "system", "{}"),
    ("round", "round", "{}"),
    *((field, title, f"{{:{form}}}") for title, field, form in COLUMNS),
    ("idle_servers_cores_busy", "idle servers' cores busy", "{:.3f}"),
    ("resident_gib", "resident GiB", "{:.2f}"),
)


def median_rows(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """One row per system and number of cores: the median of each column over the rounds, the sum of failures."""
    middle = []
    for _, lines in frame_of(rows).groupby(["cores", "system"]):
        group = [rows[line] for line in lines.index]
        medians = lines[[field for _, field, _ in COLUMNS]].astype(float).median()
        known = medians.astype(object).where(medians.notna(), None).to_dict()
        counts = {"failed": sum(row["failed"] for row in group), "rounds": len(group)}
        middle.append(median_record(group) | known | counts)
    return middle


def results_table(middle: Sequence[FlatRecord], rows: Sequence[FlatRecord]) -> Table:
    rounds = grouped(sorted(rows, key=lambda row: row["round"]), "system", "cores")
    shown = []
    for row in middle:
        rates = [number(r["output_tokens_per_s"], ".0f") for r in rounds[row["system"], row["cores"]]]
        shown.append({**row, "by_round": " ".join(rates)})
    columns = (("cores", "cores", "d"), ("system", "system", "s"), *COLUMNS, ("tok/s by round", "by_round", ""))
    return rows_table(shown, columns)


def draw_servers(middle: Sequence[FlatRecord], folder: Path) -> Path:
    """Bars of the medians, one panel per number of cores. Returns the path of the figure."""
    first, systems = middle[0], distinct(middle, "system")
    label = f"{first['num_requests']} requests at once, {first['input_len']:.0f} in / {first['output_len']:.0f} out"
    panels = [
        BarPanel(cores_text(cores), "", [(label, rate_bars(rows, systems, BASELINE))], "output tokens/s, measured")
        for cores, rows in sorted(grouped(middle, "cores").items())
    ]
    text = FigureText(
        "This engine's servers and vLLM's CPU build, over HTTP",
        f"{first['model']}, bfloat16, on {cpu_model()}; medians of {first['rounds']} interleaved rounds, "
        "thin lines from the lowest to the highest",
        f"Above the bars: ratio to vLLM on as many cores, or tokens/s. {BASELINE}: its default, which computes on all "
        "cores but one unless it is given one; vllm-all-cores: OpenMP threads on every core.",
    )
    return save_figure(throughput_figure([Half(panels, systems, text)]), folder)[0]


@one_line_errors
def main(options: Options, console: Console | None = None) -> int:
    """Measure, print, draw. Returns the exit status: 0 when everything was measured and no request failed."""
    console = console or stdout_console()
    if options.quick:
        options = replace(options, rounds=1, num_requests=16, input_len=32, output_len=32)
    model = model_folder(options.model)
    if options.bench_serve and not options.vllm.is_file():
        raise ValueError(f"--bench-serve needs vLLM, and there is none at {options.vllm}: run {INSTALL}")
    systems = make_systems(options, model)
    points = make_points(options, systems, model)
    if not options.vllm.is_file():
        text = f"no vLLM at {options.vllm}: only our servers are measured; {INSTALL} installs it"
        console.print(text, style="yellow", highlight=False, soft_wrap=True)
    configuration = {
        "model": model_identity(model),
        "workload": asdict(points[0].task.lengths.spec),
        "rounds": options.rounds,
        "commands": {key_of(system): system.describe() for system in systems},
    }
    logs = options.results_dir / NAME / "logs"
    with RunningServers(logs, console) as servers:
        run_point, described = servers.run_point, lambda points: configuration
        experiment = Study(NAME, derive=with_ratios, run_point=run_point, describe=described)
        outcome = experiment.run(points, options.results_dir, console=console)
        problems = [f"{label}, see errors/ in the results" for label in outcome.failed]
        if options.bench_serve:
            problems += run_vllm_client(options, systems, model, servers, outcome.folder / "bench_serve", console)
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
