"""Runs workloads for real and simulated with this machine's own profile, and says how far the simulator is off.

The simulator's only input about the machine is the table of operator times, measured right before and after each run.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from rich.console import Console

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface
from evaluation.drivers import TorchTask, run_simulated_point, run_torch_point
from evaluation.measure.live_systems import ProfiledMachine, simulated_twin
from evaluation.plots.style import FAINT, FigureText, legend, save_figure, sheet, system_colour, tidy_axes
from evaluation.results.folder import FlatRecord, to_json
from evaluation.results.rows import frame_of
from evaluation.results.tables import rows_table
from evaluation.run import Point, PointResult, Run
from evaluation.studies.papers import FigureOptions, small_points
from evaluation.study import Study
from swiftllm.config import EngineConfig
from swiftllm.files import write_atomically

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine
    from swiftllm.runtime.torch_backend import TorchBackend

AIM = 0.1
COMPARED = (
    ("workload", "workload", "s"), ("out", "output_len", ".0f"), ("system", "system", "s"),
    ("measured", "measured", ".1f"), ("SIMULATED", "simulated", ".1f"), ("error", "error", "+.1%"),
    ("spread", "spread", ""), ("others", "others_busy_cores", ".2f"),
)  # fmt: skip
OPERATIONS = (
    ("operation", "operation", "s"), ("sizes", "sizes", "d"), ("median", "median", ".1%"), ("90%", "p90", ".1%"),
    ("bias", "bias", "+.1%"),
)  # fmt: skip
PLACE = ("workload", "output_len", "system")
MARKERS = "osD^vP"


# -- a real run and its simulated twin --------------------------------------------------------------------------------


def run_pairs(options: FigureOptions, console: Console) -> int:
    """Run points of Figure 5 for real and simulated, then print and draw both. Returns the exit status: 0 when every
    run is finished.

    Raises:
        ValueError: an option is not valid here; the message says what to do.
    """
    made, configuration = small_points("fig5", options)
    points = [replace(point, group=point.key) for point in made]  # one group per repeat: the spread is reported

    def show(run: Run, console: Console) -> None:
        compared = comparison(run.summary)
        if compared:
            errors = operation_errors(points[0].task.engine)
            print_operations(errors, console)
            report = {"systems": system_errors(compared), "points": compared, "operations": [asdict(e) for e in errors]}
            write_atomically(run.folder / "comparison.json", to_json(report))
            save_figure(draw_validation(run.summary, run.machine), run.folder)
        print_comparison(compared, console)

    run = functools.partial(run_pair, MachineProfiles())
    experiment = Study("validate", show, run_point=run, describe=lambda points: configuration)
    return experiment.run(points, options.results_dir, console=console).print_outcome(console)


def run_pair(profiles: MachineProfiles, point: Point, label: str, console: Console) -> PointResult:
    """The result of the real run, with the figures of the simulated run under ``simulated_*`` names."""
    task: TorchTask = point.task
    before = profiles.profile_before(task.engine)
    real = run_torch_point(point, label, console, lambda system, config: build_profiled(system, config, before))
    machine = mean_machine(before, profiles.profile_after(task.engine))
    simulated = run_simulated_point(replace(point, task=simulated_twin(task, machine)), f"{label}, simulated", console)
    rate, simulated_rate = (result.values["output_tokens_per_s"] for result in (real, simulated))
    values = {
        **real.values,
        "simulated_output_tokens_per_s": simulated_rate,
        "simulated_error": simulated_rate / rate - 1.0 if rate and simulated_rate else None,
        "simulated_iterations": simulated.values["iterations"],
    }
    details = {**real.details, "profile": asdict(machine.table), "simulated": dict(simulated.values)}
    return PointResult(values, real.records, details)


def build_profiled(system: str, config: EngineConfig, machine: ProfiledMachine) -> Engine:
    """The system, with a scheduler that predicts from the table just measured."""
    from apex.build import build_system  # imported late: it loads torch

    return build_system(system, config, profile=machine.table)


# -- report -----------------------------------------------------------------------------------------------------------


def comparison(summary: Sequence[FlatRecord]) -> list[FlatRecord]:
    """A record for each workload and system: medians and the spread of errors over its pairs of runs."""
    rates, error = ("output_tokens_per_s", "simulated_output_tokens_per_s"), "simulated_error"
    frame = frame_of(summary, (*PLACE, *rates, error, "others_busy_cores")).dropna(subset=[error])
    compared = frame.astype({"others_busy_cores": float}).groupby(list(PLACE), sort=False, as_index=False)
    columns = compared.agg(
        repeats=(error, "size"),
        measured=(rates[0], "median"),
        simulated=(rates[1], "median"),
        error=(error, "median"),
        lowest_error=(error, "min"),
        highest_error=(error, "max"),
        mean_absolute_error=(error, lambda errors: errors.abs().mean()),
        others_busy_cores=("others_busy_cores", "max"),
    )
    return columns.astype(object).where(columns.notna(), None).to_dict("records")


def system_errors(compared: Sequence[FlatRecord]) -> dict[str, float]:
    """Mean absolute error of each system over its workloads and repeats."""
    frame = frame_of(compared, ("system", "mean_absolute_error"))
    return frame.groupby("system", sort=False)["mean_absolute_error"].mean().to_dict()


def print_comparison(compared: Sequence[FlatRecord], console: Console) -> None:
    console.print("Output tokens/s of this machine: measured and SIMULATED", highlight=False)
    spread = "{lowest_error:+.1%} to {highest_error:+.1%}"
    console.print(rows_table([{**row, "spread": spread.format(**row)} for row in compared], COMPARED))
    means = ", ".join(
        f"{system} {error:.1%}" + ("" if error <= AIM else f" (above the aim of {AIM:.0%})")
        for system, error in system_errors(compared).items()
    )
    console.print(f"mean absolute error of all runs: {means or 'nothing to compare'}", highlight=False)
    console.print("others: cores that other work on this machine kept busy in the worst repeat", highlight=False)


def print_operations(errors: Sequence[OperationError], console: Console) -> None:
    console.print("Profile table at sizes that were held out: predicted against measured", highlight=False)
    rows = [asdict(error) | {"operation": error.operation.replace("_", " ")} for error in errors]
    console.print(rows_table(rows, OPERATIONS))


def draw_validation(summary: Sequence[FlatRecord], machine: Mapping[str, Any]) -> Figure:
    """A point for each pair of runs in ``summary``: colours are systems, shapes are workloads."""
    real, simulated = "output_tokens_per_s", "simulated_output_tokens_per_s"
    records = [record for record in summary if record["simulated_error"] is not None]
    workloads, systems = (tuple(dict.fromkeys(record[name] for record in records)) for name in ("workload", "system"))
    marker_of = dict(zip(workloads, itertools.cycle(MARKERS), strict=False))
    first = records[0]
    device = first["gpu"] or f"{machine['cpu']}, {machine['usable_cores']} cores, no GPU"
    text = FigureText(
        "The simulator against this machine",
        f"{first['model']} ({first['dtype']}) on {device}\n{first['num_requests']} requests at once; a point is a pair "
        "of runs",
        "Vertical: SIMULATED from profiles measured right before and after the run. "
        f"Band: within {AIM:.0%} of the measured rate.",
    )
    figure, ((ax,),) = sheet(text, width=6.6, height=4.6, below=0.5, above=0.2)
    ends = (0.0, 1.1 * max(record[name] for record in records for name in (real, simulated)))
    ax.fill_between(ends, [(1 - AIM) * x for x in ends], [(1 + AIM) * x for x in ends], color="#E8E8E8", zorder=0)
    ax.plot(ends, ends, color=FAINT, linewidth=0.8, zorder=1)
    for record in records:
        look = {"color": system_colour(record["system"]), "markersize": 6, "alpha": 0.85, "markeredgewidth": 0}
        ax.plot(record[real], record[simulated], marker_of[record["workload"]], **look)
    for workload, marker in marker_of.items():
        ax.plot([], [], marker, color=FAINT, label=workload, linestyle="none")
    ax.legend(loc="upper left", frameon=False)
    legend(figure, systems)
    ax.set(xlim=ends, ylim=ends, xlabel="measured output tokens/s", ylabel="SIMULATED output tokens/s")
    tidy_axes(ax, grid="both")
    return figure


# -- profiles before and after a run -----------------------------------------------------------------------------------


FRESH_S = 5.0
"""Maximum age (seconds) at which the profile after one run is reused as the profile before the next."""


class MachineProfiles:
    """Measures profiles before and after runs. The profile after a run also serves as the one before the next run."""

    def __init__(self) -> None:
        self._last: tuple[EngineConfig, float, ProfiledMachine] | None = None

    def profile_before(self, config: EngineConfig) -> ProfiledMachine:
        if self._last is not None:
            last_config, taken_s, machine = self._last
            if last_config == config and time.monotonic() - taken_s < FRESH_S:
                return machine
        return self.profile_after(config)

    def profile_after(self, config: EngineConfig) -> ProfiledMachine:
        machine = measure_machine(config)
        self._last = (config, time.monotonic(), machine)
        return machine


@contextmanager
def idle_backend(config: EngineConfig) -> Iterator[TorchBackend]:
    """A backend that does nothing, with the worker thread of a serving engine."""
    from swiftllm.runtime.cpu_tier import CpuWorker  # torch is loaded only where something really runs
    from swiftllm.runtime.torch_backend import open_torch_backend

    backend = open_torch_backend(config, CpuWorker)
    try:
        yield backend
    finally:
        backend.close()


def measure_machine(config: EngineConfig) -> ProfiledMachine:
    from apex.perf.machine_profile import measure_profile
    from swiftllm.build import scheduler_limits

    with idle_backend(config) as backend:
        table, limits = measure_profile(config, backend), scheduler_limits(config, backend)
        return ProfiledMachine(table, backend.num_layers, limits, backend.dtype_name, backend.device_name)


def mean_machine(first: ProfiledMachine, second: ProfiledMachine) -> ProfiledMachine:
    """The mean of two profiles of one machine, since its speed drifts by the second with the other work on it."""
    return replace(first, table=mean_table(first.table, second.table))


def mean_table(first: ProfileTable, second: ProfileTable) -> ProfileTable:
    parts = {field.name: getattr(first, field.name) for field in fields(first)}
    for name, value in parts.items():
        if name != "identity":
            parts[name] = _mean(value, getattr(second, name))
    return ProfileTable(**parts)


def _mean(
    first: Curve | Surface | float | None, second: Curve | Surface | float | None
) -> Curve | Surface | float | None:
    if first is None or second is None:
        return None
    if isinstance(first, Surface):
        return Surface(first.firsts, tuple(map(_mean, first.curves, second.curves)))
    if isinstance(first, Curve):
        return Curve(first.sizes, tuple(map(_mean, first.seconds, second.seconds)))
    return (first + second) / 2


# -- operation by operation -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OperationError:
    """Predicted over measured seconds minus 1, at sizes that are not in the table."""

    operation: str
    sizes: int
    median: float
    p90: float
    bias: float
    """The signed median: positive where the table predicts too slow a time."""


def operation_errors(config: EngineConfig) -> list[OperationError]:
    """Profile the machine at the table's sizes and at held-out sizes in the same rounds; predict the held-out ones."""
    from apex.perf.machine_profile import make_workbench, profile_identity
    from apex.perf.profiler import SizeGrid, measure_seconds, table_from_seconds

    others = SizeGrid(
        linear_tokens=(3, 6, 12, 20, 40, 80, 112, 160, 224, 384, 768),
        sampled_rows=(3, 6, 12, 24, 48, 96),
        swapped_blocks=(4, 16),
        prefill_tokens=(8, 24, 48, 96, 192, 384),
        prefill_cached=(0, 64, 512),
        prefill_chunks_counts=(2, 4, 16),
        decode_requests=(2, 8, 32),
        decode_contexts=(64, 256, 1024),
        iteration_requests=(8, 32, 128),
    )
    with idle_backend(config) as backend:
        bench = make_workbench(config, backend)
        known, held_out = measure_seconds(bench, config.max_num_batched_tokens, SizeGrid(), others)
        model = PerfModel(table_from_seconds(known, profile_identity(config, backend)), backend.num_layers)
    errors = []
    for operation, predict in predictions(model).items():
        sizes = [size for size in held_out[operation] if size not in known[operation]]
        if sizes:
            relative = [predict(size) / held_out[operation][size] - 1.0 for size in sizes]
            errors.append(operation_error(operation, relative))
    return errors


def operation_error(operation: str, relative: Sequence[float]) -> OperationError:
    absolute = sorted(map(abs, relative))
    p90 = absolute[round(0.9 * (len(absolute) - 1))]
    return OperationError(operation, len(relative), statistics.median(absolute), p90, statistics.median(relative))


def predictions(model: PerfModel) -> dict[str, Callable]:
    """Seconds by size, for the operations of the profiler's grid."""
    return {
        "linear": model.linear_s,
        "first": model.first_stage_s,
        "last": model.last_stage_s,
        "prefill_attention": lambda size: model.prefill_attention_s([size]),
        "prefill_attention_cpu_tier": lambda size: model.prefill_attention_s([size], [size]),
        "prefill_chunks": lambda size: model.prefill_attention_s([(size[1], 0)] * size[0]),
        "gpu_attention": lambda size: model.gpu_attention_s(size[0], size[0] * size[1]),
        "cpu_attention": lambda size: model.cpu_attention_s(size[0], size[0] * size[1]),
        "swap": model.swap_s,
        "iteration": model.host_work_s,
    }
