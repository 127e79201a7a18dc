"""Reproduces the figures of OmniServe's evaluation (10 to 19), SIMULATED, and compares them with its claims.

python evaluation/reproduce_omniserve.py [--figure a10 10 18] [--help]
python evaluation/reproduce_omniserve.py --figure http           # MEASURED: servers on this machine
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from apex.cli.output import table
from evaluation.experiments.experiment import Experiment, command
from evaluation.experiments.omniserve.points import Selection, make_omniserve_points
from evaluation.experiments.omniserve.ratios import with_service_ratios
from evaluation.experiments.omniserve.served import (
    alone_point,
    contract,
    found_here,
    make_served_points,
    run_served_point,
)
from evaluation.experiments.options import Folder, Names, TraceOptions, experiment_settings
from evaluation.experiments.runner import Point, Run
from evaluation.figures.omniserve.draw import draw_omniserve
from evaluation.figures.omniserve.tables import print_omniserve
from evaluation.figures.style import show_figure
from evaluation.measure.sessions import stop_on_sigterm
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.paths import model_folder
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
class Options(TraceOptions):
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
    model: Folder = None
    """Folder of the model that figure http serves; by default SmolLM2-135M-Instruct."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.duration is not None and self.duration <= 0:
            raise ValueError(f"--duration {self.duration:g} must be more than 0 seconds")


def experiments(options: Options) -> list[Experiment]:
    """Those of the sections of the experiment file, and the one that serves."""
    settings = experiment_settings("omniserve", options.config)
    selection = Selection(options.systems, options.quick, options.duration, options.seed, options.trace_dir)

    def simulated(section: str, here: Mapping[str, Any]) -> Experiment:
        name = name_of(section)
        show_section = functools.partial(show, here, name)
        points = functools.partial(make_omniserve_points, settings, section)
        return Experiment(name, show_section, lambda options: points(selection), with_service_ratios)

    model = functools.cache(lambda: model_folder(options.model))
    served = Experiment(
        name_of(HTTP),
        functools.partial(show_served, settings[HTTP]),
        lambda options: served_points(options.results_dir, settings, selection, model()),
        with_service_ratios,
        run_served_point,
        lambda points: described(points, model()),
    )
    return [served, *(simulated(section, here) for section, here in settings["figures"].items())]


def chosen(options: Options) -> list[str]:
    return [name_of(HTTP if figure == HTTP else SECTIONS[figure]) for figure in options.figure]


def described(points: Sequence[Point], model: Path) -> dict[str, Any]:
    tasks = [{"key": point.key, **point.task.describe()} for point in points]
    return {"model": model_identity(model), "points": tasks}


def served_points(results_dir: Path, settings: Mapping[str, Any], selection: Selection, model: Path) -> Sequence[Point]:
    """The points of figure http. The machine is measured first: its throughput decides the load.

    Raises:
        ValueError: the machine's throughput could not be measured.
    """
    stop_on_sigterm()
    logs, name = results_dir / name_of(HTTP) / "logs", f"{name_of(HTTP)}-alone"
    alone = Experiment(name, run_point=run_served_point, describe=lambda points: described(points, model))
    found = alone.run([alone_point(settings, selection, model, logs)], results_dir)
    if not found.summary:
        raise ValueError(f"no throughput of this machine; see errors/ in {found.folder}")
    return make_served_points(settings, found_here(settings, found.summary[0]), selection, model, logs)


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


main = command(Options, experiments, chosen)

if __name__ == "__main__":
    sys.exit(main())
