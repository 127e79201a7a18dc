"""Reproduces the figures of OmniServe's evaluation (10 to 19), SIMULATED, and compares them with its claims.

python evaluation/reproduce_omniserve.py [--figure a10 10 18] [--help]
python evaluation/reproduce_omniserve.py --figure http           # MEASURED: servers on this machine
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from apex.cli.output import stdout_console, table
from apex.cli.parser import parse_options
from evaluation.experiments.experiment import Experiment, show_again
from evaluation.experiments.omniserve.points import Selection, make_omniserve_points
from evaluation.experiments.omniserve.ratios import with_service_ratios
from evaluation.experiments.omniserve.served import (
    alone_point,
    contract,
    found_here,
    make_served_points,
    run_served_point,
)
from evaluation.experiments.omniserve.show import draw_omniserve, print_omniserve
from evaluation.experiments.options import (
    File,
    Folder,
    FromFolder,
    Jobs,
    Names,
    ResultsDir,
    TraceDir,
    experiment_settings,
)
from evaluation.experiments.runner import Point, Run, one_line_errors, run_experiment
from evaluation.plots.style import show_figure
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.paths import RESULTS_DIR, model_folder
from evaluation.results.provenance import model_identity

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
    jobs: Jobs = None
    trace_dir: TraceDir = None
    model: Folder = None
    """Folder of the model that figure http serves; by default SmolLM2-135M-Instruct."""
    config: File = None
    """Experiment file to use instead of configs/experiments/omniserve.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to omniserve-<figure>/<run>/ in this folder."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from this result folder."""

    def __post_init__(self) -> None:
        if self.duration is not None and self.duration <= 0:
            raise ValueError(f"--duration {self.duration:g} must be more than 0 seconds")


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    settings, console = experiment_settings("omniserve", options.config), stdout_console()
    experiments = {
        section: Experiment(name_of(section), functools.partial(show, here, name_of(section)), with_service_ratios)
        for section, here in settings["figures"].items()
    }
    served = Experiment(name_of(HTTP), functools.partial(show_served, settings[HTTP]), with_service_ratios)
    if options.from_folder is not None:
        return show_again(options.from_folder, [*experiments.values(), served])
    selection = Selection(options.systems, options.quick, options.duration, options.seed, options.trace_dir)
    sections = dict.fromkeys(SECTIONS[figure] for figure in options.figure if figure != HTTP)
    points = {section: make_omniserve_points(settings, section, selection) for section in sections}
    status = run_served(served, options, settings, selection, console) if HTTP in options.figure else 0
    for section, here in points.items():
        status = max(status, experiments[section].run(here, options.results_dir, console, options.jobs))
    return status


def run_served(
    experiment: Experiment, options: Options, settings: Mapping[str, Any], selection: Selection, console: Console
) -> int:
    """Figure http: the machine first, then the systems. Returns the exit status.

    Raises:
        ValueError: there is no model.
    """
    from evaluation.replay.launch import stop_on_sigterm  # the HTTP client is needed only here

    stop_on_sigterm()
    model, logs = model_folder(options.model), options.results_dir / experiment.name / "logs"

    def described(points: Sequence[Point]) -> dict[str, Any]:
        tasks = [{"key": point.key, **point.task.describe()} for point in points]
        return {"model": model_identity(model), "points": tasks}

    name, points = f"{experiment.name}-alone", [alone_point(settings, selection, model, logs)]
    setting = {"experiment": name, **described(points)}
    alone = run_experiment(name, setting, points, run_served_point, options.results_dir, console)
    if not alone.summary:
        return alone.print_outcome(console)
    points = make_served_points(settings, found_here(settings, alone.summary[0]), selection, model, logs)
    return experiment.run(
        points, options.results_dir, console, configuration=described(points), run_point=run_served_point
    )


def show_served(section: Mapping[str, Any], run: Run, console: Console) -> None:
    print_omniserve(section["shows"], run.summary, console)
    rows = [(words, bound, found, "yes" if holds else "NO") for words, bound, found, holds in contract(run.summary)]
    console.print(table(("what must hold", "bound", "found", "holds"), rows, left=("what must hold", "bound", "found")))


def name_of(section: str) -> str:
    """The name of a section's result folder and of its claims."""
    return f"omniserve-{section}"


def show(section: Mapping[str, Any], name: str, run: Run, console: Console) -> None:
    print_omniserve(section["shows"], run.summary, console)
    if claims := load_claims(name):
        print_claims(claims, run.summary, console, with_assumptions=False)
        for line in section.get("differs", ()):
            console.print(f"Why it differs: {line}", highlight=False, markup=False, soft_wrap=True)
    show_figure(draw_omniserve(section, run.summary), run.folder, console)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
