"""Bars side by side in groups, such as the throughput of systems: panels in a row, parts of a figure in a column."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend

from evaluation.plots.notes import PREDICTION
from evaluation.plots.style import (
    FAINT,
    INK,
    POINTS_PER_INCH,
    FigureText,
    inches_of,
    legend,
    panel_title,
    sheet,
    system_colour,
    tidy_axes,
    times,
)
from evaluation.results.folder import PREDICTED, FlatRecord, span_of

METRIC = "output_tokens_per_s"
WIDTH, AXES_HEIGHT = 12.4, 2.8
SYSTEMS_OF_WIDTH = 4
"""Systems whose bars have room for their numbers in this width; more systems make a figure wider."""
SPACE = {"left": 0.72, "right": 0.15, "below": 0.7, "above": 0.42}
MARKER_HALF, LABEL_HEIGHT = 5.0, 9.0
"""In points: half a marker of a prediction, and the numbers above bars."""
BACKGROUNDS = ("#F4F7FA", "#FFFFFF")
GROUP = 0.84
"""Of the distance between groups, for all bars of one."""


@dataclass(frozen=True)
class Bar:
    """``span`` are the lowest and the highest of repeats, ``predicted`` is marked with a hollow diamond.

    Of one that ``is_open`` only the outline is drawn.
    """

    value: float
    colour: str
    text: str = ""
    faint: bool = False
    is_open: bool = False
    bold: bool = False
    span: tuple[float, float] | None = None
    predicted: float | None = None

    @property
    def end(self) -> float:
        return self.span[1] if self.span else self.value


@dataclass(frozen=True)
class BarPanel:
    """``groups`` are the bars by the label below them; None is a bar without a result.

    A panel without groups keeps its place where another part of the figure has it, with its title alone.
    """

    title: str
    x_label: str
    groups: Sequence[tuple[str, Sequence[Bar | None]]]
    y_label: str = ""


@dataclass(frozen=True)
class Half:
    """A part of a figure: panels of one kind, all measured, or all simulated in one reading of the paper's machines."""

    panels: Sequence[BarPanel]
    systems: Sequence[str]
    text: FigureText


def rate_bars(records: Iterable[FlatRecord], systems: Sequence[str], baseline: str) -> list[Bar | None]:
    """Output tokens/s of each system, marked with its ratio to the baseline's, and the baseline with its rate."""
    by_system = {record["system"]: record for record in records}
    base = by_system.get(baseline, {}).get(METRIC)
    bars: list[Bar | None] = []
    for system in systems:
        row = by_system.get(system, {})
        if not (rate := row.get(METRIC)):
            bars.append(None)
            continue
        is_ratio = bool(system != baseline and base)
        text = times(row.get("ratio") or rate / base) if is_ratio else f"{rate:.0f}"
        looks = {"faint": not is_ratio, "bold": is_ratio, "span": span_of(row, METRIC), "predicted": row.get(PREDICTED)}
        bars.append(Bar(rate, system_colour(system), text, **looks))
    return bars


def throughput_figure(halves: Sequence[Half]) -> Figure:
    """The parts of a figure below each other, each with its panels in a row.

    Raises:
        ValueError: there is nothing to draw.
    """
    halves = [half for half in halves if any(panel.groups for panel in half.panels)]
    if not halves:
        raise ValueError("nothing to draw: no point is finished")
    alone = len(halves) == 1
    width = WIDTH * max(1.0, max(len(half.systems) for half in halves) / SYSTEMS_OF_WIDTH)
    of_axes = AXES_HEIGHT + SPACE["below"] + SPACE["above"]
    heights = [inches_of(half.text, width, of_axes) for half in halves]
    figure = plt.figure(figsize=(width, sum(heights)))
    parts = [figure] if alone else figure.subfigures(len(halves), 1, height_ratios=heights)
    for part, half, background in zip(parts, halves, itertools.cycle(BACKGROUNDS), strict=False):
        panels = [panel for panel in half.panels if panel.groups or not alone]
        part.set_facecolor("white" if alone else background)
        widths = [max(len(panel.groups), 3) for panel in panels]
        shape: dict[str, Any] = {"columns": len(panels), "between": 0.6, "width_ratios": widths}
        _, axes = sheet(half.text, **shape, width=width, height=AXES_HEIGHT, half=part, **SPACE)
        legend(part, half.systems, size=(width, part.bbox.height / figure.dpi))
        for ax, panel in zip(axes.flat, panels, strict=True):
            if not panel.groups:
                ax.set_axis_off()
                ax.text(0.5, 0.5, panel.title, ha="center", va="center", color=FAINT, transform=ax.transAxes)
                continue
            draw_bars(ax, panel)
            if ax is not axes[0, 0]:
                ax.set_ylabel("")
    return figure


def draw_bars(ax: Axes, panel: BarPanel, size: float = 6.8) -> None:
    """One panel; ``size`` of the numbers above bars is in points."""
    count = max(len(bars) for _, bars in panel.groups)
    bar_width = GROUP / count
    top = axis_top([bar for _, bars in panel.groups for bar in bars if bar])
    predictions = []
    for index, (_, bars) in enumerate(panel.groups):
        for place, bar in enumerate(bars):
            x = index + (place - (len(bars) - 1) / 2) * bar_width
            if bar is None:
                ax.text(x, 0.02 * top, "no result", rotation=90, ha="center", va="bottom", fontsize=7, color=FAINT)
                continue
            filled = {"color": "white", "edgecolor": bar.colour} if bar.is_open else {"color": bar.colour}
            ax.bar(x, bar.value, bar_width * 0.92, **filled)
            if bar.span and bar.span[1] > bar.span[0]:
                ends = [[bar.value - bar.span[0]], [bar.span[1] - bar.value]]
                ax.errorbar(x, bar.value, ends, color=INK, linewidth=0.9, capsize=2.5)
            if bar.predicted:
                predictions.append((x, bar.predicted))
            at = {"xytext": (0, label_distance(bar.end, bar.predicted, top)), "textcoords": "offset points"}
            looks = {"color": FAINT if bar.faint else INK, "fontweight": "bold" if bar.bold else "normal"}
            ax.annotate(bar.text, (x, bar.end), ha="center", fontsize=size, **at, **looks)
    ax.set_xticks(range(len(panel.groups)), [label for label, _ in panel.groups], linespacing=1.4)
    ax.set_xlim(-0.6, len(panel.groups) - 0.4)
    if predictions:
        draw_predictions(ax, predictions)
    ax.set_ylim(0, top)
    ax.tick_params(axis="x", length=0)
    tidy_axes(ax)
    panel_title(ax, panel.title)
    ax.set_xlabel(panel.x_label, color=FAINT, labelpad=6)
    ax.set_ylabel(panel.y_label)


def axis_top(bars: Sequence[Bar]) -> float:
    """The end of the y axis: room for the numbers above the bars, and for the legend of predictions above these."""
    predicted = [bar.predicted for bar in bars if bar.predicted]
    highest = max([*(bar.end for bar in bars), *predicted], default=0.0)
    return highest * (1.27 if predicted else 1.13) or 1.0


def label_distance(high: float, predicted: float | None, top: float) -> float:
    """Points between a bar's end and its number: above the marker of the prediction where they would overlap."""
    if not predicted:
        return 3.0
    above = (predicted - high) / top * AXES_HEIGHT * POINTS_PER_INCH
    return max(3.0, above + MARKER_HALF) if -MARKER_HALF < above < LABEL_HEIGHT + MARKER_HALF else 3.0


def draw_predictions(ax: Axes, predictions: Sequence[tuple[float, float]]) -> None:
    """A marker at each (x, tokens/s), and its entry in the panel's legend."""
    xs, ys = zip(*predictions, strict=True)
    marks = ax.scatter(xs, ys, 22, marker="D", facecolor="white", edgecolor=INK, linewidth=1.0, zorder=4)
    # Not ax.legend: the systems' legend would replace it.
    ax.add_artist(Legend(ax, [marks], [PREDICTION], loc="upper left", fontsize=8, frameon=False, handletextpad=0.3))
