"""The steps of every ``reproduce_*.py``: make points, run them, draw, print, compare with the papers' claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from rich.console import Console

from apex.cli.output import stdout_console
from evaluation.experiments.live_systems import LiveSystems
from evaluation.experiments.measured_sweeps import describe_measured_plan, make_measured_points
from evaluation.experiments.options import (
    FigureOptions,
    experiment_settings,
    make_measured_plan,
    refuse_unused_options,
)
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Complete, Point, RunPoint, print_error, run_experiment, unchanged_rows
from evaluation.experiments.sensitivity import parse_sensitivity, varied_in
from evaluation.experiments.simulated_sweeps import (
    Sweep,
    describe_simulated_points,
    make_sensitivity_points,
    make_simulated_points,
    make_sweep,
)
from evaluation.figures.apex_paper import draw_sensitivity
from evaluation.figures.style import save_figure
from evaluation.figures.table import print_results
from evaluation.planning.panels import panels_here
from evaluation.planning.prepare import MeasuredHalf, measures_settings, prepare
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.provenance import machine_identity
from swiftllm.machine import Card, first_card
from swiftllm.systems import find_system

MEASURED = frozenset({"torch", "http"})
SENSITIVITY = "_sensitivity"
"""Suffix of the name of a result folder in which an assumption was varied."""


@dataclass(frozen=True)
class Run:
    """A finished run. ``experiment`` is the name of the experiment, None if the folder has no provenance."""

    folder: Path
    experiment: str | None
    summary: Sequence[FlatRecord]
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper. ``name`` is the name of its experiment file, its result folder and its claims.

    ``metric`` is the metric of its sensitivity plots, ``what`` that metric in words. ``backends`` run by default
    on a machine without a GPU; with one, a paper's setting is measured, too.
    ``complete`` adds fields that are computed from all rows together.
    """

    name: str
    title: str
    draw: Callable[[Run], plt.Figure]
    metric: str
    what: str
    backends: tuple[str, ...] = ("simulated",)
    complete: Complete = unchanged_rows


def reproduce(figure: PaperFigure, options: FigureOptions) -> int:
    """Run the unfinished points, draw, print. Returns the exit status: 0 when every point is finished, 2 for invalid
    options."""
    console = stdout_console()
    name = figure.name if options.sensitivity is None else figure.name + SENSITIVITY
    with LiveSystems(options.results_dir / name / "logs", console) as live:
        try:
            if options.from_folder is not None:
                show(figure, read_run(options.from_folder, [figure.name]), console)
                return 0
            points, configuration = make_points(figure, options, console, live)
            if options.plan:
                return 0
        except (ValueError, FileNotFoundError, ConnectionError) as error:
            print_error(error, console)
            return 2
        return run_and_show(
            figure, name, points, configuration, options.results_dir, options.num_jobs, console, live.run_point
        )


def run_and_show(
    figure: PaperFigure,
    name: str,
    points: Sequence[Point],
    configuration: Mapping[str, Any],
    results_dir: Path,
    jobs: int,
    console: Console,
    run: RunPoint = run_point,
) -> int:
    """Run the unfinished points of the named result folder, draw, print. Returns the exit status."""
    described = {"experiment": name, **configuration}
    outcome = run_experiment(name, described, points, run, results_dir, console, jobs, figure.complete)
    if outcome.summary:
        show(figure, Run(outcome.folder, name, outcome.summary, machine_identity()), console)
    return outcome.print_outcome(console)


def make_points(
    figure: PaperFigure, options: FigureOptions, console: Console, live: LiveSystems
) -> tuple[list[Point], dict[str, Any]]:
    """The points of the chosen backends, and their description for the run's identity.

    ``live`` measures this machine's profile for the plan of a paper's setting.

    Raises:
        ValueError: an option is not valid here; the message says what is.
        ConnectionError: a server does not answer; the message says what to start.
    """
    card = first_card()
    backends = default_backends(figure, options, card) if options.backend is None else (options.backend,)
    if options.sensitivity is not None:
        if options.backend in MEASURED:
            raise ValueError("--sensitivity varies assumptions, which only --backend simulated has")
        backends = ("simulated",)
    in_setting = "torch" in backends and measures_settings(options, card)
    refuse_unused_options(options, backends, in_setting)
    points: list[Point] = []
    configuration: dict[str, Any] = {}
    if "simulated" in backends:
        simulated = simulated_points(figure.name, options)
        points += simulated
        configuration["simulated"] = describe_simulated_points(simulated)
    for backend in MEASURED.intersection(backends):
        try:
            half = measured_half(figure, options, console, live, in_setting)
        except ValueError as error:
            if "simulated" not in backends:
                raise
            console.print(f"the measured half is skipped: {error}", style="yellow", highlight=False, markup=False)
        else:
            points += half.points
            configuration[backend] = half.configuration
    return points, configuration


def default_backends(figure: PaperFigure, options: FigureOptions, card: Card | None) -> tuple[str, ...]:
    """Backends that run without --backend: in a paper's setting a figure is simulated and measured."""
    return (*figure.backends, "torch") if measures_settings(options, card) else figure.backends


def measured_half(
    figure: PaperFigure, options: FigureOptions, console: Console, live: LiveSystems, in_setting: bool
) -> MeasuredHalf:
    """The measured points: in a paper's setting, or of a small model.

    Raises:
        ValueError, ConnectionError: as :func:`make_points`.
    """
    chosen = measured_options(options)
    if in_setting:
        return prepare(figure_sweep(figure.name, chosen), chosen, live, console)
    plan = make_measured_plan(figure.name, chosen)
    points = make_measured_points(plan)
    return MeasuredHalf(points, describe_measured_plan(plan, points))


def figure_sweep(name: str, options: FigureOptions) -> Sweep:
    """The panels of the experiment file with the papers' settings, as the options choose."""
    return make_sweep(
        experiment_settings(name, options.config)["simulated"],
        gpu=options.gpu,
        systems=options.systems,
        workloads=options.workloads,
        num_requests=options.num_requests,
        seed=options.seed,
        repeats=options.repeats,
        trace_dir=options.trace_dir,
    )


def simulated_points(name: str, options: FigureOptions) -> list[Point]:
    sweep = figure_sweep(name, options)
    if options.setting not in (None, "small"):
        sweep = panels_here(sweep, options.setting, None, "apex")
    if options.sensitivity is None:
        return make_simulated_points(sweep)
    return make_sensitivity_points(sweep, parse_sensitivity(options.sensitivity))


def measured_options(options: FigureOptions) -> FigureOptions:
    """The options for the measured part.

    Beside a simulation ``num_requests`` applies to the simulation only: thousands would take this machine hours.
    """
    if options.backend == "torch":
        for system in options.systems or ():
            find_system(system)
    return options if options.backend in MEASURED else replace(options, num_requests=None)


def read_run(folder: Path, wanted: Sequence[str]) -> Run:
    """A finished run of one of the ``wanted`` experiments, or of its sensitivity to an assumption.

    Raises:
        ValueError: the folder has no results, or those of another experiment.
    """
    summary_file, provenance_file = folder / "summary.json", folder / "provenance.json"
    if not summary_file.is_file() or not (summary := json.loads(summary_file.read_text())):
        example = f"results/{wanted[0]}/latest"
        raise ValueError(f"no results in {folder}: give a folder that has a summary.json, such as {example}")
    if not provenance_file.is_file():
        return Run(folder.resolve(), None, summary, machine_identity())
    provenance = json.loads(provenance_file.read_text())
    experiment = provenance["configuration"].get("experiment", "something else")
    if experiment.removesuffix(SENSITIVITY) not in wanted:
        raise ValueError(f"{folder} holds results of {experiment}, not of {' or '.join(wanted)}")
    return Run(folder.resolve(), experiment, summary, provenance["machine"])


def show(figure: PaperFigure, run: Run, console: Console) -> None:
    """Draw the figure into its folder; print the results and compare them with the claims."""
    claims = load_claims(figure.name)
    varied = varied_in(run.summary)
    if varied:
        drawing = draw_sensitivity(run.summary, claims, figure.metric, figure.what, run.machine)
    else:
        drawing = figure.draw(run)
    try:
        png, _ = save_figure(drawing, run.folder)
    except OSError as error:
        raise ValueError(f"cannot write the figure: {error}; copy the folder to a writable place") from None
    print_results(figure.title, run.summary, console)
    if not varied:
        print_claims(claims, run.summary, console)
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)
