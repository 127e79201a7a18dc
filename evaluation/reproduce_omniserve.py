"""Reproduces the figures of OmniServe's evaluation (10 to 19), SIMULATED, and compares them with its claims.

python evaluation/reproduce_omniserve.py [--figure a10 10 18] [--help]
python evaluation/reproduce_omniserve.py --figure http           # MEASURED: servers on this machine
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal, get_args

import tyro
from rich.console import Console

from apex.cli.output import table
from evaluation.experiments.omniserve.points import omniserve_points, read_grid
from evaluation.experiments.omniserve.ratios import with_service_ratios
from evaluation.experiments.omniserve.served import (
    contract,
    found_here,
    read_http_grid,
    run_served_point,
    served_point,
)
from evaluation.experiments.omniserve.show import draw_omniserve, print_omniserve
from evaluation.grid import Grid
from evaluation.measure.sessions import stop_on_sigterm
from evaluation.options import Folder, Names, TraceOptions, experiment_settings, given
from evaluation.plots.style import show_figure
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.paths import model_folder
from evaluation.results.provenance import model_identity
from evaluation.run import Point, Run, identity
from evaluation.study import Study, command
from swiftllm.systems import find_system

FigureName = Literal["a10", "a10-limits", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "http"]
HTTP = "http"
SIMULATED = tuple(name for name in get_args(FigureName) if name != HTTP)
ALSO_DRAWN = {"15": "10", "16": "11"}
"""Figures of best-effort requests, and the figure of the same run for the latency-sensitive ones."""


@dataclass(frozen=True)
class Options(TraceOptions):
    """The figures of OmniServe's evaluation, SIMULATED (predicted times, no GPU needed), but for figure http.

    Defaults come from configs/experiments/omniserve.yaml. Results, figure and provenance go to
    results/omniserve-fig<figure>/<run>/ or results/omniserve-a10.../<run>/. Running the same command again continues an
    interrupted run.
    """

    figure: Annotated[tuple[FigureName, ...], tyro.conf.arg(metavar="FIGURE ...")] = SIMULATED
    """Figures of the paper. 10, 11, 12: attainment over request rate; 13: over the target; 14: under bursts;
    15, 16, 17: best-effort throughput (15 and 16 are drawn with 10 and 11); 18: CPU hosts; 19: admission control.
    a10: a GPU with little memory, which the paper does not have; a10-limits: where the gain on it ends.
    All of these by default. http: a small model on this machine, MEASURED at the client of one server after the
    other."""
    systems: Names = None
    """Systems to run, of those of each figure; by default all."""
    quick: bool = False
    """A short duration for every point: a rehearsal, in which the CPU's memory does not fill."""
    duration: float | None = None
    """Seconds of every point, virtual ones but for http; by default from the experiment file."""
    seed: int | None = None
    """Seed of lengths and arrivals; by default that of the experiment file."""
    model: Folder = None
    """Folder of the model that figure http serves; by default SmolLM2-135M-Instruct."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.duration is not None and self.duration <= 0:
            raise ValueError(f"--duration {self.duration:g} must be more than 0 seconds")


def experiments(options: Options) -> list[Study]:
    """Those of the sections of the experiment file, and the one that serves."""
    settings = experiment_settings("omniserve", options.config)

    def simulated(section: str, here: Mapping[str, Any]) -> Study:
        def points(options: Options) -> list[Point]:
            grid = read_grid(settings, section, "quick" if options.quick else None)
            return omniserve_points(settings, as_chosen(grid, options, settings["seed"]))

        name = name_of(section)
        return Study(name, functools.partial(show, here, name), points, with_service_ratios)

    model = functools.cache(lambda: model_folder(options.model))
    served = Study(
        name_of(HTTP),
        functools.partial(show_served, settings[HTTP]),
        lambda options: served_points(options, settings, model()),
        with_service_ratios,
        run_served_point,
        lambda points: described(points, model()),
    )
    return [served, *(simulated(section, here) for section, here in settings["figures"].items())]


def as_chosen(grid: Grid, options: Options, seed: int) -> Grid:
    """The grid with the options; of its systems those that are chosen.

    Raises:
        ValueError: a system is unknown.
    """
    chosen = given(seed=options.seed, duration_s=options.duration)
    grid = grid.with_(**{"seed": seed, "trace_dir": options.trace_dir, **chosen})
    names = {find_system(name).name for name in options.systems or ()}
    return Grid(tuple(place for place in grid.places() if not names or place["system"] in names))


def chosen(options: Options) -> list[str]:
    figures = [ALSO_DRAWN.get(figure, figure) for figure in options.figure]
    return [name_of(f"fig{figure}" if figure.isdigit() else figure) for figure in figures]


def described(points: Sequence[Point], model: Path) -> dict[str, Any]:
    return {"model": model_identity(model), "points": identity(points)}


def served_points(options: Options, settings: Mapping[str, Any], model: Path) -> list[Point]:
    """The points of figure http. Latency-sensitive requests alone come first: they decide the targets and the pool.

    Raises:
        ValueError: they could not be measured.
    """
    stop_on_sigterm()
    section = settings[HTTP]
    grid = read_http_grid(section, "quick" if options.quick else None)
    first = as_chosen(grid.only("panel", ["alone"]), replace(options, systems=None), settings["seed"])
    logs, name = options.results_dir / name_of(HTTP) / "logs", f"{name_of(HTTP)}-alone"

    def points(grid: Grid, **found: Any) -> list[Point]:
        return [served_point(place, section["streams"], model, logs) for place in grid.with_(**found).places()]

    alone = Study(name, run_point=run_served_point, describe=lambda points: described(points, model))
    measured = alone.run(points(first, panel="ample", num_gpu_blocks=section["ample_blocks"]), options.results_dir)
    if not measured.summary:
        raise ValueError(f"nothing was measured on this machine; see errors/ in {measured.folder}")
    rest = as_chosen(grid.only("panel", ["both", "queued"]), options, settings["seed"])
    return points(Grid(first.panels + rest.panels), **found_here(section, measured.summary[0]))


def show_served(section: Mapping[str, Any], run: Run, console: Console) -> None:
    print_omniserve(section["shows"], run.summary, console)
    rows = [(words, bound, found, "yes" if holds else "NO") for words, bound, found, holds in contract(run.summary)]
    console.print(table(("what must hold", "bound", "found", "holds"), rows, left=("what must hold", "bound", "found")))


def name_of(section: str) -> str:
    """The name of a section's result folder and of its claims."""
    return f"omniserve-{section}"


def show(section: Mapping[str, Any], name: str, run: Run, console: Console) -> None:
    print_omniserve(section["shows"], run.summary, console)
    if claims := load_claims(name):
        print_claims(claims, run.summary, console, with_assumptions=False)
        for line in section.get("differs", ()):
            console.print(f"Why it differs: {line}", highlight=False, markup=False, soft_wrap=True)
    show_figure(draw_omniserve(section, run.summary), run.folder, console)


main = command(Options, experiments, chosen)

if __name__ == "__main__":
    sys.exit(main())
