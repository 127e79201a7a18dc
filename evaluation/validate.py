"""Validates the simulator: real runs of the torch backend on this machine, or of vLLM elsewhere, against the same runs
simulated.

python evaluation/validate.py [--help], or: apex validate

The simulator's only input about a machine is tables of operator times. Here they are measured right before and after
each real run; a folder of a run elsewhere (``--run``) holds them.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from matplotlib.figure import Figure
from rich.console import Console

from apex.cli.options import ConfigFile, SystemName, parse_command
from apex.cli.output import stdout_console
from evaluation.drivers import TorchTask, run_simulated_point, run_torch_point
from evaluation.groundtruth.judge import show_runs
from evaluation.measure.live_systems import (
    MachineProfiles,
    OperationError,
    ProfiledMachine,
    mean_machine,
    operation_errors,
    simulated_twin,
)
from evaluation.plots.style import FAINT, FigureText, legend, save_figure, sheet, system_colour, tidy_axes
from evaluation.results.folder import FlatRecord, to_json
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.rows import frame_of
from evaluation.results.tables import rows_table
from evaluation.run import Point, PointResult, Run, one_line_errors
from evaluation.studies.papers import FigureOptions, small_points
from evaluation.study import Study
from swiftllm.config import EngineConfig
from swiftllm.files import write_atomically

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

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


@dataclass(frozen=True)
class Options(ConfigFile):
    """Run workloads of Figure 5 both for real and SIMULATED with this machine's own profile, and report the error.

    With the default model on two cores, each system, workload and repeat takes about 12 s. Running the same command
    again continues an interrupted run.
    """

    model: Path | None = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    systems: tuple[SystemName, ...] = ("swiftllm", "neo", "apex")
    """Systems to validate."""
    workloads: tuple[str, ...] = ("osc", "azure-conv")
    """Workloads of configs/experiments/fig5.yaml."""
    output_len: float = 96
    """Average output length (tokens, before scaling) of workloads that sweep it."""
    num_requests: int = 32
    """Number of requests of every workload."""
    repeats: int = 3
    """How many times to profile, run and simulate everything; reports the median error and its spread."""
    run: tuple[str, ...] = ()
    """Instead, predict real runs of vLLM on other cards, each from the operator tables in its folder: a folder, or a
    name in configs/groundtruth. Prints and draws measured beside SIMULATED. docs/simulator.md describes the files."""
    run_model: Path | None = None
    """Folder of the config.json of the run's model, where the model is not known by its name."""
    terms: bool = False
    """With --run: also the errors term by term, of cards in configs/hardware."""
    results_dir: Path = RESULTS_DIR
    """Results go to validate/<run>/ in this folder, those of --run to real-runs/<run>/."""


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


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every run is finished, whatever the errors; 2 for invalid options. With ``--run``
    1 where an error has grown, see :func:`show_runs`."""
    if options.run:
        return show_runs(
            options.run, options.run_model, options.results_dir, stdout_console(), with_terms=options.terms
        )
    if options.terms or options.run_model:
        raise ValueError("--terms and --run-model mean nothing without --run")
    wanted = FigureOptions(
        model=options.model,
        systems=options.systems,
        workloads=options.workloads,
        num_requests=options.num_requests,
        output_lens=(options.output_len,),
        repeats=options.repeats,
    )
    made, configuration = small_points("fig5", wanted)
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
    console = stdout_console()
    return experiment.run(points, options.results_dir, console=console).print_outcome(console)


def command(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; ``arguments`` are those of the process by default."""
    return main(parse_command(Options, "apex validate", sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(command())
