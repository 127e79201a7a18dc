"""A value over a swept variable: one line per system, with its name at the end of the line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from evaluation.plots.notes import PREDICTION
from evaluation.plots.style import FAINT, POINTS_PER_INCH, FigureText, panel_title, sheet, tidy_axes

COLUMNS = 3
"""Panels in a row."""
PANEL_WIDTH, AXES_HEIGHT = 5.6, 2.8
SPACE = {"left": 0.85, "right": 0.95, "below": 0.55, "above": 0.42}
"""Inches around a panel; to the right are the names of the lines."""
WIDTH = 1.8
"""Of lines, in points."""
LABEL_SIZE, MIN_LABEL_GAP = 9, 11
"""In points. Names of lines that end close together are moved apart by the gap."""
LABEL_DISTANCE, LEAST_DISTANCE = 0.025, 0.095
"""From the end of a line to its name: a fraction of the axes' width, but at least so many inches."""

PREDICTED_LINE = {"linestyle": (0, (3, 2)), "linewidth": 1.1}


@dataclass(frozen=True)
class Series:
    """A line. ``dashed`` lines are derived from other lines. ``spans`` are (x, lowest, highest) of repeats.

    ``predicted`` is the same line as predicted: faint, dashed, without markers.
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    spans: Sequence[tuple[float, float, float]] = ()
    predicted: Sequence[tuple[float, float]] = ()
    width: float = WIDTH


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a paper's claim; ``label`` is in the panel's legend."""

    value: float
    label: str
    colour: str


@dataclass(frozen=True)
class LinePanel:
    """``marks`` are words at the bottom of the panel, by their x."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    levels: Sequence[Level] = ()
    log_x: bool = False
    x_from_0: bool = True
    """Else a linear x axis has no more than its points, with a tick at each."""
    log_y: bool = False
    y_from: float = 0.0
    """Where a linear y axis begins."""
    y_to: float = 0.0
    """A value that a linear y axis reaches at least."""
    decades: float = 0.0
    """What a logarithmic y axis spans at least, so that small differences look small."""
    marks: Sequence[tuple[float, str]] = ()


def line_figure(
    panels: Sequence[LinePanel],
    text: FigureText,
    columns: int = COLUMNS,
    panel_width: float = PANEL_WIDTH,
    height: float = AXES_HEIGHT,
) -> plt.Figure:
    """Panels beside each other, up to ``columns`` in a row; width of a panel and height of its axes are in inches.

    Raises:
        ValueError: there is nothing to draw.
    """
    panels = [panel for panel in panels if any(series.points for series in panel.series)]
    if not panels:
        raise ValueError("nothing to draw: no point is finished")
    columns = min(len(panels), columns)
    width = panel_width * (columns if columns > 1 else 1.6)
    figure, axes = sheet(text, -(-len(panels) // columns), columns, width=width, height=height, **SPACE)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        draw_panel(ax, panel)
    return figure


def draw_panel(ax: Axes, panel: LinePanel) -> None:
    drawn = [series for series in panel.series if series.points]
    for series in drawn:
        xs, ys = zip(*sorted(series.points), strict=True)
        dash = (0, (4, 2)) if series.dashed else "solid"
        size = 3.5 + series.width - WIDTH
        ax.plot(xs, ys, color=series.colour, linestyle=dash, marker="o", markersize=size, linewidth=series.width)
        if series.predicted:
            ax.plot(*zip(*sorted(series.predicted), strict=True), color=series.colour, alpha=0.55, **PREDICTED_LINE)
        if series.spans:
            places, lows, highs = zip(*series.spans, strict=True)
            ax.vlines(places, lows, highs, color=series.colour, linewidth=1.0)
    if panel.log_x:
        ax.set_xscale("log")
    if panel.log_x or not panel.x_from_0:
        ax.margins(x=0.05 if panel.log_x else 0.15)
        ax.set_xticks(sorted({x for series in drawn for x, _ in series.points}))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_xlim(left=0)
    ends = [y for series in drawn for _, y in [*series.points, *series.predicted]]
    if panel.log_y:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        if panel.decades:
            low, high = math.log10(min(ends)), math.log10(max(ends))
            pad = max(0.0, panel.decades - (high - low)) / 2
            ax.set_ylim(10 ** (low - pad - 0.3), 10 ** (high + pad + 0.1))
    else:
        highest = max([*ends, *(level.value for level in panel.levels), panel.y_to])
        ax.set_ylim(panel.y_from, highest + 0.1 * (highest - panel.y_from))
    for x, words in panel.marks:
        ax.text(x, 0.03, words, transform=ax.get_xaxis_transform(), fontsize=7.5, ha="center")
    draw_levels(ax, panel.levels, with_prediction=any(series.predicted for series in drawn))
    panel_title(ax, panel.title)
    ax.set_xlabel(panel.x_label + (", log scale" if panel.log_x else ""), color=FAINT, labelpad=5)
    begins = f"\naxis from {panel.y_from:g} on" if panel.y_from else ""
    ax.set_ylabel(panel.y_label + ("\nlog scale" if panel.log_y else begins))
    tidy_axes(ax)
    name_lines(ax, drawn)


def draw_levels(ax: Axes, levels: Sequence[Level], *, with_prediction: bool) -> None:
    """Horizontal lines, with a legend where it hides the least data. The legend also names predicted lines."""
    for level in levels:
        ax.axhline(level.value, color=level.colour, linewidth=1.0, linestyle=(0, (1, 2)), label=level.label)
    handles = [line for line in ax.get_lines() if line.get_label() in {level.label for level in levels}]
    if with_prediction:
        handles.append(Line2D([], [], color=FAINT, label=PREDICTION, **PREDICTED_LINE))
    if handles:
        ax.legend(handles=handles, loc="best", fontsize=7.5, labelcolor="linecolor", frameon=False, handlelength=1.5)


def name_lines(ax: Axes, drawn: Sequence[Series]) -> None:
    """Each line's name beside its end, in the order of the ends. Names of close ends are moved apart."""
    ax.autoscale_view()  # limits computed later would move the ends
    to_axes = ax.transData + ax.transAxes.inverted()
    ends = [(to_axes.transform(max(series.points)), series) for series in drawn]
    ends.sort(key=lambda end: end[0][1])
    width, height = ax.figure.get_size_inches() * ax.get_position().size
    distance = max(LABEL_DISTANCE, LEAST_DISTANCE / width)
    places = spread_labels([y for (_, y), _ in ends], MIN_LABEL_GAP / (POINTS_PER_INCH * height))
    for ((x, y), series), place in zip(ends, places, strict=True):
        ax.annotate(
            series.label,
            (x, y),
            xycoords="axes fraction",
            xytext=(x + distance, place),
            textcoords="axes fraction",
            arrowprops={"arrowstyle": "-", "color": series.colour, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3},
            va="center",
            fontsize=LABEL_SIZE,
            fontweight="bold",
            color=series.colour,
        )


def spread_labels(heights: Sequence[float], gap: float) -> list[float]:
    """Positions in [0, 1] that are at least ``gap`` apart and nearest to ascending ``heights`` (least squares)."""
    pools: list[tuple[float, int]] = []  # mean position and number of labels that touch each other
    for number, height in enumerate(heights):
        mean, count = height - number * gap, 1
        while pools and pools[-1][0] > mean:
            other, others = pools.pop()
            mean, count = (mean * count + other * others) / (count + others), count + others
        pools.append((mean, count))
    highest = max(0.0, 1 - (len(heights) - 1) * gap)
    bases = [min(max(mean, 0.0), highest) for mean, count in pools for _ in range(count)]
    return [base + number * gap for number, base in enumerate(bases)]
