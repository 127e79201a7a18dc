"""The steps of every ``reproduce_*.py``: make the points of figures, plan them, run them, show the results."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from apex.cli.output import stdout_console
from evaluation.experiments.experiment import SENSITIVITY, show_again
from evaluation.experiments.measured_sweeps import describe_measured_plan, make_measured_points
from evaluation.experiments.options import (
    FigureOptions,
    experiment_settings,
    make_measured_plan,
    refuse_unused_options,
)
from evaluation.experiments.runner import Point, RunPoint, one_line_errors
from evaluation.experiments.sensitivity import parse_sensitivity
from evaluation.experiments.simulated_sweeps import (
    Sweep,
    describe_simulated_points,
    make_sensitivity_points,
    make_simulated_points,
    make_sweep,
)
from evaluation.figures.paper_figure import PaperFigure
from evaluation.measure.live_systems import LiveSystems
from evaluation.planning.panels import panels_here
from evaluation.planning.plan import Plan, plan_within, print_plan, print_settings
from evaluation.planning.prepare import SettingMeasurement, measures_settings, prepare
from evaluation.results.progress import format_s
from swiftllm.machine import Card, first_card
from swiftllm.systems import find_system

MEASURED = frozenset({"torch", "http"})


@dataclass(frozen=True)
class FigureJob:
    """A figure to run. ``name`` is its result folder's; ``configuration`` describes the points for the run's identity.

    ``measured`` are the points in a paper's setting, whose numbers of requests are not chosen yet.
    """

    figure: PaperFigure
    name: str
    points: Sequence[Point]
    configuration: Mapping[str, Any]
    measured: SettingMeasurement | None = None


@one_line_errors
def reproduce(figure: PaperFigure, options: FigureOptions) -> int:
    """Run the unfinished points, draw, print. Returns the exit status: 0 when every point is finished."""
    if options.from_folder is not None:
        return show_again(options.from_folder, [figure.experiment()])
    console = stdout_console()
    with without_traceback(console), LiveSystems(options.results_dir / figure.name / "logs", console) as live:
        return run_jobs([make_job(figure, options, console, live)], options, console, live.run_point)


@contextlib.contextmanager
def without_traceback(console: Console) -> Iterator[None]:
    """Ends the program with one line at Ctrl-C. A running experiment says itself what is kept.

    Raises:
        SystemExit: the program was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        console.print("interrupted: nothing was measured yet", style="yellow")
        raise SystemExit(128 + signal.SIGINT) from None


def run_jobs(jobs: Sequence[FigureJob], options: FigureOptions, console: Console, run_alone: RunPoint) -> int:
    """Plan all figures, then run them one after the other. They share ``options.hours``.

    ``run_alone`` runs the points that measure.

    Returns:
        The exit status: 0 when every point is finished.

    Raises:
        TooLittleTime: the hours do not suffice; the message names those that do.
    """
    plans = plan_jobs(jobs, options, console)
    if options.plan:
        return 0
    status = 0
    for number, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            console.rule(f"{number} of {len(jobs)}: {job.figure.title}", align="left")
        points, configuration = list(job.points), dict(job.configuration)
        if job.measured is not None:
            half = job.measured.described(plans[job.name])
            points += half.points
            configuration["torch"] = half.configuration
        experiment = replace(job.figure.experiment(job.name), describe=lambda _, described=configuration: described)
        run = experiment.run(points, options.results_dir, options.jobs, run_alone=run_alone, console=console)
        status |= run.print_outcome(console)
    return status


def plan_jobs(jobs: Sequence[FigureJob], options: FigureOptions, console: Console) -> dict[str, Plan]:
    """The plans of the figures with measured points, by name of the job; prints settings and plans.

    Raises:
        TooLittleTime: the hours do not suffice; the message names those that do.
    """
    measured = {job.name: job.measured.planner for job in jobs if job.measured is not None}
    if not measured:
        return {}
    settings = {name: setting.local for planner in measured.values() for name, setting in planner.settings.items()}
    print_settings(list(settings.values()), console)
    planners = list(measured.values())
    if options.num_requests is None:
        plans = plan_within(planners, options.hours * 3600.0)
    else:
        plans = [planner.plan_with(planner.most) for planner in planners]
    titles = {job.name: job.figure.title for job in jobs}
    for name, plan in zip(measured, plans, strict=True):
        print_plan(titles[name], plan, console)
    if len(plans) > 1:
        total = format_s(sum(plan.total_s for plan in plans))
        console.print(f"all {len(plans)} figures: {total} predicted", highlight=False, markup=False)
    return dict(zip(measured, plans, strict=True))


def make_job(
    figure: PaperFigure, options: FigureOptions, console: Console, live: LiveSystems, with_server: bool = True
) -> FigureJob:
    """The points of the chosen backends. ``live`` measures this machine's profile for a paper's setting.

    Without ``with_server`` no vLLM server is started, even if vLLM is installed.

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
    name = figure.name if options.sensitivity is None else figure.name + SENSITIVITY
    points: list[Point] = []
    configuration: dict[str, Any] = {}
    measured = None
    if "simulated" in backends:
        points += simulated_points(figure.name, options)
        configuration["simulated"] = describe_simulated_points(points)
    for backend in MEASURED.intersection(backends):
        chosen = measured_options(options)
        try:
            if in_setting:
                sweep = figure_sweep(figure.name, chosen)
                measured = prepare(sweep, chosen, live, console, with_server=with_server)
                continue
            plan = make_measured_plan(figure.name, chosen)
        except ValueError as error:
            if "simulated" not in backends:
                raise
            console.print(f"the measured half is skipped: {error}", style="yellow", highlight=False, markup=False)
        else:
            here = make_measured_points(plan)
            points += here
            configuration[backend] = describe_measured_plan(plan, here)
    return FigureJob(figure, name, points, configuration, measured)


def default_backends(figure: PaperFigure, options: FigureOptions, card: Card | None) -> tuple[str, ...]:
    """Backends that run without --backend. Where a paper's setting is measured, it is simulated, too."""
    return ("simulated", "torch") if measures_settings(options, card) else figure.backends


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
