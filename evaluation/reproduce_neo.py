"""Reproduces the figures of NEO's evaluation (6, 7, 8, 9 and 10a), SIMULATED, and compares them with its claims.

python evaluation/reproduce_neo.py [--figure 6 10a] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from apex.simulator.paper_settings import load_setting
from evaluation.experiments.experiment import SENSITIVITY, show_again
from evaluation.experiments.neo_points import make_neo_points, neo_sweep, with_latencies, with_rates_at_latency
from evaluation.experiments.options import (
    FigureOptions,
    File,
    FromFolder,
    Jobs,
    Names,
    Range,
    ResultsDir,
    SettingOptions,
    TraceDir,
    experiment_settings,
    refuse_unused_options,
)
from evaluation.experiments.runner import one_line_errors
from evaluation.experiments.sensitivity import parse_sensitivity
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.figures.figure_jobs import FigureJob, run_jobs, without_traceback
from evaluation.figures.paper_figure import PaperFigure
from evaluation.live.live_systems import LiveSystems
from evaluation.planning.panels import NotApplicable, hosts_here
from evaluation.planning.prepare import SettingMeasurement, measures_settings, prepare
from evaluation.plots.neo_paper import draw_neo
from evaluation.results.paths import RESULTS_DIR
from swiftllm.machine import first_card, host_memory_bytes

FigureName = Literal["6", "7", "8", "9", "10a"]
ALL_FIGURES: tuple[FigureName, ...] = ("6", "7", "8", "9", "10a")


@dataclass(frozen=True)
class Options(SettingOptions):
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
    systems: Names = None
    """Systems to compare instead of the paper's; they must include the figure's baseline."""
    num_requests: int | None = None
    """Number of requests of every point; by default from the experiment file. NEO used 2000."""
    seed: int = 0
    """Seed of all random draws: lengths, arrivals."""
    repeats: int = 1
    """How many times to run every point, with consecutive seeds. Tables show medians; figures also show
    the lowest and the highest repeat."""
    jobs: Jobs = None
    sensitivity: Range = None
    """Instead of Figure 9, show how its ratios depend on an assumption.
    cpu_bandwidth=20..300: CPU attention reads 20 to 300 GB/s;
    gpu_blocks=54..400: the GPU pool has 54 to 400 KV blocks (choose the machine with --gpu)."""
    trace_dir: TraceDir = None
    config: File = None
    """Experiment file to use instead of configs/experiments/neo.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to neo-fig<figure>/<run>/ in this folder."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from this result folder."""


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    settings, console = experiment_settings("neo", options.config), stdout_console()
    if options.from_folder is not None:
        return show_again(options.from_folder, [paper_figure(section, settings).experiment() for section in settings])
    with without_traceback(console), LiveSystems(options.results_dir / "neo-logs", console) as live:
        return run_jobs(neo_jobs(settings, options, console, live), figure_options(options), console, live.run_point)


def paper_figure(section: str, settings: Mapping[str, Any]) -> PaperFigure:
    """The figure of a section of the experiment file."""
    shows = settings[section]["shows"]
    return PaperFigure(
        f"neo-{section}",
        shows,
        lambda run: draw_neo(shows, run.summary, run.folder, run.machine),
        "output_tokens_per_s",
        "throughput",
        complete=with_rates_at_latency,
    )


def neo_jobs(settings: Mapping[str, Any], options: Options, console: Console, live: LiveSystems) -> list[FigureJob]:
    """The chosen figures, simulated and measured.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    chosen = figure_options(options)
    in_setting = options.backend != "simulated" and measures_settings(chosen, first_card())
    if options.sensitivity is not None:
        if options.backend == "torch":
            raise ValueError("--sensitivity varies assumptions, which only --backend simulated has")
        in_setting = False
    elif options.backend == "torch" and not in_setting:
        raise ValueError("NEO's figures are measured in its settings: give --setting neo-t4 or neo-a10, or --rehearse")
    refuse_unused_options(chosen, ("torch",) if in_setting else ("simulated",), in_setting)
    variation = None if options.sensitivity is None else parse_sensitivity(options.sensitivity)
    jobs = []
    for figure in options.figure if variation is None else ("9",):
        section = section_of(settings, figure, options)
        points = [] if options.backend == "torch" else make_neo_points(section, variation, **sweep_options(options))
        measured = measured_panels(section, options, console, live) if in_setting else None
        if points or measured:
            name = f"neo-fig{figure}" + (SENSITIVITY if variation else "")
            described = {"simulated": describe_simulated_points(points)} if points else {}
            jobs.append(FigureJob(paper_figure(f"fig{figure}", settings), name, points, described, measured))
    if not jobs:
        where = f" on {options.gpu}" if options.gpu else " here"
        raise ValueError(f"--figure {' '.join(options.figure)} has no panel{where}: leave one of the two out")
    return jobs


def section_of(settings: Mapping[str, Any], figure: str, options: Options) -> dict[str, Any]:
    """The section of a figure with the panels of the chosen GPU or setting."""
    section = settings[f"fig{figure}"]
    chosen = {f"neo-{options.gpu}"} if options.gpu else {panel["setting"] for panel in section["panels"]}
    if options.setting is not None:
        gpu = load_setting(options.setting).gpu
        chosen = {name for name in chosen if load_setting(name).gpu == gpu}
    return {**section, "panels": [panel for panel in section["panels"] if panel["setting"] in chosen]}


def measured_panels(
    section: Mapping[str, Any], options: Options, console: Console, live: LiveSystems
) -> SettingMeasurement | None:
    """The panels of a section that this machine can measure; None if there are none.

    A panel with several hosts is measured on the one that this machine is like.
    """
    panels = []
    for panel in section["panels"]:
        if "hosts" in panel:
            hosts = panel["hosts"] if options.rehearse else hosts_here(panel["hosts"], host_memory_bytes())
            if hosts:
                panels.append({**panel, "hosts": hosts})
        else:
            panels.append(panel)
    if not panels:
        return None
    here = {**section, "panels": panels}
    chosen = figure_options(options)
    sweep = neo_sweep(here, **{**sweep_options(options), "num_requests": chosen.num_requests})
    try:
        return prepare(
            sweep,
            chosen,
            live,
            console,
            "neo",
            lambda points: with_latencies(here, points),
            with_server=not options.rehearse,
        )
    except ValueError as error:
        if options.backend == "torch" and not isinstance(error, NotApplicable):
            raise  # beside a simulation the measured half is left out
        text = f"{section['shows']}: not measured, {error}"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
        return None


def sweep_options(options: Options) -> dict[str, Any]:
    names = ("systems", "num_requests", "seed", "repeats", "trace_dir")
    return {name: getattr(options, name) for name in names}


def figure_options(options: Options) -> FigureOptions:
    """The options as those of the other figures. Beside a simulation ``num_requests`` applies to that alone."""
    shared = {field.name: getattr(options, field.name) for field in fields(SettingOptions)}
    names = ("backend", "systems", "seed", "repeats", "jobs", "trace_dir", "results_dir", "sensitivity")
    shared |= {name: getattr(options, name) for name in names}
    return FigureOptions(**shared, num_requests=options.num_requests if options.backend == "torch" else None)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
