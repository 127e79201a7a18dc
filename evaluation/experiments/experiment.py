"""An experiment runs the points that are not finished, and shows the rows of all. A command runs experiments.

A command of ``evaluation`` is a declaration: a dataclass of options, its experiments, and which of them the options
choose. :func:`command` makes its ``main``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.options import RunOptions
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Derive, Point, Run, RunPoint, one_line_errors, run_experiment, unchanged_rows
from evaluation.experiments.simulated_point import describe_simulated_points
from evaluation.results.provenance import machine_identity
from swiftllm.machine import usable_cores

SENSITIVITY = "_sensitivity"
"""Suffix of the name of an experiment in which an assumption was varied."""

Show = Callable[[Run, Console], None]
"""Prints a run's rows and draws its figure into its folder; ValueError where it cannot."""


def as_simulated(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of simulated points."""
    return {"simulated": describe_simulated_points(points)}


@dataclass(frozen=True)
class Experiment:
    """Points and what becomes of their rows.

    Attributes:
        name: of its result folder.
        points: the points that a command's options choose; ValueError where an option is not valid.
        derive: adds fields to the rows that are computed from all rows together.
        run_point: runs a point.
        describe: what decides the numbers of points, JSON-able: a run is continued only where it is equal.
    """

    name: str
    show: Show | None = None
    points: Callable[[Any], Sequence[Point]] = lambda options: ()
    derive: Derive = unchanged_rows
    run_point: RunPoint = run_point
    describe: Callable[[Sequence[Point]], Mapping[str, Any]] = as_simulated

    def run(
        self,
        points: Sequence[Point],
        results_dir: Path,
        jobs: int | None = None,
        *,
        run_alone: RunPoint | None = None,
        console: Console | None = None,
    ) -> Run:
        """Run the points that are not finished, show all that are.

        Args:
            jobs: simulated points to run in parallel; by default one per usable core.
            run_alone: runs the points that measure, in place of ``run_point``.
        """
        console = console or stdout_console()
        run = run_experiment(
            self.name,
            {"experiment": self.name, **self.describe(points)},
            points,
            self.run_point,
            results_dir,
            console,
            jobs or usable_cores(),
            self.derive,
            run_alone,
        )
        if run.summary and self.show is not None:
            self.show(run, console)
        return run


Options = TypeVar("Options", bound=RunOptions)


Main = Callable[..., int]
"""The ``main`` of a command: options, by default those of the command line, to the exit status."""


def command(
    options_type: type[Options],
    experiments: Callable[[Options], Sequence[Experiment]],
    chosen: Callable[[Options], Sequence[str]] | None = None,
    run: Callable[[Options], int] | None = None,
) -> Main:
    """The ``main`` of a command that runs experiments, or with ``--from`` shows a finished run of one of them.

    Its exit status is 0 when every point is finished, 1 when some failed, 2 for invalid options. The points of all
    chosen experiments are made before any of them runs, so that an invalid option is seen at once.

    Args:
        experiments: all experiments of the command.
        chosen: names of those to run, in this order; by default all.
        run: runs them in another way, to the exit status.
    """

    @one_line_errors
    def main(options: Options | None = None) -> int:
        options = parse_options(options_type) if options is None else options
        known = {experiment.name: experiment for experiment in experiments(options)}
        if options.from_folder is not None:
            return show_again(options.from_folder, list(known.values()))
        if run is not None:
            return run(options)
        names = list(known) if chosen is None else list(dict.fromkeys(chosen(options)))
        points = {name: known[name].points(options) for name in names}
        console, status = stdout_console(), 0
        for name, here in points.items():
            finished = known[name].run(here, options.results_dir, options.jobs, console=console)
            status |= finished.print_outcome(console)
        return status

    return main


def show_again(folder: Path, experiments: Sequence[Experiment]) -> int:
    """Show a finished run of one of the experiments. Returns the exit status 0.

    Raises:
        ValueError: the folder has no results, or those of another experiment, or does not say of which.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    run = read_run(folder, list(by_name))
    if run.experiment is None and len(by_name) > 1:
        raise ValueError(f"{folder} has no provenance.json, so it is unknown which of {', '.join(by_name)} it holds")
    name = (run.experiment or experiments[0].name).removesuffix(SENSITIVITY)
    by_name[name].show(run, stdout_console())
    return 0


def read_run(folder: Path, wanted: Sequence[str]) -> Run:
    """A finished run of one of the ``wanted`` experiments, or of its sensitivity to an assumption.

    Raises:
        ValueError: the folder has no results, or those of another experiment.
    """
    summary_file, provenance_file = folder / "summary.json", folder / "provenance.json"
    if not summary_file.is_file() or not (summary := json.loads(summary_file.read_text())):
        example = f"results/{wanted[0]}/latest"
        raise ValueError(f"no results in {folder}: give a folder that has a summary.json, such as {example}")
    if not provenance_file.is_file():
        return Run(folder.resolve(), None, summary, machine_identity())
    provenance = json.loads(provenance_file.read_text())
    experiment = provenance["configuration"].get("experiment", "something else")
    if experiment.removesuffix(SENSITIVITY) not in wanted:
        raise ValueError(f"{folder} holds results of {experiment}, not of {' or '.join(wanted)}")
    return Run(folder.resolve(), experiment, summary, provenance["machine"])
