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

from evaluation.experiments.adaptive.points import (
    capacity_points,
    case_points,
    latency_points,
    map_points,
    requests_per_s,
    wrong_table_points,
)
from evaluation.experiments.adaptive.ratios import with_error_ratios, with_latency_ratios, with_ratios
from evaluation.experiments.axes import OWN_KERNELS
from evaluation.experiments.experiment import Experiment, command
from evaluation.experiments.grid import Grid
from evaluation.experiments.options import Names, TraceOptions, experiment_settings
from evaluation.experiments.places import FIELDS
from evaluation.experiments.runner import Derive, Point, Run
from evaluation.figures.adaptive.cases import draw_cases
from evaluation.figures.adaptive.heat_map import draw_map
from evaluation.figures.adaptive.latency import draw_latency
from evaluation.figures.adaptive.tables import print_cases, print_latency, print_map, print_wrong_tables
from evaluation.figures.style import show_figure
from evaluation.results.folder import FlatRecord
from swiftllm.systems import find_system

NAME = "adaptive"
CAPACITY = f"{NAME}-capacity"
"""Result folder of the throughput of which the loads of part latency are fractions."""

Settings = Mapping[str, Any]
Tables = Callable[[Sequence[FlatRecord], Console], None]
Draw = Callable[[Sequence[FlatRecord]], Figure]
PartName = Literal["cases", "map", "latency", "wrong-tables"]


@dataclass(frozen=True)
class Options(TraceOptions):
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


def grid_of(options: Options, section: Settings, systems: Sequence[str], **axes: Any) -> Grid:
    """The grid of a section with the chosen options and systems; ``axes`` vary more slowly than the systems."""
    grid = Grid.read(section, FIELDS | {"case"}, "quick" if options.quick else None)
    if options.seed is not None:
        grid = grid.with_(seed=options.seed)
    of_run = {"hand_over_us": options.hand_over_us, "without": [options.without], "trace_dir": options.trace_dir}
    return grid.with_(**of_run, **axes, system=[find_system(name).name for name in options.systems or systems])


def cases(options: Options, settings: Settings, part: Settings | None = None, **axes: Any) -> Grid:
    """The chosen cases, by default those of the part of the experiment file, with its systems."""
    part = {"case": None, "system": settings["system"], **(part or {})}
    chosen = None if options.cases == ("all",) else options.cases or part["case"]
    kernel = options.kernel or OWN_KERNELS
    return grid_of(options, settings["cases"], part["system"], kernel=kernel, **axes).only("case", chosen)


def cells(options: Options, settings: Settings) -> Grid:
    if options.cases:
        raise ValueError("the map has cells in place of cases: leave out --cases")
    grid = grid_of(options, settings["map"], settings["system"])
    return grid.with_(kernel=[options.kernel]) if options.kernel else grid


def under_load(options: Options, part: Settings, settings: Settings) -> list[Point]:
    """The points under load, once it is known what the cases serve.

    Raises:
        ValueError: a name is unknown, or no throughput is known.
    """
    loaded = cases(options, settings, part, loaded_as=part["loaded_as"], load=part["load"])
    points = capacity_points(loaded.with_(system=part["loaded_as"], load=None))
    capacity = Experiment(CAPACITY).run(points, options.results_dir, options.jobs)
    if capacity.failed:
        raise ValueError(f"no throughput of {', '.join(capacity.failed)}; see errors/ in {capacity.folder}")
    return latency_points(loaded, requests_per_s(capacity.summary))


def experiments(options: Options) -> list[Experiment]:
    """The experiment of each part."""
    settings = experiment_settings(NAME, options.config)
    published = settings["published"]  # the papers' systems, to which all are compared

    def experiment(
        name: str, make: Callable[[Options], list[Point]], derive: Derive, tables: Tables, draw: Draw | None = None
    ) -> Experiment:
        return Experiment(name, functools.partial(show, tables, draw), make, derive)

    return [
        experiment(
            NAME,
            lambda options: case_points(cases(options, settings)),
            with_ratios(published),
            print_cases,
            draw_cases,
        ),
        experiment(
            f"{NAME}-map",
            lambda options: map_points(cells(options, settings)),
            with_ratios(published, at=("output_len",), any_of=("kernel", "host_read_gb_s")),
            print_map,
            draw_map,
        ),
        experiment(
            f"{NAME}-latency",
            lambda options: under_load(options, settings["latency"], settings),
            with_latency_ratios(published),
            print_latency,
            draw_latency,
        ),
        experiment(
            f"{NAME}-wrong-tables",
            lambda options: wrong_table_points(cases(options, settings).with_(**settings["wrong_tables"])),
            with_error_ratios(published),
            print_wrong_tables,
        ),
    ]


def show(tables: Tables, draw: Draw | None, run: Run, console: Console) -> None:
    """``draw`` is None where tables say it all."""
    tables(run.summary, console)
    if draw is not None:
        show_figure(draw(run.summary), run.folder, console)


main = command(Options, experiments, lambda options: [NAME if options.part == "cases" else f"{NAME}-{options.part}"])

if __name__ == "__main__":
    sys.exit(main())
