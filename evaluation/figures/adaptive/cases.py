"""All cases: throughput of each system as a fraction of the bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from evaluation.experiments.axes import SUBJECT
from evaluation.figures.adaptive.tables import rows_by_case
from evaluation.figures.style import (
    FAINT,
    INK,
    FigureText,
    figure_legend,
    figure_style,
    set_words,
    system_colour,
    words_inches,
)
from evaluation.results.folder import FlatRecord

Records = Sequence[FlatRecord]

WIDTH, GROUP_HEIGHT = 11.5, 0.52
NAMES, BETWEEN, RIGHT, BELOW, ABOVE = 2.35, 0.15, 0.2, 0.6, 0.1
"""Inches around a column of bars: the cases' names, the gap to the next column, the axis."""


def draw_cases(summary: Records) -> plt.Figure:
    """Bars in groups, in two columns.

    Raises:
        ValueError: there is nothing to draw.
    """
    cases = rows_by_case(summary)
    systems = tuple(dict.fromkeys(row["system"] for row in summary))
    groups = list(cases.values())
    half = math.ceil(len(groups) / 2)
    text = cases_text(summary)
    height = words_inches(text, WIDTH) + half * GROUP_HEIGHT + BELOW + ABOVE
    with figure_style():
        figure = plt.figure(figsize=(WIDTH, height))
        bottom, top = set_words(figure, text, WIDTH, height)
        figure_legend(figure, systems, WIDTH, height)
        axes = figure.subplots(1, 2, sharex=True)
        bars_width = (WIDTH - 2 * NAMES - BETWEEN - RIGHT) / 2
        figure.subplots_adjust(
            left=NAMES / WIDTH,
            right=1 - RIGHT / WIDTH,
            bottom=bottom + BELOW / height,
            top=top - ABOVE / height,
            wspace=(NAMES + BETWEEN) / bars_width,
        )
        for ax, here in zip(axes, (groups[:half], groups[half:]), strict=True):
            draw_groups(ax, here, systems, half)
    return figure


def draw_groups(ax: Axes, groups: Sequence[Records], systems: Sequence[str], places: int) -> None:
    """A group of bars for each case, from the top; ``places`` is the number of groups that the axis has room for."""
    thick = 0.8 / len(systems)
    for place, rows in enumerate(groups):
        for row in rows:
            y = place + (systems.index(row["system"]) - (len(systems) - 1) / 2) * thick
            fraction = row["fraction_of_bound"]
            ax.barh(y, fraction, 0.92 * thick, color=system_colour(row["system"]))
            if row["system"] == SUBJECT and row["ratio_to_best_published"]:
                ratio = row["ratio_to_best_published"]
                weight = "bold" if round(ratio, 2) < 1 else "normal"
                words = f"{row['output_tokens_per_s']:.0f} tok/s, {ratio:.2f}\u00d7"
                ax.text(fraction + 0.01, y, words, va="center", fontsize=7.5, color=INK, fontweight=weight)
    ax.set_yticks(range(len(groups)), [rows[0]["case_title"] for rows in groups], fontsize=8.5)
    ax.set_ylim(places - 0.5, -0.5)
    ax.set_xlim(0, 1.15)  # room for the words beside bars that are nearly 1
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("output tokens/s over the bound, SIMULATED", color=FAINT)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", color="#E2E2E2", linewidth=0.7)
    ax.set_axisbelow(True)


def cases_text(summary: Records) -> FigureText:
    return FigureText(
        f"Throughput of {SUBJECT} and the papers' systems \u2014 SIMULATED",
        f"All requests at once; bars of {SUBJECT} are marked with its tokens/s and its ratio to the best of the others",
        "Predicted times, nothing measured. The bound is one of any schedule: it ignores filling, draining and the "
        "attention of prompts, so no schedule reaches 1.\n"
        "Names: GPU (host, where it is not APEX's), CPU attention where it is not the kernel's own rate, workload with "
        "mean input and output tokens.",
    )
