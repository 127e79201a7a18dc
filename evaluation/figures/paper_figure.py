"""A figure of a paper: how its results are drawn, printed and compared with the paper's claims."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib import pyplot as plt
from rich.console import Console

from evaluation.experiments.experiment import Experiment
from evaluation.experiments.runner import Complete, Run, unchanged_rows
from evaluation.experiments.sensitivity import varied_in
from evaluation.plots.sensitivity import draw_sensitivity
from evaluation.plots.style import show_figure
from evaluation.plots.table import print_results
from evaluation.results.claims import load_claims, print_claims


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper. ``name`` is the name of its experiment file, its result folder and its claims.

    ``metric`` is the metric of its sensitivity plots, ``what`` that metric in words. ``backends`` run by default
    on a machine without a GPU; with one, a paper's setting is measured, too.
    ``complete`` adds fields that are computed from all rows together.
    """

    name: str
    title: str
    draw: Callable[[Run], plt.Figure]
    metric: str
    what: str
    backends: tuple[str, ...] = ("simulated",)
    complete: Complete = unchanged_rows

    def experiment(self, name: str | None = None) -> Experiment:
        """The experiment that runs and shows the figure; ``name`` is that of its result folder."""
        return Experiment(name or self.name, functools.partial(show, self), self.complete)


def show(figure: PaperFigure, run: Run, console: Console) -> None:
    """Print the results and compare them with the claims; draw the figure into the run's folder.

    Raises:
        ValueError: the folder cannot be written to.
    """
    claims = load_claims(figure.name)
    print_results(figure.title, run.summary, console)
    if varied_in(run.summary):
        drawing = draw_sensitivity(run.summary, claims, figure.metric, figure.what, run.machine)
    else:
        print_claims(claims, run.summary, console)
        drawing = figure.draw(run)
    show_figure(drawing, run.folder, console)
