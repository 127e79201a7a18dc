"""Ratios as coloured cells: a panel for each plane of two variables, one scale for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from evaluation.plots.style import FAINT, INK, FigureText, sheet

COLUMNS = 4
CELL_WIDTH, CELL_HEIGHT = 0.48, 0.31
SPACE = {"left": 0.95, "right": 0.2, "below": 0.45, "above": 0.55, "footer": 0.7}
TITLE_WIDTH, LEAST_WIDTH = 2.6, 9.0
"""Inches: of a cell, around a panel, of the titles of a panel and of a figure."""
COLOURS = plt.get_cmap("RdBu")
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
    columns = min(COLUMNS, len(planes))
    across = max(TITLE_WIDTH, *(len(plane.columns) * CELL_WIDTH for plane in planes))
    width = max(columns * (SPACE["left"] + across + SPACE["right"]), LEAST_WIDTH)
    up = max(len(plane.rows) for plane in planes) * CELL_HEIGHT
    figure, axes = sheet(text, -(-len(planes) // columns), columns, width=width, height=up, **SPACE)
    scale, height = ScalarMappable(LogNorm(1 / span, span), COLOURS), figure.get_size_inches()[1]
    for ax in axes.flat[len(planes) :]:
        ax.set_visible(False)
    for ax, plane in zip(axes.flat, planes, strict=False):
        box, wide, high = ax.get_position(), len(plane.columns) * CELL_WIDTH, len(plane.rows) * CELL_HEIGHT
        ax.set_position((box.x0, box.y1 - high / height, wide / width, high / height))
        draw_plane(ax, plane, scale)
    bottom = axes[-1, 0].get_subplotspec().get_position(figure).y0
    place = (SPACE["left"] / width, bottom - 0.7 / height, 4.2 / width, 0.14 / height)
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
