"""Replays one workload against OpenAI-compatible servers. They may be running, or are started for the test.

    python evaluation/load_test.py --url vllm=http://127.0.0.1:8000 --workload azure-conv --request-rates 1 2 4
    python evaluation/load_test.py --start "apex=python -m apex serve MODEL" --concurrency 1 8 64

Every token is timed at the client. Results are like those of other experiments: a record per request, metrics
(docs/serving/metrics.md), and provenance with all flags of the servers started here.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any

import tyro
from rich.console import Console

from apex.cli.options import parse_options
from apex.cli.output import stdout_console
from apex.cli.traffic import SERVICE_COLUMNS
from apex.replay.metrics import DEFAULT_TARGETS, Targets
from apex.workloads.catalogue import SessionTrace, Trace, UniformTrace, load_trace
from apex.workloads.requests import WorkloadSpec, make_lengths, merge_lengths
from evaluation.drivers import HttpTask, run_http_point
from evaluation.measure.processes import stop_on_sigterm
from evaluation.measure.server import Server, ServerCommand, connect_server, launched_server
from evaluation.options import HttpOptions, TraceDir, parse_urls
from evaluation.results.paths import RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity
from evaluation.results.tables import rows_table
from evaluation.run import Point, one_line_errors
from evaluation.study import Study

NAME = "load_test"
STARTED_READY_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Options(HttpOptions):
    """Replay a workload against servers: all at once, with Poisson or trace arrivals, or in a closed loop."""

    url: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=URL")] = ()
    """A running server and its name, e.g. vllm=http://127.0.0.1:8000. Repeat for each server."""
    start: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=COMMAND")] = ()
    """A server to start, measure and stop, e.g. "apex=python -m apex serve MODEL". Repeat for each server.
    --host and --port are added to the command. All servers run at the same time, so idle ones must use no CPU."""
    model: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the served model; its tokenizer makes the prompts. By default SmolLM2-135M-Instruct."""
    workload: str | None = None
    """Take lengths from this workload, as `apex simulate` and `apex bench` do: a name, such as sharegpt, or
    a file of your own, in one of the forms that these list; by default --input-len, --output-len."""
    trace_dir: TraceDir = None
    input_len: int = 128
    """Average prompt tokens without --workload; uniform within 10%."""
    output_len: int = 128
    """Average output tokens without --workload; uniform within 10%."""
    scale: float = 1.0
    """Factor for all lengths."""
    num_requests: int = 64
    """Number of requests of every point."""
    request_rates: tuple[float, ...] = ()
    """Poisson arrivals at these rates (requests/s), one point for each (open loop)."""
    concurrency: tuple[int, ...] = ()
    """Numbers of requests kept in flight, one point for each (closed loop)."""
    trace_arrivals: bool = False
    """Add a point with the trace's own arrivals (open loop)."""
    best_effort_requests: int = 0
    """Best-effort requests beside these in every point, all there from the start, of lengths from the same source."""
    duration_s: float | None = None
    """Break every point off after so many seconds; the tokens of unfinished requests count in the metrics by class."""
    ttft_target_s: float = DEFAULT_TARGETS.ttft_s
    """Goodput counts requests whose first token arrives within this many seconds, and which meet --tpot-target-s."""
    tpot_target_s: float = DEFAULT_TARGETS.tpot_s
    """Goodput counts requests whose later tokens take at most this many seconds each on average."""
    seed: int = 0
    """Seed of lengths, arrivals and prompts."""
    results_dir: Path = RESULTS_DIR
    """Results go to load_test/<run>/ in this folder. Running the same command again continues an interrupted run."""


def make_specs(options: Options, trace: Trace) -> dict[str, WorkloadSpec]:
    """The workloads of one server, one for each point, by the words for its load."""
    fixed = {"name": trace.name, "num_requests": options.num_requests, "scale": options.scale, "seed": options.seed}
    specs = {
        f"{rate:g} requests/s": WorkloadSpec(**fixed, arrivals="poisson", request_rate=rate)
        for rate in options.request_rates
    }
    specs |= {
        f"{number} under way": WorkloadSpec(**fixed, arrivals="closed-loop", concurrency=number)
        for number in options.concurrency
    }
    if options.trace_arrivals or (not specs and isinstance(trace, SessionTrace)):
        specs["trace"] = WorkloadSpec(**fixed, arrivals="trace")
    return specs or {"at-once": WorkloadSpec(**fixed)}


def parse_commands(texts: Sequence[str]) -> list[ServerCommand]:
    """The commands of --start.

    Raises:
        ValueError: a text has no name or no command.
    """
    commands = []
    for text in texts:
        name, _, command = text.partition("=")
        if not name.strip() or not (arguments := shlex.split(command)):
            raise ValueError(f'--start {text!r}: write it as "NAME=COMMAND ...", e.g. "vllm=vllm serve MODEL"')
        commands.append(ServerCommand(name.strip(), tuple(arguments)))
    return commands


def make_points(options: Options, servers: Sequence[Server], model: Path, trace: Trace) -> list[Point]:
    fixed = {
        "targets": Targets(options.ttft_target_s, options.tpot_target_s),
        "request_timeout_s": options.request_timeout_s,
        "duration_s": options.duration_s,
    }
    points = []
    for load, spec in make_specs(options, trace).items():
        lengths = make_lengths(spec, trace)
        if options.best_effort_requests:
            backlog = WorkloadSpec(trace.name, options.best_effort_requests, options.scale, seed=options.seed + 1)
            lengths = merge_lengths(lengths, make_lengths(backlog, trace))
        for server in servers:
            key = f"{spec.name}-{load}-{server.name}".replace("/", "-per-").replace(" ", "-")
            task = HttpTask(server, model, lengths, {"load": load}, **fixed)
            points.append(Point(key, key, f"{server.name}, {load}", task))
    return points


def configuration(options: Options, commands: Sequence[ServerCommand], points: Sequence[Point], model: Path) -> Any:
    """Everything that decides the numbers. A server started here is described by its command: its port changes."""
    started = {command.name: command.describe() for command in commands}

    def described(point: Point) -> Mapping[str, Any]:
        task: HttpTask = point.task
        server = started.get(task.server.name) or asdict(task.server)
        lengths = {"workload": asdict(task.lengths.spec), "lengths": task.lengths.digest()}
        duration = {} if task.duration_s is None else {"duration_s": task.duration_s}
        return {"key": point.key, "server": server, **lengths, "targets": asdict(task.targets), **duration}

    return {"model": model_identity(model), "points": [described(point) for point in points]}


@one_line_errors
def main(options: Options, console: Console | None = None) -> int:
    """Measure and print. Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    console = console or stdout_console()
    model = model_folder(options.model)
    urls, commands = parse_urls(options.url), parse_commands(options.start)
    names = [*urls, *(command.name for command in commands)]
    if not names or len(set(names)) < len(names):
        raise ValueError("name every server once: --url NAME=http://HOST:PORT, or --start NAME=COMMAND")
    trace: Trace = UniformTrace(options.input_len, options.output_len)
    if options.workload is not None:
        has_tokenizer = (model / "tokenizer.json").is_file()
        trace = load_trace(options.workload, options.trace_dir, model if has_tokenizer else None)
    with contextlib.ExitStack() as stack:
        servers = [connect_server(name, url, options.ready_timeout_s) for name, url in urls.items()]
        for command in commands:
            log = options.results_dir / NAME / "logs" / f"{command.name}.log"
            running = stack.enter_context(launched_server(command, log, STARTED_READY_TIMEOUT_S, console))
            servers.append(running.server)
        points = make_points(options, servers, model, trace)
        settings = configuration(options, commands, points, model)
        experiment = Study(NAME, run_point=run_http_point, describe=lambda points: settings)
        run = experiment.run(points, options.results_dir, console=console)
    if run.summary:
        console.print(rows_table(run.summary, SERVICE_COLUMNS))
        keep = f"a first token within {options.ttft_target_s:g} s and {options.tpot_target_s:g} s per further token"
        console.print(f"goodput: requests/s with {keep}")
    return run.print_outcome(console)


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main(parse_options(Options, prog="evaluation/load_test.py")))
