"""Reproduces the figures of NEO's evaluation (6, 7, 8, 9 and 10a), SIMULATED, and compares them with its claims.

python evaluation/reproduce_neo.py [--figure 6 10a] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from apex.environment import PACKAGES, use_environment

    use_environment(*PACKAGES)

from typing import Annotated, Any, Literal

import tyro

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.neo_points import make_neo_points, with_rates_at_latency
from evaluation.experiments.options import Folder, Names, Range, experiment_settings
from evaluation.experiments.runner import Point, print_error
from evaluation.experiments.sensitivity import parse_sensitivity
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.figures.neo_paper import draw_neo
from evaluation.figures.paper_figure import SENSITIVITY, PaperFigure, read_run, run_and_show, show
from evaluation.results.paths import RESULTS_DIR
from swiftllm.machine import usable_cores

FigureName = Literal["6", "7", "8", "9", "10a"]
ALL_FIGURES: tuple[FigureName, ...] = ("6", "7", "8", "9", "10a")


@dataclass(frozen=True)
class Options:
    """The figures of NEO's evaluation, SIMULATED (predicted times, no GPU needed). All together take some minutes on
    two cores.

    Defaults come from configs/experiments/neo.yaml. Results, figure and provenance go to
    results/neo-fig<figure>/<run>/. Running the same command again continues an interrupted run.
    """

    figure: Annotated[tuple[FigureName, ...], tyro.conf.arg(metavar="FIGURE ...")] = ALL_FIGURES
    """Figures of the paper. 6: latency over request rate; 7: distribution of latencies;
    8: comparison with FastDecode+; 9: throughput over output length; 10a: the same on four hosts."""
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
    jobs: int | None = None
    """Points to run in parallel; by default one per usable core. The results do not depend on it."""
    sensitivity: Range = None
    """Instead of Figure 9, show how its ratios depend on an assumption.
    cpu_bandwidth=20..300: CPU attention reads 20 to 300 GB/s;
    gpu_blocks=54..400: the GPU pool has 54 to 400 KV blocks (choose the machine with --gpu)."""
    trace_dir: Folder = None
    """Folder with trace files, searched before the cache."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Experiment file to use instead of configs/experiments/neo.yaml."""
    results_dir: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = RESULTS_DIR
    """Results go to neo-fig<figure>/<run>/ in this folder."""
    from_folder: Annotated[Folder, tyro.conf.arg(name="from", metavar="FOLDER")] = None
    """Run nothing; draw and print again from this result folder."""


def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    console = stdout_console()
    status = 0
    try:
        settings = experiment_settings("neo", options.config)
        figures = {f"neo-{section}": paper_figure(section, settings) for section in settings}
        if options.from_folder is not None:
            run = read_run(options.from_folder, list(figures))
            show(figures[name_of_figure(run.experiment)], run, console)
            return 0
        chosen = chosen_points(settings, options)
        for number, (name, points) in enumerate(chosen.items(), start=1):
            configuration = {"simulated": describe_simulated_points(points)}
            jobs = options.jobs or usable_cores()
            figure = figures[name_of_figure(name)]
            console.rule(f"{number} of {len(chosen)}: {figure.title}", align="left")
            status |= run_and_show(figure, name, points, configuration, options.results_dir, jobs, console)
    except (ValueError, FileNotFoundError) as error:
        print_error(error, console)
        return 2
    return status


def paper_figure(section: str, settings: Mapping[str, Any]) -> PaperFigure:
    """The figure of a section of the experiment file."""
    shows = settings[section]["shows"]
    return PaperFigure(
        f"neo-{section}",
        shows,
        lambda run: draw_neo(shows, run.summary, run.folder),
        "output_tokens_per_s",
        "throughput",
        complete=with_rates_at_latency,
    )


def name_of_figure(experiment: str | None) -> str:
    """The name of the figure of a result folder's experiment.

    Raises:
        ValueError: the folder has no provenance, so its experiment is unknown.
    """
    if experiment is None:
        raise ValueError("the folder has no provenance.json, so it is unknown which of NEO's figures it holds")
    return experiment.removesuffix(SENSITIVITY)


def chosen_points(settings: dict[str, Any], options: Options) -> dict[str, list[Point]]:
    """The points of each figure, by the name of its result folder.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    variation = None if options.sensitivity is None else parse_sensitivity(options.sensitivity)
    chosen = {}
    for figure in options.figure if variation is None else ("9",):
        section = settings[f"fig{figure}"]
        if options.gpu is not None:
            panels = [panel for panel in section["panels"] if panel["setting"] == f"neo-{options.gpu}"]
            section = {**section, "panels": panels}
        points = make_neo_points(
            section,
            variation,
            systems=options.systems,
            num_requests=options.num_requests,
            seed=options.seed,
            repeats=options.repeats,
            trace_dir=options.trace_dir,
        )
        if points:
            chosen[f"neo-fig{figure}" + (SENSITIVITY if variation else "")] = points
    if not chosen:
        raise ValueError(f"--figure {' '.join(options.figure)} has no panel on {options.gpu}: leave one of the two out")
    return chosen


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
