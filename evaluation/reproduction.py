"""What every ``reproduce_*.py`` does: points from the experiment file, run, draw, tell, compare with the claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from rich.console import Console

from apex.systems import SYSTEMS
from evaluation import measured, sweeps
from evaluation.claims import load_claims, print_claims
from evaluation.experiment import Point, run_experiment
from evaluation.figures.apex_paper import draw_sensitivity
from evaluation.figures.style import save
from evaluation.figures.table import print_results
from evaluation.options import FigureOptions, experiment_settings, make_measured_plan
from evaluation.points import run_point
from evaluation.provenance import machine_identity
from evaluation.results import FlatRecord
from evaluation.sensitivity import parse_sensitivity, varied_in

MEASURED = frozenset({"torch", "http"})

Draw = Callable[[Sequence[FlatRecord], Mapping[str, Any]], plt.Figure]


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper: ``name`` is that of its experiment file, its result folder and its claims.

    ``draw`` takes summary records and the machine they were measured on. ``metric`` is what its sensitivity is about,
    ``what`` that metric in words. ``backends`` run when none is asked for.
    """

    name: str
    title: str
    draw: Draw
    metric: str
    what: str
    backends: tuple[str, ...] = ("simulated",)


def reproduce(figure: PaperFigure, options: FigureOptions) -> int:
    """Run what is not there yet, draw, tell. Returns the exit status: 0 when every point is finished, 2 for options
    that do not fit."""
    console = Console()
    try:
        if options.from_folder is not None:
            folder, summary, machine = read_folder(options.from_folder)
            show(figure, folder, summary, machine, console)
            return 0
        name = figure.name if options.sensitivity is None else f"{figure.name}_sensitivity"
        points, configuration = make_points(figure, options, console)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 2
    described = {"experiment": name, **configuration}
    outcome = run_experiment(name, described, points, run_point, options.results_dir, console, options.num_jobs)
    if outcome.summary:
        show(figure, outcome.folder, outcome.summary, machine_identity(), console)
    for label in outcome.failed:
        console.print(f"failed: {label}", style="bold red", highlight=False, markup=False)
    console.print(f"summary, figure, raw records and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return 1 if outcome.failed else 0


def make_points(figure: PaperFigure, options: FigureOptions, console: Console) -> tuple[list[Point], dict[str, Any]]:
    """The points of the chosen backends, and what goes into the run's identity.

    Raises:
        ValueError: an option does not fit; the message says what would.
        ConnectionError: a server does not answer; the message says what to start.
    """
    backends = figure.backends if options.backend is None else (options.backend,)
    if options.url and options.backend != "http":
        raise ValueError("--url goes with --backend http")
    if options.sensitivity is not None:
        if options.backend in MEASURED:
            raise ValueError("--sensitivity varies assumptions, which only --backend simulated has")
        backends = ("simulated",)
    points: list[Point] = []
    configuration: dict[str, Any] = {}
    if "simulated" in backends:
        simulated = simulated_points(figure.name, options)
        points += simulated
        configuration["simulated"] = sweeps.describe(simulated)
    for backend in MEASURED.intersection(backends):
        try:
            plan = make_measured_plan(figure.name, measured_options(options))
        except ValueError as error:
            if "simulated" not in backends:
                raise
            console.print(f"the measured half is left out: {error}", style="yellow", highlight=False, markup=False)
        else:
            here = measured.make_points(plan)
            points += here
            configuration[backend] = measured.configuration(plan, here)
    return points, configuration


def simulated_points(name: str, options: FigureOptions) -> list[Point]:
    sweep = sweeps.make_sweep(
        experiment_settings(name, options.config)["simulated"],
        gpu=options.gpu,
        systems=options.systems,
        num_requests=options.num_requests,
        seed=options.seed,
        trace_dir=options.trace_dir,
    )
    if options.sensitivity is None:
        return sweeps.make_points(sweep)
    return sweeps.make_sensitivity_points(sweep, parse_sensitivity(options.sensitivity))


def measured_options(options: FigureOptions) -> FigureOptions:
    """The options for the measured part.

    Beside a simulation the number of requests is the simulation's (thousands would take this machine hours), and the
    systems are those that run on real hardware.
    """
    systems = options.systems
    if options.backend == "torch" and (unknown := [system for system in systems or () if system not in SYSTEMS]):
        raise ValueError(f"no system {', '.join(unknown)} on the torch backend; there are {', '.join(SYSTEMS)}")
    if options.backend in MEASURED:
        return options
    return replace(
        options,
        num_requests=None,
        systems=tuple(system for system in systems if system in SYSTEMS) if systems else None,
    )


def read_folder(folder: Path) -> tuple[Path, list[FlatRecord], dict[str, Any]]:
    """Folder, summary and machine of a finished run.

    Raises:
        ValueError: it holds no results.
    """
    summary_file, provenance_file = folder / "summary.json", folder / "provenance.json"
    if not summary_file.is_file() or not (summary := json.loads(summary_file.read_text())):
        raise ValueError(f"no results in {folder}: give a folder that has a summary.json, such as results/fig7/latest")
    machine = json.loads(provenance_file.read_text())["machine"] if provenance_file.is_file() else machine_identity()
    return folder.resolve(), summary, machine


def show(
    figure: PaperFigure, folder: Path, summary: Sequence[FlatRecord], machine: Mapping[str, Any], console: Console
) -> None:
    """Draw the figure into its folder; print the results and the claims beside them."""
    claims = load_claims(figure.name)
    varied = varied_in(summary)
    if varied:
        drawing = draw_sensitivity(summary, claims, figure.metric, figure.what, machine)
    else:
        drawing = figure.draw(summary, machine)
    png, _ = save(drawing, folder)
    print_results(figure.title, summary, console)
    if not varied:
        print_claims(claims, summary, console)
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)
