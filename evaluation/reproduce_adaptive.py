"""Compares the scheduler `adaptive` with the papers' schedulers: 25 cases, a map, latency under load, wrong tables.

python evaluation/reproduce_adaptive.py [--part map] [--quick] [--help]
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Any, Literal

from matplotlib.figure import Figure
from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.adaptive.bandwidth_map import CPU, make_map_points
from evaluation.experiments.adaptive.cases import Selection, make_case_points
from evaluation.experiments.adaptive.latency import (
    make_capacity_points,
    make_latency_points,
    requests_per_s,
    with_latency_ratios,
)
from evaluation.experiments.adaptive.ratios import with_ratios
from evaluation.experiments.adaptive.wrong_tables import make_wrong_table_points, with_error_ratios
from evaluation.experiments.experiment import Experiment, Show, show_again
from evaluation.experiments.options import File, FromFolder, Jobs, Names, ResultsDir, TraceDir, experiment_settings
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Point, Run, one_line_errors, run_experiment
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.figures.adaptive.cases import draw_cases
from evaluation.figures.adaptive.heat_map import draw_map
from evaluation.figures.adaptive.latency import draw_latency
from evaluation.figures.adaptive.tables import print_cases, print_latency, print_map, print_wrong_tables
from evaluation.figures.style import show_figure
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR
from swiftllm.machine import usable_cores

NAME = "adaptive"
CAPACITY = f"{NAME}-capacity"
"""Result folder of the throughput of which the loads of part latency are fractions."""

PartName = Literal["cases", "map", "latency", "wrong-tables"]


@dataclass(frozen=True)
class Options:
    """The scheduler `adaptive` beside the papers' schedulers, SIMULATED (predicted times, no GPU needed).

    The cases and all constants come from configs/experiments/adaptive.yaml. Results, figure and provenance go to
    results/adaptive/<run>/, those of the other parts to results/adaptive-<part>/<run>/. Running the same command again
    continues an interrupted run.
    """

    part: PartName = "cases"
    """cases: throughput of 25 cases (two minutes on two cores).
    map: throughput over CPU bandwidth and output length (15 minutes on two cores).
    latency: latency of some cases under load, beside neo and apex.
    wrong-tables: throughput of the cases where the profile table is wrong about CPU attention."""
    cases: Names = None
    """Cases to run; by default those of the experiment file for this part. all: every case there is."""
    systems: Names = None
    """Systems to compare, in this order; by default those of the experiment file."""
    quick: bool = False
    """Fewer requests in every case: faster, but mostly filling and draining."""
    kernel: str | None = None
    """CPU attention kernel of every system: native, ispc or llamafile; by default the one of the system's paper.
    The map has two halves by default: the papers' kernels, and native for all."""
    hand_over_us: float = 0.0
    """What submitting a ticket to the CPU worker costs the lane, in microseconds."""
    without: Literal["prompt-chunks", "free-running", "lockstep"] | None = None
    """Switch off one of the ideas of adaptive, to see what it is worth."""
    seed: int | None = None
    """Seed of lengths and arrivals; by default that of the experiment file."""
    jobs: Jobs = None
    trace_dir: TraceDir = None
    config: File = None
    """Experiment file to use instead of configs/experiments/adaptive.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to adaptive/<run>/ or adaptive-<part>/<run>/ in this folder."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from this result folder, of any part."""


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    settings, console = experiment_settings(NAME, options.config), stdout_console()
    experiments = experiments_of(settings["published"])
    if options.from_folder is not None:
        return show_again(options.from_folder, list(experiments.values()))
    selection = selection_of(options, settings)
    points = {
        "cases": make_case_points,
        "map": make_map_points,
        "latency": functools.partial(latency_points, options, console),
        "wrong-tables": make_wrong_table_points,
    }[options.part](settings, selection)
    return experiments[options.part].run(points, options.results_dir, console, options.jobs)


def selection_of(options: Options, settings: Mapping[str, Any]) -> Selection:
    cases = options.cases
    return Selection(
        cases=[raw["case"] for raw in settings["cases"]] if cases == ("all",) else cases,
        systems=options.systems,
        quick=options.quick,
        kernel=options.kernel,
        hand_over_us=options.hand_over_us,
        without=options.without,
        seed=options.seed,
        trace_dir=options.trace_dir,
    )


def latency_points(
    options: Options, console: Console, settings: Mapping[str, Any], selection: Selection
) -> list[Point]:
    """The points under load, once it is known what the cases serve.

    Raises:
        ValueError: a name is unknown, or no throughput is known.
    """
    points = make_capacity_points(settings, selection)
    make_latency_points(settings, selection, {point.task.values["case"]: 1.0 for point in points})  # refuse names early
    described = {"experiment": CAPACITY, "simulated": describe_simulated_points(points)}
    jobs = options.jobs or usable_cores()
    capacity = run_experiment(CAPACITY, described, points, run_point, options.results_dir, console, jobs)
    if capacity.failed:
        raise ValueError(f"no throughput of {', '.join(capacity.failed)}; see errors/ in {capacity.folder}")
    return make_latency_points(settings, selection, requests_per_s(capacity.summary))


def experiments_of(published: Sequence[str]) -> dict[PartName, Experiment]:
    """The experiment of each part. ``published`` are the papers' systems, to which all are compared."""
    return {
        "cases": Experiment(NAME, shows(print_cases, draw_cases), with_ratios(published)),
        "map": Experiment(
            f"{NAME}-map", shows(print_map, draw_map), with_ratios(published, at=("output_len",), any_of=CPU)
        ),
        "latency": Experiment(f"{NAME}-latency", shows(print_latency, draw_latency), with_latency_ratios(published)),
        "wrong-tables": Experiment(f"{NAME}-wrong-tables", shows(print_wrong_tables), with_error_ratios(published)),
    }


def shows(
    print_tables: Callable[[Sequence[FlatRecord], Console], None],
    draw: Callable[[Sequence[FlatRecord]], Figure] | None = None,
) -> Show:
    """``draw`` is None where tables say it all."""

    def show(run: Run, console: Console) -> None:
        print_tables(run.summary, console)
        if draw is not None:
            show_figure(draw(run.summary), run.folder, console)

    return show


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
