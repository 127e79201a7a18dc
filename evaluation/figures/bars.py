"""Throughput as bars: systems side by side, measured and simulated rows in separate halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase
from matplotlib.legend import Legend

from evaluation.figures.style import (
    FAINT,
    INK,
    POINTS_PER_INCH,
    FigureText,
    figure_legend,
    figure_style,
    panel_legend,
    panel_title,
    set_words,
    system_colour,
    tidy_axes,
    words_inches,
)
from evaluation.figures.words import PREDICTION
from evaluation.results.folder import PREDICTED, FlatRecord, span_of

METRIC = "output_tokens_per_s"
WIDTH_ALONE, WIDTH_OF_HALF, AXES_HEIGHT = 11.5, 8.2, 2.8
SYSTEMS_OF_WIDTH = 4
"""Systems whose bars have room for their numbers in these widths; more systems make a figure wider."""
AXIS_SPACE = 0.7
"""Inches below the axes for tick labels of two lines and the axis label."""
TITLE_SPACE = 0.42
MARKER_HALF, LABEL_HEIGHT = 5.0, 9.0
"""In points: half a marker of a prediction, and the numbers above bars."""
ROW_HEIGHT = AXES_HEIGHT + AXIS_SPACE + TITLE_SPACE


@dataclass(frozen=True)
class Group:
    """Bars side by side: one per system at one point. ``label`` is below them."""

    label: str
    records: tuple[FlatRecord, ...]


@dataclass(frozen=True)
class BarPanel:
    """A panel without groups keeps its place beside another half that has it, with its title alone."""

    title: str
    x_label: str
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Half:
    """Bars of one kind, all measured or all simulated; ``y_label`` says which."""

    panels: tuple[BarPanel, ...]
    systems: tuple[str, ...]
    baseline: str
    y_label: str
    text: FigureText


def throughput_figure(halves: Sequence[Half]) -> plt.Figure:
    """One half with its panels in a row, or two halves side by side with their panels in a column.

    Raises:
        ValueError: there is nothing to draw.
    """
    halves = [half for half in halves if any(panel.groups for panel in half.panels)]
    if not halves:
        raise ValueError("nothing to draw: no point is finished")
    with figure_style():
        if len(halves) == 1:
            width = wide_enough(WIDTH_ALONE, halves)
            height = words_inches(halves[0].text, width) + ROW_HEIGHT
            figure = plt.figure(figsize=(width, height))
            draw_half(figure, halves[0], width, height, in_column=False)
            return figure
        rows = max(len(half.panels) for half in halves)
        width = wide_enough(WIDTH_OF_HALF, halves)
        height = max(words_inches(half.text, width) for half in halves) + rows * ROW_HEIGHT
        figure = plt.figure(figsize=(width * len(halves), height))
        backgrounds = ("#F4F7FA", "#FFFFFF")
        for index, (part, half) in enumerate(zip(figure.subfigures(1, len(halves)), halves, strict=True)):
            part.set_facecolor(backgrounds[index % 2])
            draw_half(part, half, width, height, in_column=True)
    return figure


def wide_enough(width: float, halves: Sequence[Half]) -> float:
    """Inches of a half, from those of one with few systems."""
    return width * max(1.0, max(len(half.systems) for half in halves) / SYSTEMS_OF_WIDTH)


def draw_half(figure: FigureBase, half: Half, width: float, height: float, *, in_column: bool) -> None:
    panels = [panel for panel in half.panels if panel.groups or in_column]
    bottom, top = set_words(figure, half.text, width, height)
    shape = (len(panels), 1) if in_column else (1, len(panels))
    widths = None if in_column else [max(len(panel.groups), 3) for panel in panels]
    axes = figure.subplots(*shape, squeeze=False, width_ratios=widths)
    if not in_column:
        figure_legend(figure, half.systems, width, height)
    for ax, panel in zip(axes.flat, panels, strict=True):
        if not panel.groups:
            ax.set_axis_off()
            ax.text(0.5, 0.5, panel.title, ha="center", va="center", color=FAINT, transform=ax.transAxes)
            continue
        grouped_bars(ax, panel.groups, half.systems, half.baseline)
        panel_title(ax, panel.title)
        if in_column:
            panel_legend(ax, half.systems)
        ax.set_xlabel(panel.x_label, color=FAINT, labelpad=6)
        if in_column or ax is axes.flat[0]:
            ax.set_ylabel(half.y_label)
    figure.subplots_adjust(
        left=0.72 / width,
        right=1 - 0.15 / width,
        bottom=bottom + AXIS_SPACE / height,
        top=top - TITLE_SPACE / height,
        hspace=0.42,
        wspace=0.16,
    )


def grouped_bars(ax: Axes, groups: Sequence[Group], systems: Sequence[str], baseline: str) -> None:
    """One bar per system in each group, marked with its ratio to the baseline (the baseline with its value).

    A hollow diamond is the throughput predicted for a measured bar.
    """
    bar_width = 0.84 / len(systems)
    predictions: list[tuple[float, float]] = []
    top = axis_top(groups)
    for index, group in enumerate(groups):
        by_system = {record["system"]: record for record in group.records}
        reference = by_system[baseline][METRIC] if baseline in by_system else None
        for place, system in enumerate(systems):
            record = by_system.get(system, {})
            value = record.get(METRIC)
            x = index + (place - (len(systems) - 1) / 2) * bar_width
            if not value:
                ax.text(x, 0.02 * top, "no result", rotation=90, ha="center", va="bottom", fontsize=7, color=FAINT)
                continue
            low, high = span_of(record, METRIC)
            ax.bar(x, value, bar_width * 0.92, color=system_colour(system))
            if high > low:
                ax.errorbar(x, value, [[value - low], [high - value]], color=INK, linewidth=0.9, capsize=2.5)
            if record.get(PREDICTED):
                predictions.append((x, record[PREDICTED]))
            is_ratio = system != baseline and reference
            ax.annotate(
                times(record.get("ratio") or value / reference) if is_ratio else f"{value:.0f}",
                (x, high),
                xytext=(0, label_distance(high, record.get(PREDICTED), top)),
                textcoords="offset points",
                ha="center",
                fontsize=6.8,
                color=INK if is_ratio else FAINT,
                fontweight="bold" if is_ratio else "normal",
            )
    ax.set_xticks(range(len(groups)), [group.label for group in groups], linespacing=1.4)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    if predictions:
        draw_predictions(ax, predictions)
    ax.set_ylim(0, top)
    ax.tick_params(axis="x", length=0)
    tidy_axes(ax)


def axis_top(groups: Sequence[Group]) -> float:
    """The end of the y axis: room for the numbers above the bars, and for the legend of predictions above these."""
    drawn = [record for group in groups for record in group.records if record[METRIC]]
    predicted = [record[PREDICTED] for record in drawn if record.get(PREDICTED)]
    highest = max([*(span_of(record, METRIC)[1] for record in drawn), *predicted], default=0.0)
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


def times(ratio: float) -> str:
    """A ratio as text with three significant digits."""
    return f"{ratio:.2f}\u00d7" if ratio < 10 else f"{ratio:.1f}\u00d7"
