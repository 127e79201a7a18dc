"""Reproduces the figures of NEO's evaluation (6, 7, 8, 9 and 10a), SIMULATED, and compares them with its claims.

python evaluation/reproduce_neo.py [--figure 6 10a] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from evaluation.experiments.papers.figure import PaperFigure
from evaluation.experiments.papers.jobs import FigureJob, figures_command, make_job
from evaluation.experiments.papers.latency import with_rates_at_latency
from evaluation.experiments.papers.options import FigureOptions, PaperOptions, SettingOptions
from evaluation.experiments.papers.points import ROW_AT_LATENCY
from evaluation.measure.live_systems import LiveSystems
from evaluation.options import experiment_settings
from evaluation.planning.panels import NotApplicable
from evaluation.plots.neo_paper import draw_neo
from evaluation.results.progress import print_line

FigureName = Literal["6", "7", "8", "9", "10a"]
ALL_FIGURES: tuple[FigureName, ...] = ("6", "7", "8", "9", "10a")


@dataclass(frozen=True)
class Options(SettingOptions, PaperOptions):
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


def neo_jobs(settings: Mapping[str, Any], options: Options, console: Console, live: LiveSystems) -> list[FigureJob]:
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


def is_chosen(name: str, options: Options) -> bool:
    """Whether a setting has the GPU of the options."""
    setting = load_setting(name)
    wanted = None if options.setting in (None, "small") else load_setting(options.setting).gpu
    return options.gpu in (None, setting.gpus) and wanted in (None, setting.gpu)


def figure_options(options: Options) -> FigureOptions:
    """The options as those of the other figures."""
    shared = {field.name for group in (SettingOptions, PaperOptions) for field in fields(group)}
    return FigureOptions(**{name: getattr(options, name) for name in ("backend", *shared)})


def jobs(options: Options, console: Console, live: LiveSystems) -> list[FigureJob]:
    return neo_jobs(experiment_settings("neo", options.config), options, console, live)


def figures(options: Options) -> Iterable[PaperFigure]:
    return figures_of(experiment_settings("neo", options.config)).values()


main = figures_command(Options, figures, jobs)

if __name__ == "__main__":
    sys.exit(main())
