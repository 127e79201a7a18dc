"""A study runs the points that are not finished, and shows the rows of all. A command runs studies.

A command of ``evaluation`` is a declaration: a dataclass of options, its studies, and which of them the options
choose. :func:`command` makes its ``main``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.drivers import run_point
from evaluation.options import RunOptions
from evaluation.results.folder import ResultFolder, read_json
from evaluation.results.progress import print_line
from evaluation.results.provenance import machine_identity
from evaluation.run import (
    Derive,
    Point,
    Run,
    RunPoint,
    identity,
    one_line_errors,
    print_error,
    run_unfinished_points,
    summarise,
    unchanged_rows,
)
from swiftllm.machine import usable_cores

SENSITIVITY = "_sensitivity"
"""Suffix of the name of an experiment in which an assumption was varied."""

Show = Callable[[Run, Console], None]
"""Prints a run's rows and draws its figure into its folder; ValueError where it cannot."""


def as_simulated(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of simulated points."""
    return {"simulated": identity(points)}


@dataclass(frozen=True)
class Study:
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
        """Run the points that are not finished, write the summary of all that are, and show it.

        If a point raises, its traceback goes to ``errors/`` and the other points still run; the next run tries it
        again. First the concurrent points run, then the others one by one.

        Args:
            jobs: simulated points to run in parallel; by default one per usable core. What runs them is picklable then.
            run_alone: runs the points that measure, in place of ``run_point``.

        Raises:
            SystemExit: the run was interrupted, or the folder cannot be written to. A message has been printed.
        """
        keys = [point.key for point in points]
        if len(set(keys)) < len(keys):
            raise ValueError(f"points share keys: {sorted(key for key in set(keys) if keys.count(key) > 1)}")
        console = console or stdout_console()
        try:
            folder = ResultFolder(self.name, {"experiment": self.name, **self.describe(points)}, results_dir)
            folder.record_invocation()
        except OSError as error:
            print_error(f"cannot write results: {error}; choose another folder with --results-dir", console)
            raise SystemExit(2) from None
        try:
            jobs = jobs or usable_cores()
            run_unfinished_points(folder, points, self.run_point, run_alone or self.run_point, jobs, console)
        except KeyboardInterrupt:
            kept = sum(folder.finished_point(key) is not None for key in keys)
            kept_text = f"{kept} of {len(points)} points are kept in {folder.path}"
            print_line(console, f"interrupted: {kept_text}; the same command continues there", "yellow")
            raise SystemExit(128 + signal.SIGINT) from None
        finished = summarise(folder, points)
        summary = self.derive(finished) if finished else []
        folder.save_summary(summary)
        failed = [point.label for point in points if folder.finished_point(point.key) is None]
        run = Run(folder.path, self.name, summary, folder.identity["machine"], failed)
        if summary and self.show is not None:
            self.show(run, console)
        return run


Options = TypeVar("Options", bound=RunOptions)
Main = Callable[..., int]
"""The ``main`` of a command: options, by default those of the command line, to the exit status."""


def command(
    options_type: type[Options],
    experiments: Callable[[Options], Sequence[Study]],
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


def show_again(folder: Path, experiments: Sequence[Study]) -> int:
    """Show a finished run of one of the experiments, or of its sensitivity. Returns the exit status 0.

    Raises:
        ValueError: the folder has no results, or those of another experiment, or does not say of which.
    """
    by_name = {experiment.name: experiment for experiment in experiments}
    summary_file, provenance_file = folder / "summary.json", folder / "provenance.json"
    if not summary_file.is_file() or not (summary := read_json(summary_file)):
        example = f"results/{experiments[0].name}/latest"
        raise ValueError(f"no results in {folder}: give a folder that has a summary.json, such as {example}")
    name, machine = None, machine_identity()
    if provenance_file.is_file():
        provenance = read_json(provenance_file)
        name, machine = provenance["configuration"].get("experiment", "something else"), provenance["machine"]
        if name.removesuffix(SENSITIVITY) not in by_name:
            raise ValueError(f"{folder} holds results of {name}, not of {' or '.join(by_name)}")
    elif len(by_name) > 1:
        raise ValueError(f"{folder} has no provenance.json, so it is unknown which of {', '.join(by_name)} it holds")
    experiment = by_name[(name or experiments[0].name).removesuffix(SENSITIVITY)]
    experiment.show(Run(folder.resolve(), name, summary, machine), stdout_console())
    return 0
