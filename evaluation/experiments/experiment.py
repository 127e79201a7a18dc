"""An experiment of a command: it runs what is not finished, shows the rows of all, and says what failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from apex.cli.output import stdout_console
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Complete, Point, Run, RunPoint, run_experiment, unchanged_rows
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.results.provenance import machine_identity
from swiftllm.machine import usable_cores

SENSITIVITY = "_sensitivity"
"""Suffix of the name of an experiment in which an assumption was varied."""

Show = Callable[[Run, Console], None]
"""Prints a run's rows and draws its figure into its folder; ValueError where it cannot."""


@dataclass(frozen=True)
class Experiment:
    """``name`` is that of its result folder, ``complete`` adds fields that are computed from all rows together."""

    name: str
    show: Show
    complete: Complete = unchanged_rows

    def run(
        self,
        points: Sequence[Point],
        results_dir: Path,
        console: Console,
        jobs: int | None = None,
        configuration: Mapping[str, Any] | None = None,
        run_point: RunPoint = run_point,
        run_alone: RunPoint | None = None,
        refused: Sequence[str] = (),
    ) -> int:
        """Run the points that are not finished, show all that are, print what failed.

        Args:
            jobs: simulated points to run in parallel; by default one per usable core.
            configuration: what decides the numbers; by default points are described as simulated ones.
            run_alone: runs the points that measure, in place of ``run_point``.
            refused: what cannot be run, in words.

        Returns:
            The exit status: 0 when every point is finished.
        """
        described = {"simulated": describe_simulated_points(points)} if configuration is None else configuration
        run = run_experiment(
            self.name,
            {"experiment": self.name, **described},
            points,
            run_point,
            results_dir,
            console,
            jobs or usable_cores(),
            self.complete,
            run_alone,
        )
        if run.summary:
            self.show(run, console)
        for reason in refused:
            console.print(f"not possible: {reason}", soft_wrap=True)
        return run.print_outcome(console)


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
