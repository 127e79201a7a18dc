"""Forms of pictures: groups of bars, lines over a swept variable, rows of bars, heat maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.figure import Figure as Drawing
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from evaluation.plots.figure import Axis
from evaluation.plots.figure import Figure as DeclaredFigure
from evaluation.plots.notes import PREDICTION, figure_text
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
from evaluation.results.rows import distinct, grouped
from evaluation.run import Run

# -- bars side by side in groups: panels in a row, parts of a figure in a column --------------------------------------

METRIC = "output_tokens_per_s"
BARS_WIDTH, AXES_HEIGHT = 12.4, 2.8
SYSTEMS_OF_WIDTH = 4
"""Systems whose bars have room for their numbers in this width; more systems make a figure wider."""
BARS_SPACE = {"left": 0.72, "right": 0.15, "below": 0.7, "above": 0.42}
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
    width = BARS_WIDTH * max(1.0, max(len(half.systems) for half in halves) / SYSTEMS_OF_WIDTH)
    of_axes = AXES_HEIGHT + BARS_SPACE["below"] + BARS_SPACE["above"]
    heights = [inches_of(half.text, width, of_axes) for half in halves]
    figure = plt.figure(figsize=(width, sum(heights)))
    parts = [figure] if alone else figure.subfigures(len(halves), 1, height_ratios=heights)
    for part, half, background in zip(parts, halves, itertools.cycle(BACKGROUNDS), strict=False):
        panels = [panel for panel in half.panels if panel.groups or not alone]
        part.set_facecolor("white" if alone else background)
        widths = [max(len(panel.groups), 3) for panel in panels]
        shape: dict[str, Any] = {"columns": len(panels), "between": 0.6, "width_ratios": widths}
        _, axes = sheet(half.text, **shape, width=width, height=AXES_HEIGHT, half=part, **BARS_SPACE)
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


# -- a value over a swept variable: one line per system, with its name at the end of the line -------------------------

COLUMNS = 3
"""Panels in a row."""
PANEL_WIDTH = 5.6
LINE_SPACE = {"left": 0.85, "right": 0.95, "below": 0.55, "above": 0.42}
"""Inches around a panel; to the right are the names of the lines."""
LINE_WIDTH = 1.8
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
    width: float = LINE_WIDTH


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
    figure, axes = sheet(text, -(-len(panels) // columns), columns, width=width, height=height, **LINE_SPACE)
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
        size = 3.5 + series.width - LINE_WIDTH
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


# -- many groups of bars, one below the other, in two columns: fractions of something, from 0 to 1 --------------------

ROWS_WIDTH, GROUP_HEIGHT = 11.5, 0.52
ROWS_SPACE = {"left": 2.35, "right": 0.2, "below": 0.6, "above": 0.1, "between": 2.5}
"""Inches; to the left are the names of the groups."""


def rows_of_bars(
    groups: Sequence[tuple[str, Sequence[Bar]]], systems: Sequence[str], text: FigureText, x_label: str
) -> Figure:
    """A bar for each system in each group, with its words at its end."""
    half = math.ceil(len(groups) / 2)
    figure, axes = sheet(text, 1, 2, width=ROWS_WIDTH, height=half * GROUP_HEIGHT, sharex=True, **ROWS_SPACE)
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


# -- ratios as coloured cells: a panel for each plane of two variables, one scale for all -----------------------------

MAP_COLUMNS = 4
CELL_WIDTH, CELL_HEIGHT = 0.48, 0.31
MAP_SPACE = {"left": 0.95, "right": 0.2, "below": 0.45, "above": 0.55, "footer": 0.7}
TITLE_WIDTH, LEAST_WIDTH = 2.6, 9.0
"""Inches: of a cell, around a panel, of the titles of a panel and of a figure."""
MAP_COLOURS = plt.get_cmap("RdBu")
NO_VALUE = (0.93, 0.93, 0.93, 1.0)
DARK = 0.5
"""Lightness of a cell below which its number is white."""
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)


@dataclass(frozen=True)
class Cell:
    """``ratio`` gives the colour: red below 1, blue above; None is grey."""

    ratio: float | None
    text: str
    bold: bool = False
    framed: bool = False


@dataclass(frozen=True)
class Plane:
    """``cells`` by their column from the left and row from the bottom; labels are those of columns and rows."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Mapping[tuple[int, int], Cell]


def heat_map(planes: Sequence[Plane], text: FigureText, span: float, meaning: str, words: str = "") -> Figure:
    """The planes beside each other, and below them the scale.

    Args:
        span: the colours reach from 1/span to span.
        meaning: what the ratios are.
        words: what else cells are marked with.
    """
    columns = min(MAP_COLUMNS, len(planes))
    across = max(TITLE_WIDTH, *(len(plane.columns) * CELL_WIDTH for plane in planes))
    width = max(columns * (MAP_SPACE["left"] + across + MAP_SPACE["right"]), LEAST_WIDTH)
    up = max(len(plane.rows) for plane in planes) * CELL_HEIGHT
    figure, axes = sheet(text, -(-len(planes) // columns), columns, width=width, height=up, **MAP_SPACE)
    scale, height = ScalarMappable(LogNorm(1 / span, span), MAP_COLOURS), figure.get_size_inches()[1]
    for ax in axes.flat[len(planes) :]:
        ax.set_visible(False)
    for ax, plane in zip(axes.flat, planes, strict=False):
        box, wide, high = ax.get_position(), len(plane.columns) * CELL_WIDTH, len(plane.rows) * CELL_HEIGHT
        ax.set_position((box.x0, box.y1 - high / height, wide / width, high / height))
        draw_plane(ax, plane, scale)
    bottom = axes[-1, 0].get_subplotspec().get_position(figure).y0
    place = (MAP_SPACE["left"] / width, bottom - 0.7 / height, 4.2 / width, 0.14 / height)
    bar = figure.colorbar(scale, cax=figure.add_axes(place), orientation="horizontal")
    ticks = [tick for tick in TICKS if 1 / span <= tick <= span]
    bar.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    bar.outline.set_visible(False)
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(length=2, labelsize=7, colors=FAINT)
    bar.ax.set_xlabel(meaning, fontsize=7.5, color=FAINT)
    bar.ax.annotate(words, (1.06, 0.5), xycoords="axes fraction", va="center", fontsize=8.5, linespacing=1.5)
    return figure


def draw_plane(ax: Axes, plane: Plane, scale: ScalarMappable) -> None:
    for (x, y), cell in plane.cells.items():
        shade = scale.to_rgba(cell.ratio) if cell.ratio else NO_VALUE
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white", linewidth=0.8))
        red, green, blue, _ = shade
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < DARK else INK
        looks = {"fontsize": 7.5, "color": ink, "fontweight": "bold" if cell.bold else "normal"}
        ax.text(x + 0.5, y + 0.46, cell.text, ha="center", va="center", **looks)
        if cell.framed:
            frame = Rectangle((x + 0.04, y + 0.05), 0.92, 0.9, fill=False, edgecolor=INK, linewidth=1.6, zorder=2)
            ax.add_patch(frame)
    ax.set_xlim(0, len(plane.columns))
    ax.set_ylim(0, len(plane.rows))
    ax.set_xticks([x + 0.5 for x in range(len(plane.columns))], plane.columns)
    ax.set_yticks([y + 0.5 for y in range(len(plane.rows))], plane.rows)
    ax.tick_params(length=0, labelsize=7.5, colors=FAINT)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(plane.x_label, fontsize=7.5, color=FAINT, labelpad=2)
    ax.set_ylabel(plane.y_label, fontsize=7.5, color=FAINT, labelpad=2)
    ax.set_title(plane.subtitle, loc="left", fontsize=7.5, color=FAINT, pad=4)
    title = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 9, "fontweight": "bold"}
    ax.annotate(plane.title, (0, 1), (0, 15), **title)


# -- figures that a study declares -------------------------------------------------------------------------------------


def draw(figure: DeclaredFigure, run: Run) -> Drawing:
    """The panels of a figure, those of each vertical axis in a row.

    Raises:
        ValueError: there is nothing to draw.
    """
    text = figure_text(figure.title, run.summary, run.machine, first_note=figure.notes)
    drawn = [row for row in run.summary if figure.is_drawn(row)]
    panels = [(rows, y) for y in figure.y for rows in grouped(drawn, *figure.panel).values()]
    if figure.kind == "bars":
        return throughput_figure(
            [Half([bar_panel(figure, *panel) for panel in panels], distinct(drawn, "system"), text)]
        )
    lines = [line_panel(figure, *panel) for panel in panels]
    return line_figure(lines, text, columns=len(panels) // len(figure.y))


def title_of(figure: DeclaredFigure, row: FlatRecord) -> str:
    return figure.title_of(row) if figure.title_of else ", ".join(str(row[name]) for name in figure.panel)


def line_panel(figure: DeclaredFigure, rows: Sequence[FlatRecord], y: Axis) -> LinePanel:
    lines = []
    for here in grouped(rows, *figure.series).values():
        first, points = here[0], [(row[figure.x], row[y.field]) for row in here if row[y.field] is not None]
        label = figure.label_of(first) if figure.label_of else ", ".join(str(first[name]) for name in figure.series)
        lines.append(Series(label, system_colour(first["system"]), points, **figure.look_of(first)))
    return LinePanel(title_of(figure, rows[0]), figure.x_label, y.label, lines, log_x=figure.log_x, log_y=y.log)


def bar_panel(figure: DeclaredFigure, rows: Sequence[FlatRecord], y: Axis) -> BarPanel:
    """Each group has a place for each series, which is empty where there is no result."""

    def bar(row: FlatRecord) -> Bar | None:
        value = row.get(y.field)
        return None if value is None else Bar(value, system_colour(row["system"]), **figure.look_of(row))

    series, groups = grouped(rows, *figure.series), []
    for x, here in grouped(rows, figure.x).items():
        there = {key: of_one[0] for key, of_one in grouped(here, *figure.series).items()}
        groups.append((str(x), [bar(there.get(key, {})) for key in series]))
    return BarPanel(title_of(figure, rows[0]), figure.x_label, groups, y.label)
