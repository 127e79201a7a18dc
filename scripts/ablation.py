"""Measures the effect of each strategy: the same requests with strategies forced, disabled, or run synchronously.

python scripts/ablation.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from apex.environment import PACKAGES, use_environment

    use_environment(*PACKAGES)

from rich.console import Console
from rich.table import Table

from apex.cli.output import number, ratio, stdout_console, strategy_mix, table
from apex.cli.parser import parse_options
from apex.cli.profile import attention_rate
from apex.replay.metrics import predicted_over_actual
from apex.schedulers.inequality import offload_bound_tokens_per_s
from apex.strategy import StrategyConfig
from evaluation.experiments.options import Folder
from evaluation.experiments.runner import Point, PointResult, RunPoint, run_experiment
from evaluation.experiments.torch_point import TorchTask, run_torch_point
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity
from evaluation.traces.catalogue import Origin, TraceRow
from evaluation.traces.workloads import Lengths, WorkloadSpec
from swiftllm.config import DeviceName, DtypeName, EngineConfig

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

BASELINE = "swiftllm"


@dataclass(frozen=True)
class Row:
    """A row of the table: a system and its changed settings."""

    name: str
    system: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    synchronous: bool = False


ROWS = {
    row.name: row
    for row in (
        Row(BASELINE, "swiftllm"),
        Row("neo", "neo"),
        Row("fastdecode", "fastdecode"),
        Row("apex", "apex"),
        Row("force-pipelining", "apex", StrategyConfig(strategy="asymmetric-pipelining")),
        Row("force-overlap", "apex", StrategyConfig(strategy="asynchronous-overlap")),
        Row("no-pipelining", "apex", StrategyConfig(disable_asymmetric_pipelining=True)),
        Row("no-overlap", "apex", StrategyConfig(disable_asynchronous_overlap=True)),
        Row("no-threshold", "apex", StrategyConfig(min_cpu_request_ratio=0)),
        Row("synchronous", "apex", synchronous=True),
    )
}
MEANINGS = (
    "neo, fastdecode and apex are as in their papers; the others are variants of apex. force-*: one strategy forced "
    "(overlap without its threshold); no-*: one strategy disabled; no-threshold: overlap with any number of CPU "
    "requests; synchronous: CPU attention inline, no overlap"
)
ONCE = " Measured once: confirm differences with --repeats 3."


@dataclass(frozen=True)
class Options:
    """Force and disable strategies on one workload, and print the throughput of each variant.

    The GPU tier holds a few requests; all others wait or go to the CPU tier. Running the same command again continues
    an interrupted run.
    """

    model: Folder = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    rows: tuple[str, ...] = tuple(ROWS)
    """Rows of the table to measure."""
    num_requests: int = 64
    """Number of requests, all sent at the start."""
    input_len: int = 32
    """Prompt tokens of each request."""
    output_len: int = 48
    """Output tokens of each request."""
    gpu_requests: int = 4
    """Number of requests that fit the GPU tier at once."""
    repeats: int = 1
    """How many times to measure every row; the table shows medians."""
    device: DeviceName = "auto"
    """Device of the linear layers."""
    dtype: DtypeName = "auto"
    """Data type of weights, activations and KV cache."""
    cpu_threads: int = 1
    """Threads of the CPU attention worker."""
    seed: int = 0
    """Seed of the prompts."""
    results_dir: Path = RESULTS_DIR
    """Results go to ablation/<run>/ in this folder."""


@dataclass(frozen=True)
class RowTask:
    row: Row
    task: TorchTask


def make_points(options: Options) -> list[Point]:
    """A point per row and repeat.

    Raises:
        ValueError: an option is not valid; the message says what to do.
    """
    unknown = [name for name in options.rows if name not in ROWS]
    if unknown:
        raise ValueError(f"no rows {', '.join(unknown)}; there are {', '.join(ROWS)}")
    for name in ("num_requests", "input_len", "output_len", "gpu_requests", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} must be at least 1")
    model = model_folder(options.model)
    spec = WorkloadSpec(f"fixed-{options.input_len}-{options.output_len}", options.num_requests, seed=options.seed)
    origin = Origin("synthetic", "requests of one size, all at once")
    row = TraceRow(options.input_len, options.output_len, 0.0)
    lengths = Lengths(spec, "Requests of one size", origin, (row,) * options.num_requests)
    # On a CPU the lane takes the GPU's part, so it must have the same size in every row.
    threads = {"lane_threads": 1, "cpu_threads": options.cpu_threads}
    engine = EngineConfig(str(model), device=options.device, dtype=options.dtype, **threads)
    blocks = -(-(options.input_len + options.output_len) // engine.block_size)
    engine = replace(
        engine, num_gpu_blocks=options.gpu_requests * blocks, num_cpu_blocks=(options.num_requests + 1) * blocks
    )
    points = []
    for repeat in range(options.repeats):
        first = repeat % len(options.rows)  # otherwise one row would always be measured first
        for name in options.rows[first:] + options.rows[:first]:
            config = replace(engine, synchronous=ROWS[name].synchronous)
            task = TorchTask(ROWS[name].system, config, lengths, {"row": name})
            key = name + (f"-{repeat}" if options.repeats > 1 else "")
            points.append(Point(key, name, name, RowTask(ROWS[name], task)))
    return points


def configuration(options: Options, points: Sequence[Point]) -> dict[str, Any]:
    """Everything that decides the numbers."""

    def described(point: Point) -> dict[str, Any]:
        row, task = point.task.row, point.task.task
        engine = {name: value for name, value in asdict(task.engine).items() if name != "model"}
        return {"key": point.key, "row": asdict(row), "engine": engine, "lengths": task.lengths.digest()}

    model = model_identity(model_folder(options.model))
    return {"experiment": "ablation", "model": model, "points": [described(point) for point in points]}


def run_row(point: Point, label: str, console: Console) -> PointResult:
    """Run a point with its row's strategy, and add the values from which the bound is computed."""
    row, task = point.task.row, point.task.task
    predictions: dict[str, float | None] = {}

    def build(system: str, config: EngineConfig) -> Engine:
        from apex.systems import build_system

        engine = build_system(system, config, row.strategy)
        predictions.update(figures_of_bound(engine, task.lengths.spec.num_requests))
        return engine

    result = run_torch_point(replace(point, task=task), label, console, build)
    stats = result.details["engine_stats"]
    values = {
        **result.values,
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        "predicted_over_actual": predicted_over_actual(stats),
        **predictions,
    }
    return replace(result, values=values)


def figures_of_bound(engine: Engine, num_requests: int) -> dict[str, float | None]:
    """Values for the bound from the engine's profile table; empty for a system without a table.

    ``cpu_bytes_per_s`` is the rate at which the CPU reads KV cache. ``lane_limit_tokens_per_s`` is the lane's maximum
    with linear layers alone and any batch up to ``num_requests``."""
    model = getattr(engine.scheduler, "model", None)
    if model is None:
        return {}
    backend, profile = engine.backend, model.table
    bytes_per_token = backend.kv_bytes_per_block / backend.block_size
    rate = attention_rate(profile.cpu_attention)
    batches = [n for n in (*map(int, profile.linear.sizes), num_requests) if n <= num_requests]
    return {
        "kv_bytes_per_token": bytes_per_token,
        "cpu_bytes_per_s": None if rate is None else rate * bytes_per_token / model.num_layers,
        "lane_limit_tokens_per_s": max(n / (model.num_layers * model.linear_s(n)) for n in batches),
    }


def results_table(summary: Sequence[FlatRecord]) -> Table:
    base = next((record["output_tokens_per_s"] for record in summary if record["row"] == BASELINE), None)
    rows = [
        (
            record["row"],
            number(record["output_tokens_per_s"], ".1f"),
            number(ratio(record["output_tokens_per_s"], base), ".2f"),
            number(record["lane_busy_fraction"], ".0%"),
            number(record["cpu_busy_fraction"], ".0%"),
            number(record["preemptions"], ".0f"),
            number(record["predicted_over_actual"], ".2f"),
            record["strategy_mix"],
        )
        for record in summary
    ]
    columns = ("row", "tok/s", f"/{BASELINE}", "lane busy", "CPU busy", "preempted", "pred/actual",
               "strategy mix")  # fmt: skip
    return table(columns, rows, left=("row", "strategy mix"))


def bound_text(summary: Sequence[FlatRecord]) -> str:
    """The best row compared with the bound of any schedule, and what limited it instead."""
    base = next((record for record in summary if record["row"] == BASELINE), None)
    profiled = next((record for record in summary if record.get("cpu_bytes_per_s")), None)
    measured = [record for record in summary if record["output_tokens_per_s"]]
    if base is None or not base["output_tokens_per_s"] or profiled is None:
        return f"No bound: it takes the row {BASELINE} and one of a system that uses the CPU."
    best = max(measured, key=lambda record: record["output_tokens_per_s"])
    context = base["input_len"] + base["output_len"] / 2
    cpu, kv_bytes = profiled["cpu_bytes_per_s"], profiled["kv_bytes_per_token"]
    bound = offload_bound_tokens_per_s(base["output_tokens_per_s"], cpu, kv_bytes, context)
    text = (
        f"Bound: GPU-only {base['output_tokens_per_s']:.1f} + CPU attention {cpu / 1e9:.2f} GB/s / ({kv_bytes:.0f} B x "
        f"{context:.0f} tokens of context) = {bound:.0f} tokens/s. Best measured: {best['row']}, "
        f"{best['output_tokens_per_s']:.1f} tokens/s, {best['output_tokens_per_s'] / bound:.0%} of it."
    )
    limit = profiled["lane_limit_tokens_per_s"]
    on_cpu = base["backend"] == "torch-cpu"
    if limit < bound:
        text += (
            "\nThe bound ignores the cost of linear layers of offloaded requests. "
            f"{'On a CPU core, where they are bound by arithmetic,' if on_cpu else 'On ' + base['gpu']} they alone "
            f"allow at most {limit:.0f} tokens/s with up to {base['num_requests']} requests in a batch."
        )
    lane, cpu_worker = best["lane_busy_fraction"], best["cpu_busy_fraction"]
    if lane is not None and cpu_worker is not None:
        text += f"\nThe lane of the best row was busy {lane:.0%} of the time, its CPU worker {cpu_worker:.0%}"
        if best is not base:
            text += (
                ". Overlap can have saved at most that share of the time; the rest of the gain is due to the larger "
                "batch that fits the CPU tier's memory"
            )
        text += "."
    return text


def main(options: Options, run_point: RunPoint = run_row, console: Console | None = None) -> int:
    """Run and print the table and the result folder. Returns the exit status: 0 when every row is finished."""
    console = console or stdout_console()
    try:
        points = make_points(options)
    except ValueError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    settings = configuration(options, points)
    outcome = run_experiment("ablation", settings, points, run_point, options.results_dir, console)
    if outcome.summary:
        first = outcome.summary[0]
        console.print(
            f"\n{first['model']} ({first['dtype']}), {options.num_requests} requests of {options.input_len} in / "
            f"{options.output_len} out, {options.gpu_requests} of them fit the GPU tier",
            soft_wrap=True,
        )
        console.print(results_table(outcome.summary))
        for record in outcome.summary:
            if record["failed"]:
                console.print(f"{record['row']}: {record['failed']:g} requests failed, see records/ in the results")
        console.print(f"\n{MEANINGS}.{ONCE if options.repeats == 1 else ''}\n\n{bound_text(outcome.summary)}\n")
    return outcome.print_outcome(console)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="scripts/ablation.py")))
