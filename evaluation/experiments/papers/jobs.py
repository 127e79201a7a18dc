"""The steps of a command of a paper's figures: make their points, plan what is measured, run, show."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from apex.cli.output import stdout_console
from apex.simulator.paper_settings import load_setting, setting_names
from evaluation.drivers import SimulatedTask
from evaluation.experiments.papers.figure import PaperFigure
from evaluation.experiments.papers.options import FigureOptions, refuse_unused_options
from evaluation.experiments.papers.points import figure_grid, simulated_points
from evaluation.experiments.papers.small_model import small_points
from evaluation.measure.live_systems import LiveSystems
from evaluation.options import experiment_settings
from evaluation.planning.panels import NotApplicable, panels_here
from evaluation.planning.plan import Plan, Planner, plan_within, print_plan, print_settings
from evaluation.planning.prepare import measures_settings, panels_to_measure, prepare
from evaluation.planning.traces import fetch_traces
from evaluation.results.progress import format_s, print_line
from evaluation.run import Point, RunPoint, identity
from evaluation.study import SENSITIVITY, Main, Options, command
from swiftllm.machine import first_card

MEASURED = frozenset({"torch", "http"})


@dataclass(frozen=True)
class FigureJob:
    """A figure to run. ``name`` is its result folder's; ``configuration`` describes the points for the run's identity.

    ``measured`` plans the points in a paper's setting, whose numbers of requests are not chosen yet.
    """

    figure: PaperFigure
    name: str
    points: Sequence[Point]
    configuration: Mapping[str, Any]
    measured: Planner | None = None


def figure_command(options_type: type[FigureOptions], figure: PaperFigure) -> Main:
    """The ``main`` of a command of a figure."""

    def jobs(options: FigureOptions, console: Console, live: LiveSystems) -> list[FigureJob]:
        return [make_job(figure, options, console, live)]

    return figures_command(options_type, lambda options: [figure], jobs)


def figures_command(
    options_type: type[Options],
    figures: Callable[[Options], Iterable[PaperFigure]],
    make_jobs: Callable[[Options, Console, LiveSystems], Sequence[FigureJob]],
) -> Main:
    """The ``main`` of a command of figures. ``make_jobs`` makes the points of those that the options choose."""

    def run(options: Options) -> int:
        console = stdout_console()
        with without_traceback(console), LiveSystems(options.results_dir / "logs", console) as live:
            return run_jobs(make_jobs(options, console, live), options, console, live.run_point)

    return command(options_type, lambda options: [figure.experiment() for figure in figures(options)], run=run)


@contextlib.contextmanager
def without_traceback(console: Console) -> Iterator[None]:
    """Ends the program with one line at Ctrl-C. A running experiment says itself what is kept.

    Raises:
        SystemExit: the program was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        print_line(console, "interrupted: nothing was measured yet", "yellow")
        raise SystemExit(128 + signal.SIGINT) from None


def run_jobs(jobs: Sequence[FigureJob], options: FigureOptions, console: Console, run_alone: RunPoint) -> int:
    """Plan all figures, then run them one after the other. They share ``options.hours``.

    ``run_alone`` runs the points that measure.

    Returns:
        The exit status: 0 when every point is finished.

    Raises:
        TooLittleTime: the hours do not suffice; the message names those that do.
    """
    print_readings([point for job in jobs for point in job.points], console)
    plans = plan_jobs(jobs, options, console)
    if options.plan:
        return 0
    status = 0
    for number, job in enumerate(jobs, start=1):
        if len(jobs) > 1:
            console.rule(f"{number} of {len(jobs)}: {job.figure.title}", align="left")
        points, configuration = list(job.points), dict(job.configuration)
        if job.measured is not None:
            points += plans[job.name].points
            configuration["torch"] = job.measured.describe(plans[job.name].points)
        experiment = job.figure.experiment(job.name, configuration)
        run = experiment.run(points, options.results_dir, options.jobs, run_alone=run_alone, console=console)
        status |= run.print_outcome(console)
    return status


def print_readings(points: Sequence[Point], console: Console) -> None:
    """What is assumed of each simulated machine of which there is more than one reading, and where it comes from."""
    names = dict.fromkeys(point.task.values["setting"] for point in points if isinstance(point.task, SimulatedTask))
    settings = [setting for name in names if name in setting_names() and (setting := load_setting(name)).reading]
    for setting in settings:
        print_line(console, f"SIMULATED {setting.title}, {setting.reading}")
        for line in setting.inputs():
            print_line(console, f"  {line}")


def plan_jobs(jobs: Sequence[FigureJob], options: FigureOptions, console: Console) -> dict[str, Plan]:
    """The plans of the figures with measured points, by name of the job; prints settings and plans.

    Raises:
        TooLittleTime: the hours do not suffice; the message names those that do.
    """
    planned = [job for job in jobs if job.measured is not None]
    if not planned:
        return {}
    planners = [job.measured for job in planned]
    print_settings({name: s.local for planner in planners for name, s in planner.settings.items()}.values(), console)
    if measured_requests(options) is None:
        plans = plan_within(planners, options.hours * 3600.0)
    else:
        plans = [planner.plan_with(planner.most) for planner in planners]
    for job, plan in zip(planned, plans, strict=True):
        print_plan(job.figure.title, plan, console)
    if len(plans) > 1:
        total = format_s(sum(plan.total_s for plan in plans))
        print_line(console, f"all {len(plans)} figures: {total} predicted")
    return {job.name: plan for job, plan in zip(planned, plans, strict=True)}


def make_job(
    figure: PaperFigure,
    options: FigureOptions,
    console: Console,
    live: LiveSystems,
    section: Mapping[str, Any] | None = None,
    with_server: bool = True,
) -> FigureJob:
    """The points of the chosen backends.

    Args:
        live: measures this machine's profile for a paper's setting.
        section: the figure's section of an experiment file; by default ``simulated`` of the figure's own file.
        with_server: whether a vLLM server is started where vLLM is installed.

    Raises:
        ValueError: an option is not valid here; the message says what is.
        ConnectionError: a server does not answer; the message says what to start.
    """
    card = first_card()
    backends = figure.backends if options.backend is None else (options.backend,)
    if options.backend is None and measures_settings(options, card):
        backends = ("simulated", "torch")
    if options.sensitivity is not None:
        if options.backend in MEASURED:
            raise ValueError("--sensitivity varies assumptions, which only --backend simulated has")
        backends = ("simulated",)
    in_setting = "torch" in backends and measures_settings(options, card)
    if figure.paper == "neo" and "torch" in backends and not in_setting:
        raise ValueError("NEO's figures are measured in its settings: give --setting neo-t4 or neo-a10, or --rehearse")
    refuse_unused_options(options, backends, in_setting)
    if section is None:
        section = experiment_settings(figure.name, options.config)["simulated"]
    if in_setting and not options.rehearse:
        with contextlib.suppress(NotApplicable):  # the measured half says so below
            here = panels_to_measure(figure_grid(section, options), options, card, figure)
            fetch_traces(here, options, console)  # first: predictions of the measured points have the same lengths
    points: list[Point] = []
    configuration: dict[str, Any] = {}
    measured = None
    if "simulated" in backends:
        grid = figure_grid(section, options)
        if options.setting not in (None, "small"):
            grid = panels_here(grid, options.setting, None, figure.paper)
        points += simulated_points(grid, figure.row)
        configuration["simulated"] = identity(points)
    for backend in MEASURED.intersection(backends):
        chosen = replace(options, num_requests=measured_requests(options))
        try:
            if in_setting:
                measured = prepare(figure_grid(section, chosen), chosen, live, console, figure, with_server)
            else:
                here, configuration[backend] = small_points(figure.name, chosen)
                points += here
        except ValueError as error:
            if "simulated" not in backends:
                raise
            print_line(console, f"{figure.title}: the measured half is skipped: {error}", "yellow")
    name = figure.name if options.sensitivity is None else figure.name + SENSITIVITY
    return FigureJob(figure, name, points, configuration, measured)


def measured_requests(options: FigureOptions) -> int | None:
    """Requests of every measured point; None leaves it to hours or file. Beside a simulation ``num_requests`` applies
    to that alone: thousands would take this machine hours."""
    return options.num_requests if options.backend in MEASURED else None
