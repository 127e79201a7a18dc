"""A figure of a paper: how its results are drawn, printed and compared with the paper's claims."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib import pyplot as plt
from rich.console import Console

from evaluation.experiments.papers.points import ROW
from evaluation.experiments.papers.sensitivity import varied_in
from evaluation.plots.sensitivity import draw_sensitivity
from evaluation.plots.style import show_figure
from evaluation.plots.table import print_results
from evaluation.results.claims import load_claims, print_claims
from evaluation.run import Derive, Run, unchanged_rows
from evaluation.study import Study


@dataclass(frozen=True)
class PaperFigure:
    """A figure of a paper. ``name`` is the name of its result folder and of its claims.

    ``metric`` is the metric of its sensitivity plots, ``what`` that metric in words. ``backends`` run by default
    on a machine without a GPU; with one, a paper's setting is measured, too. ``row`` are fields of places for its rows.
    ``derive`` adds fields that are computed from all rows together.
    """

    name: str
    title: str
    draw: Callable[[Run], plt.Figure]
    metric: str
    what: str
    backends: tuple[str, ...] = ("simulated",)
    paper: Literal["apex", "neo"] = "apex"
    row: tuple[str, ...] = ROW
    derive: Derive = unchanged_rows

    def experiment(self, name: str | None = None, configuration: Mapping[str, Any] | None = None) -> Study:
        """The experiment that runs and shows the figure.

        Args:
            name: that of its result folder.
            configuration: what decides the numbers of its points.
        """
        show_this = functools.partial(show, self)
        return Study(name or self.name, show_this, derive=self.derive, describe=lambda points: configuration or {})


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
