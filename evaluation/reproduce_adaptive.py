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

from typing import Any, Literal, get_args

from matplotlib.figure import Figure
from rich.console import Console

from evaluation.experiments.adaptive import points, ratios, show
from evaluation.grid import FIELDS, OWN_KERNELS, Grid
from evaluation.options import Names, TraceOptions, experiment_settings, given
from evaluation.plots.style import show_figure
from evaluation.results.folder import FlatRecord
from evaluation.run import Derive, Point, Run
from evaluation.study import Study, command
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
    """What submitting an attention task to the CPU worker costs the GPU batch, in microseconds."""
    without: Literal["prompt-chunks", "free-running", "lockstep"] | None = None
    """Switch off one of the ideas of adaptive, to see what it is worth."""
    seed: int | None = None
    """Seed of lengths and arrivals; by default that of the experiment file."""


def grid_of(options: Options, section: Settings, systems: Sequence[str], **axes: Any) -> Grid:
    """The grid of a section with the chosen options and systems; ``axes`` vary more slowly than the systems."""
    grid = Grid.read(section, FIELDS | {"case"}, "quick" if options.quick else None)
    axes |= given(seed=options.seed)
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
    at_once = points.capacity_points(loaded.with_(system=part["loaded_as"], load=None))
    capacity = Study(CAPACITY).run(at_once, options.results_dir, options.jobs)
    if capacity.failed:
        raise ValueError(f"no throughput of {', '.join(capacity.failed)}; see errors/ in {capacity.folder}")
    return points.latency_points(loaded, points.requests_per_s(capacity.summary))


def experiments(options: Options) -> list[Study]:
    """The experiment of each part."""
    settings = experiment_settings(NAME, options.config)
    published = settings["published"]  # the papers' systems, to which all are compared
    made: dict[PartName, Callable[[Options], list[Point]]] = {
        "cases": lambda options: points.case_points(cases(options, settings)),
        "map": lambda options: points.map_points(cells(options, settings)),
        "latency": lambda options: under_load(options, settings["latency"], settings),
        "wrong-tables": lambda options: points.wrong_table_points(
            cases(options, settings).with_(**settings["wrong_tables"])
        ),
    }
    derived: dict[PartName, Derive] = {
        "cases": lambda rows: ratios.with_ratios(rows, published),
        "map": lambda rows: ratios.with_ratios(rows, published, ("output_len",), ("kernel", "host_read_gb_s")),
        "latency": lambda rows: ratios.with_latency_ratios(rows, published),
        "wrong-tables": lambda rows: ratios.with_error_ratios(rows, published),
    }
    shown: dict[PartName, tuple[Tables, Draw | None]] = {
        "cases": (show.print_cases, show.draw_cases),
        "map": (show.print_map, show.draw_map),
        "latency": (show.print_latency, show.draw_latency),
        "wrong-tables": (show.print_wrong_tables, None),
    }
    return [
        Study(name_of(part), functools.partial(show_rows, *shown[part]), made[part], derived[part])
        for part in get_args(PartName)
    ]


def show_rows(tables: Tables, draw: Draw | None, run: Run, console: Console) -> None:
    """``draw`` is None where tables say it all."""
    tables(run.summary, console)
    if draw is not None:
        show_figure(draw(run.summary), run.folder, console)


def name_of(part: PartName) -> str:
    return NAME if part == "cases" else f"{NAME}-{part}"


main = command(Options, experiments, lambda options: [name_of(options.part)])

if __name__ == "__main__":
    sys.exit(main())
