"""Many groups of bars, one below the other, in two columns: fractions of something, from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from evaluation.plots.bars import Bar
from evaluation.plots.style import FAINT, INK, FigureText, legend, sheet, tidy_axes

WIDTH, GROUP_HEIGHT = 11.5, 0.52
SPACE = {"left": 2.35, "right": 0.2, "below": 0.6, "above": 0.1, "between": 2.5}
"""Inches; to the left are the names of the groups."""


def rows_of_bars(
    groups: Sequence[tuple[str, Sequence[Bar]]], systems: Sequence[str], text: FigureText, x_label: str
) -> Figure:
    """A bar for each system in each group, with its words at its end."""
    half = math.ceil(len(groups) / 2)
    figure, axes = sheet(text, 1, 2, width=WIDTH, height=half * GROUP_HEIGHT, sharex=True, **SPACE)
    legend(figure, systems)
    thick = 0.8 / len(systems)
    for ax, here in zip(axes.flat, (groups[:half], groups[half:]), strict=True):
        for place, (_, bars) in enumerate(here):
            for line, bar in enumerate(bars):
                y = place + (line - (len(systems) - 1) / 2) * thick
                ax.barh(y, bar.value, 0.92 * thick, color=bar.colour)
                looks = {"fontsize": 7.5, "color": INK, "fontweight": "bold" if bar.bold else "normal"}
                if bar.text:
                    ax.text(bar.value + 0.01, y, bar.text, va="center", **looks)
        ax.set_yticks(range(len(here)), [label for label, _ in here], fontsize=8.5)
        ax.set_ylim(half - 0.5, -0.5)
        ax.set_xlim(0, 1.15)  # room for the words beside bars that are nearly 1
        ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(x_label, color=FAINT)
        tidy_axes(ax, grid="x")
    return figure
