"""Reproduces the figures of OmniServe's evaluation (10 to 19), SIMULATED, and compares them with its claims.

python evaluation/reproduce_omniserve.py [--figure a10 10 18] [--help]
python evaluation/reproduce_omniserve.py --figure http           # MEASURED: servers on this machine
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from apex.cli.output import stdout_console, table
from apex.cli.parser import parse_options
from evaluation.experiments.omniserve.points import Selection, make_omniserve_points
from evaluation.experiments.omniserve.ratios import with_service_ratios
from evaluation.experiments.omniserve.served import (
    alone_point,
    contract,
    found_here,
    make_served_points,
    run_served_point,
)
from evaluation.experiments.options import Folder, Names, experiment_settings
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Complete, Outcome, Point, print_error, run_experiment, unchanged_rows
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.figures.omniserve.draw import draw_omniserve
from evaluation.figures.omniserve.tables import print_omniserve
from evaluation.figures.paper_figure import read_run
from evaluation.figures.style import save_figure
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity
from swiftllm.machine import usable_cores

FigureName = Literal["a10", "a10-limits", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "http"]
SECTIONS: Mapping[FigureName, str] = {
    "a10": "a10",
    "a10-limits": "a10-limits",
    "10": "fig10",
    "11": "fig11",
    "12": "fig12",
    "13": "fig13",
    "14": "fig14",
    "15": "fig10",
    "16": "fig11",
    "17": "fig17",
    "18": "fig18",
    "19": "fig19",
}
"""The section of the experiment file, and result folder, of each simulated figure: one run has both classes."""
HTTP = "http"


@dataclass(frozen=True)
class Options:
    """The figures of OmniServe's evaluation, SIMULATED (predicted times, no GPU needed), but for figure http.

    Defaults come from configs/experiments/omniserve.yaml. Results, figure and provenance go to
    results/omniserve-fig<figure>/<run>/ or results/omniserve-a10.../<run>/. Running the same command again continues an
    interrupted run.
    """

    figure: Annotated[tuple[FigureName, ...], tyro.conf.arg(metavar="FIGURE ...")] = tuple(SECTIONS)
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
    jobs: int | None = None
    """Points to run in parallel; by default one per usable core. The results do not depend on it."""
    trace_dir: Folder = None
    """Folder with trace files, searched before the cache."""
    model: Folder = None
    """Folder of the model that figure http serves; by default SmolLM2-135M-Instruct."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Experiment file to use instead of configs/experiments/omniserve.yaml."""
    results_dir: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = RESULTS_DIR
    """Results go to omniserve-<figure>/<run>/ in this folder."""
    from_folder: Annotated[Folder, tyro.conf.arg(name="from", metavar="FOLDER")] = None
    """Run nothing; draw and print again from this result folder."""

    def __post_init__(self) -> None:
        if self.duration is not None and self.duration <= 0:
            raise ValueError(f"--duration {self.duration:g} must be more than 0 seconds")


def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    console = stdout_console()
    try:
        settings = experiment_settings("omniserve", options.config)
        if options.from_folder is not None:
            run = read_run(options.from_folder, [name_of(section) for section in (*settings["figures"], HTTP)])
            section = (run.experiment or name_of("a10")).removeprefix(name_of(""))
            if section == HTTP:
                show_served(settings[HTTP], run.summary, console)
                return 0
            show(settings["figures"][section], section, run.summary, run.folder, console)
            return 0
        selection = Selection(options.systems, options.quick, options.duration, options.seed, options.trace_dir)
        sections = dict.fromkeys(SECTIONS[figure] for figure in options.figure if figure != HTTP)
        points = {section: make_omniserve_points(settings, section, selection) for section in sections}
    except (ValueError, FileNotFoundError) as error:
        print_error(error, console)
        return 2
    status = run_served(options, settings, selection, console) if HTTP in options.figure else 0
    for section, here in points.items():
        described = {"experiment": name_of(section), "simulated": describe_simulated_points(here)}
        outcome = run_experiment(
            name_of(section),
            described,
            here,
            run_point,
            options.results_dir,
            console,
            options.jobs or usable_cores(),
            with_service_ratios,
        )
        if outcome.summary:
            show(settings["figures"][section], section, outcome.summary, outcome.folder, console)
        status = max(status, outcome.print_outcome(console))
    return status


def run_served(options: Options, settings: Mapping[str, Any], selection: Selection, console: Console) -> int:
    """Figure http: the machine first, then the systems. Returns the exit status."""
    from evaluation.replay.launch import stop_on_sigterm  # the HTTP client is needed only here

    stop_on_sigterm()
    try:
        model = model_folder(options.model)
    except ValueError as error:
        print_error(error, console)
        return 2
    logs = options.results_dir / name_of(HTTP) / "logs"

    def run(name: str, points: Sequence[Point], complete: Complete) -> Outcome:
        described = [{"key": point.key, **point.task.describe()} for point in points]
        setting = {"experiment": name, "model": model_identity(model), "points": described}
        return run_experiment(name, setting, points, run_served_point, options.results_dir, console, complete=complete)

    alone = run(f"{name_of(HTTP)}-alone", [alone_point(settings, selection, model, logs)], unchanged_rows)
    if not alone.summary:
        return alone.print_outcome(console)
    here = found_here(settings, alone.summary[0])
    outcome = run(name_of(HTTP), make_served_points(settings, here, selection, model, logs), with_service_ratios)
    if outcome.summary:
        show_served(settings[HTTP], outcome.summary, console)
    return outcome.print_outcome(console)


def show_served(section: Mapping[str, Any], summary: Sequence[FlatRecord], console: Console) -> None:
    print_omniserve(section["shows"], summary, console)
    rows = [(words, bound, found, "yes" if holds else "NO") for words, bound, found, holds in contract(summary)]
    console.print(table(("what must hold", "bound", "found", "holds"), rows, left=("what must hold", "bound", "found")))


def name_of(section: str) -> str:
    """The name of a section's result folder and of its claims."""
    return f"omniserve-{section}"


def show(section: Mapping[str, Any], name: str, summary: Sequence[FlatRecord], folder: Path, console: Console) -> None:
    print_omniserve(section["shows"], summary, console)
    if claims := load_claims(name_of(name)):
        print_claims(claims, summary, console, with_assumptions=False)
        for line in section.get("differs", ()):
            console.print(f"Why it differs: {line}", highlight=False, markup=False, soft_wrap=True)
    png, _ = save_figure(draw_omniserve(section, summary), folder)
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
