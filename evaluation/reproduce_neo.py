"""Reproduces the figures of NEO's evaluation (6, 7, 8, 9 and 10a) on its machines, SIMULATED, beside its claims.

python evaluation/reproduce_neo.py [--figure 6 10a] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro
from rich.console import Console

from apex.cli.parser import parse_options
from evaluation.claims import load_claims, print_claims
from evaluation.experiment import Point, run_experiment
from evaluation.figures.apex_paper import draw_sensitivity
from evaluation.figures.neo_paper import draw_neo
from evaluation.figures.style import save
from evaluation.figures.table import print_results
from evaluation.neo import make_neo_points, with_rates_at_latency
from evaluation.options import Folder, Names, Range, experiment_settings
from evaluation.paths import RESULTS_DIR
from evaluation.points import run_point
from evaluation.reproduction import read_folder
from evaluation.results import FlatRecord, to_json, write_atomically
from evaluation.sensitivity import parse_sensitivity, varied_in
from evaluation.sweeps import describe
from swiftllm.cores import usable_cores

FigureName = Literal["6", "7", "8", "9", "10a"]
ALL_FIGURES: tuple[FigureName, ...] = ("6", "7", "8", "9", "10a")
SENSITIVITY = "_sensitivity"


@dataclass(frozen=True)
class Options:
    """The figures of NEO's evaluation, SIMULATED: predicted times, no GPU needed; all of them take some minutes on two
    cores.

    What is not given comes from configs/experiments/neo.yaml. Results, figure and provenance go to
    results/neo-fig<figure>/<run>/. The same command again goes on where the last one stopped.
    """

    figure: Annotated[tuple[FigureName, ...], tyro.conf.arg(metavar="FIGURE ...")] = ALL_FIGURES
    """Figures of the paper. 6: load and latency; 7: distribution of latencies; 8: beside FastDecode+;
    9: throughput over output length; 10a: the same on four hosts."""
    gpu: Literal["t4", "a10", "2xh100"] | None = None
    """Only the panels of this GPU; figures without any are left out."""
    systems: Names = None
    """Systems to compare in place of the paper's; the figure's baseline must be among them."""
    num_requests: int | None = None
    """Requests of every point; by default from the experiment file. NEO sent 2000."""
    seed: int = 0
    """Seed of everything drawn: lengths, arrivals."""
    jobs: int | None = None
    """Points that run at once; by default one per usable core. Changes the time it takes, not the result."""
    sensitivity: Range = None
    """Instead of Figure 9: how its ratios move with an assumption.
    cpu_bandwidth=20..300: CPU attention that reads 20 to 300 GB/s;
    gpu_blocks=54..400: a GPU pool of 54 to 400 KV blocks (choose the machine with --gpu)."""
    trace_dir: Folder = None
    """Folder with trace files, searched first."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Experiment file in place of configs/experiments/neo.yaml."""
    results_dir: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = RESULTS_DIR
    """Results go to neo-fig<figure>/<run>/ in this folder."""
    from_folder: Annotated[Folder, tyro.conf.arg(name="from", metavar="FOLDER")] = None
    """Run nothing: draw and tell again from this result folder."""


def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for options that do not fit."""
    console = Console()
    settings = experiment_settings("neo", options.config)
    failed = []
    try:
        if options.from_folder is not None:
            folder, summary, _ = read_folder(options.from_folder)
            show(folder, summary, settings, console)
            return 0
        for name, points in chosen_points(settings, options).items():
            failed += run_figure(name, points, settings, options, console)
    except (ValueError, FileNotFoundError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)
        return 2
    return 1 if failed else 0


def chosen_points(settings: dict[str, Any], options: Options) -> dict[str, list[Point]]:
    """The points of each figure, by the name of its result folder.

    Raises:
        ValueError: an option does not fit; the message says what would.
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
            trace_dir=options.trace_dir,
        )
        if points:
            chosen[f"neo-fig{figure}" + (SENSITIVITY if variation else "")] = points
    if not chosen:
        raise ValueError(f"--figure {' '.join(options.figure)} has no panel on {options.gpu}: leave one of the two out")
    return chosen


def run_figure(
    name: str, points: Sequence[Point], settings: dict[str, Any], options: Options, console: Console
) -> list[str]:
    """Run what is not there yet, draw, tell. Returns the labels of failed points."""
    configuration = {"experiment": name, "simulated": describe(points)}
    jobs = options.jobs or usable_cores()
    outcome = run_experiment(name, configuration, points, run_point, options.results_dir, console, jobs)
    if outcome.summary:
        rows = with_rates_at_latency(outcome.summary)
        write_atomically(outcome.folder / "summary.json", to_json(rows))
        show(outcome.folder, rows, settings, console)
    for label in outcome.failed:
        console.print(f"failed: {label}", style="bold red", highlight=False, markup=False)
    console.print(f"summary, figure, records and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return outcome.failed


def show(folder: Path, rows: Sequence[FlatRecord], settings: dict[str, Any], console: Console) -> None:
    """Draw a figure into its folder; print its rows and NEO's claims beside them."""
    name = folder.parent.name.removesuffix(SENSITIVITY)
    section = settings.get(name.removeprefix("neo-"))
    if section is None:
        raise ValueError(f"{folder} is none of NEO's figures: give a folder like {RESULTS_DIR.name}/neo-fig6/latest")
    claims = load_claims(name)
    varied = varied_in(rows)
    if varied:
        drawing = draw_sensitivity(rows, claims, "output_tokens_per_s", "throughput", {})
    else:
        drawing = draw_neo(section["shows"], rows, folder)
    png, _ = save(drawing, folder)
    print_results(section["shows"], rows, console)
    if not varied:
        print_claims(claims, rows, console)
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
