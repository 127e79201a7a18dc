"""The papers' figures, and the steps of their commands: make their points, plan what is measured, run, show."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

import tyro
from matplotlib import pyplot as plt
from rich.console import Console

from apex.cli.output import stdout_console
from apex.simulator.paper_settings import load_setting, setting_names
from evaluation.drivers import SimulatedTask
from evaluation.measure.live_systems import LiveSystems
from evaluation.options import experiment_settings
from evaluation.planning.plan import (
    Plan,
    Planner,
    measures_settings,
    panels_to_measure,
    plan_within,
    prepare,
    print_plan,
    print_settings,
)
from evaluation.planning.setting import NotApplicable, Paper, fetch_traces, panels_here
from evaluation.plots.papers import RATE, draw_fig5, draw_fig6, draw_fig7, draw_neo, draw_sensitivity, print_results
from evaluation.plots.style import show_figure
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.progress import format_s, print_line
from evaluation.results.rows import grouped, kind_of, reading_of
from evaluation.run import Derive, Point, Run, RunPoint, identity, unchanged_rows
from evaluation.studies.papers import (
    ROW,
    ROW_AT_LATENCY,
    FigureOptions,
    PaperOptions,
    SettingOptions,
    figure_grid,
    refuse_unused_options,
    simulated_points,
    small_points,
    varied_in,
)
from evaluation.study import SENSITIVITY, Main, Options, Study, command
from swiftllm.machine import first_card

# -- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper. ``name`` is the name of its result folder and of its claims.

    ``metric`` is the metric of its sensitivity plots, ``what`` that metric in words. ``backends`` run by default
    on a machine without a GPU; with one, a paper's setting is measured, too. ``row`` are fields of places for its rows.
    ``derive`` adds fields that are computed from all rows together.
    """

    name: str
    title: str
    draw: Callable[[Run], plt.Figure]
    metric: str
    what: str
    backends: tuple[str, ...] = ("simulated",)
    paper: Paper = "apex"
    row: tuple[str, ...] = ROW
    derive: Derive = unchanged_rows

    def study(self, name: str | None = None, configuration: Mapping[str, Any] | None = None) -> Study:
        """The study that runs and shows the figure.

        Args:
            name: that of its result folder.
            configuration: what decides the numbers of its points.
        """
        show_this = functools.partial(show, self)
        return Study(name or self.name, show_this, derive=self.derive, describe=lambda points: configuration or {})


def show(figure: PaperFigure, run: Run, console: Console) -> None:
    """Print the results and compare them with the claims; draw the figure into the run's folder.

    Raises:
        ValueError: the folder cannot be written to.
    """
    claims = load_claims(figure.name)
    print_results(figure.title, run.summary, console)
    if varied_in(run.summary):
        drawing = draw_sensitivity(run.summary, claims, figure.metric, figure.what, run.machine)
    else:
        print_claims(claims, run.summary, console)
        drawing = figure.draw(run)
    show_figure(drawing, run.folder, console)


# -- commands ---------------------------------------------------------------------------------------------------------

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

    return command(options_type, lambda options: {figure.name: figure.study() for figure in figures(options)}, run)


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
        study = job.figure.study(job.name, configuration)
        run = study.run(points, options.results_dir, options.jobs, run_alone=run_alone, console=console)
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
    print_settings({name: s for planner in planners for name, s in planner.settings.items()}.values(), console)
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
            here = panels_to_measure(figure_grid(section, options), options, card, figure.paper)
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
                measured = prepare(
                    figure_grid(section, chosen), chosen, live, console, figure.paper, figure.row, with_server
                )
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


# -- APEX's figures ---------------------------------------------------------------------------------------------------


def with_gains(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows, those of ``apex`` with what its gains are over their theory (APEX sections 5.2 and 5.4).

    ``gain_over_600``: its ratio to ``neo`` over that at 600 output tokens, where a plateau is said to begin.
    ``gain_over_b_a``: its gain over ``swiftllm``, ratio less 1, over S = b / a. b, the share of time in which decodes
    dominate, is taken as 1; a is the GPU's rate of attention over the CPU's.
    """
    rates = {(reading_of(row), kind_of(row), row["output_len"], row["system"]): row[RATE] for row in rows}

    def ratio(row: FlatRecord, other: str, output_len: float) -> float | None:
        ours, theirs = (rates.get((reading_of(row), kind_of(row), output_len, name)) for name in (row["system"], other))
        return ours / theirs if ours and theirs else None

    result = []
    for row in rows:
        gains: dict[str, float | None] = {}
        if row["system"] == "apex" and row.get("gpu_attention_gb_s") and not row.get("sensitivity"):
            here, at_600 = ratio(row, "neo", row["output_len"]), ratio(row, "neo", 600)
            over_gpu, a = (
                ratio(row, "swiftllm", row["output_len"]),
                row["gpu_attention_gb_s"] / row["cpu_bandwidth_gb_s"],
            )
            gains["gain_over_600"] = here / at_600 if here and at_600 else None
            gains["gain_over_b_a"] = (over_gpu - 1) * a if over_gpu else None
        result.append({**row, **gains})
    return result


FIG5 = PaperFigure(
    "fig5",
    "Figure 5: throughput",
    lambda run: draw_fig5(run.summary, run.machine),
    "output_tokens_per_s",
    "throughput",
    backends=("simulated", "torch"),
)
FIG6 = PaperFigure(
    "fig6",
    "Figure 6: latency under load",
    lambda run: draw_fig6(run.summary, run.machine),
    "per_token_latency_s_mean",
    "mean per-token latency",
)
FIG7 = PaperFigure(
    "fig7",
    "Figure 7: throughput over the output length",
    lambda run: draw_fig7(run.summary, run.machine),
    "output_tokens_per_s",
    "throughput",
    derive=with_gains,
)

# -- NEO's figures ----------------------------------------------------------------------------------------------------

LATENCY = "per_token_latency_s_mean"


def with_rates_at_latency(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with ``request_rate_at_latency``: the request rate at which a curve reaches ``at_latency_s``.

    The first row of a curve has the value, interpolated between the two rates around the first crossing. It is None
    in the other rows, and where the curve does not cross.
    """
    read = (row for row in rows if row.get("at_latency_s") is not None)
    rates = {
        curve[0]["point"]: crossing([(r["request_rate"], r[LATENCY]) for r in curve], curve[0]["at_latency_s"])
        for curve in grouped(read, "setting", "system", kind_of).values()
    }
    return [{**row, "request_rate_at_latency": rates.get(row["point"])} for row in rows]


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The x at which a curve of (x, y) first rises through ``level``, interpolated linearly; None if it never does."""
    for (left, below), (right, above) in itertools.pairwise(sorted(curve)):
        if below <= level < above:
            return left + (right - left) * (level - below) / (above - below)
    return None


FigureName = Literal["6", "7", "8", "9", "10a"]
ALL_FIGURES: tuple[FigureName, ...] = ("6", "7", "8", "9", "10a")


@dataclass(frozen=True)
class NeoOptions(SettingOptions, PaperOptions):
    """The figures of NEO's evaluation, SIMULATED (predicted times, no GPU needed). All together take some minutes on
    two cores. On a machine with a GPU the panels of its kind are also measured.

    Defaults come from configs/experiments/neo.yaml. Results, figure and provenance go to
    results/neo-fig<figure>/<run>/. Running the same command again continues an interrupted run.
    """

    figure: Annotated[tuple[FigureName, ...], tyro.conf.arg(metavar="FIGURE ...")] = ALL_FIGURES
    """Figures of the paper. 6: latency over request rate; 7: distribution of latencies;
    8: comparison with FastDecode+; 9: throughput over output length; 10a: the same on four hosts."""
    backend: Literal["simulated", "torch"] | None = None
    """simulated: predict the paper's machines in virtual time. torch: measure on this machine.
    By default simulated, and measured too where there is a GPU."""
    gpu: Literal["t4", "a10", "2xh100"] | None = None
    """Run only the panels of this GPU; figures without such panels are skipped."""


def figures_of(settings: Mapping[str, Any]) -> dict[str, PaperFigure]:
    """The figures of the experiment file, by the names of their sections."""

    def figure(section: str, shows: str) -> PaperFigure:
        return PaperFigure(
            f"neo-{section}",
            shows,
            lambda run: draw_neo(shows, run.summary, run.folder, run.machine),
            "output_tokens_per_s",
            "throughput",
            paper="neo",
            row=ROW_AT_LATENCY,
            derive=with_rates_at_latency,
        )

    return {section: figure(section, entries["shows"]) for section, entries in settings.items()}


def neo_jobs(settings: Mapping[str, Any], options: NeoOptions, console: Console, live: LiveSystems) -> list[FigureJob]:
    """The chosen figures, simulated and measured.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    figures, chosen, jobs = figures_of(settings), figure_options(options), []
    for name in options.figure if options.sensitivity is None else ("9",):
        section = settings[f"fig{name}"]
        panels = [panel for panel in section["panels"] if is_chosen(panel["setting"], options)]
        if not panels:
            continue
        here, figure = {**section, "panels": panels}, figures[f"fig{name}"]
        try:
            jobs.append(make_job(figure, chosen, console, live, here, with_server=not options.rehearse))
        except NotApplicable as error:  # other figures may have a panel
            print_line(console, f"{figure.title}: not measured, {error}", "yellow")
    if not jobs:
        where = f" on {options.gpu}" if options.gpu else " here"
        raise ValueError(f"--figure {' '.join(options.figure)} has no panel{where}: leave one of the two out")
    return jobs


def is_chosen(name: str, options: NeoOptions) -> bool:
    """Whether a setting has the GPU of the options."""
    setting = load_setting(name)
    wanted = None if options.setting in (None, "small") else load_setting(options.setting).gpu
    return options.gpu in (None, setting.gpus) and wanted in (None, setting.gpu)


def figure_options(options: NeoOptions) -> FigureOptions:
    """The options as those of the other figures."""
    shared = {field.name for group in (SettingOptions, PaperOptions) for field in fields(group)}
    return FigureOptions(**{name: getattr(options, name) for name in ("backend", *shared)})


def chosen_jobs(options: NeoOptions, console: Console, live: LiveSystems) -> list[FigureJob]:
    return neo_jobs(experiment_settings("neo", options.config), options, console, live)


def chosen_figures(options: NeoOptions) -> Iterable[PaperFigure]:
    return figures_of(experiment_settings("neo", options.config)).values()


neo_main = figures_command(NeoOptions, chosen_figures, chosen_jobs)
