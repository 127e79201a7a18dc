"""A figure of a paper: how its results are read, drawn, printed and compared with the paper's claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from rich.console import Console

from evaluation.experiments.runner import Complete, unchanged_rows
from evaluation.experiments.sensitivity import varied_in
from evaluation.figures.apex_paper import draw_sensitivity
from evaluation.figures.style import save_figure
from evaluation.figures.table import print_results
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.provenance import machine_identity

SENSITIVITY = "_sensitivity"
"""Suffix of the name of a result folder in which an assumption was varied."""


@dataclass(frozen=True)
class Run:
    """A finished run. ``experiment`` is the name of the experiment, None if the folder has no provenance."""

    folder: Path
    experiment: str | None
    summary: Sequence[FlatRecord]
    machine: Mapping[str, Any]


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


def show(figure: PaperFigure, run: Run, console: Console) -> None:
    """Draw the figure into its folder; print the results and compare them with the claims."""
    claims = load_claims(figure.name)
    varied = varied_in(run.summary)
    if varied:
        drawing = draw_sensitivity(run.summary, claims, figure.metric, figure.what, run.machine)
    else:
        drawing = figure.draw(run)
    try:
        png, _ = save_figure(drawing, run.folder)
    except OSError as error:
        raise ValueError(f"cannot write the figure: {error}; copy the folder to a writable place") from None
    print_results(figure.title, run.summary, console)
    if not varied:
        print_claims(claims, run.summary, console)
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)
