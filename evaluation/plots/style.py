"""The common style of all figures: colours, the layout of text and axes, files."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase

from apex.replay.figure import COLOURS

if TYPE_CHECKING:
    from rich.console import Console  # a machine that has little more than torch draws, too

OTHER_COLOURS = ("#56B4E9", "#D55E00", "#C9B800", "#7A4FA3")
"""Colours of systems with other names, such as servers: each takes the next one when first drawn."""
_others: dict[str, str] = {}
INK, FAINT, GRID = "#222222", "#666666", "#E2E2E2"
plt.rcParams |= {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "pdf.fonttype": 42,
}

TITLE_SIZE, SUBTITLE_SIZE, NOTE_SIZE = 12.5, 9.0, 7.5
LINE_FACTOR = 1.4
BOLD_FACTOR = 1.12
"""Width of bold letters over normal ones."""
POINTS_PER_INCH = 72
MARGIN = 0.13
"""Inches above and below the text."""


@dataclass(frozen=True)
class FigureText:
    """Text of a figure or of a half: what it shows, how it was made, and small print."""

    title: str
    subtitle: str
    notes: str


def system_colour(system: str) -> str:
    if system in COLOURS:
        return COLOURS[system]
    return _others.setdefault(system, OTHER_COLOURS[len(_others) % len(OTHER_COLOURS)])


def sheet(
    text: FigureText,
    rows: int = 1,
    columns: int = 1,
    *,
    width: float,
    height: float,
    left: float = 0.75,
    right: float = 0.15,
    below: float = 0.6,
    above: float = 0.42,
    between: float | None = None,
    footer: float = 0.0,
    half: FigureBase | None = None,
    **shared: Any,
) -> tuple[Figure, np.ndarray]:
    """A figure with its text and ``rows`` x ``columns`` axes. All sizes are in inches.

    Title and subtitle stand at the top, the notes at the bottom; long lines are wrapped to the width.

    Args:
        width: of the figure.
        height: of each of the axes. That of the figure follows from it.
        left, right, below, above: space around the axes, for tick labels and titles.
        between: space between axes of a row; by default ``left`` and ``right``.
        footer: space between the axes and the notes, for a scale.
        half: part of another figure to draw into. It has the height that this one asks for, or more.
        shared: further arguments of ``subplots``.
    """
    total = inches_of(text, width, rows * (height + below + above) + footer)
    figure = plt.figure(figsize=(width, total)) if half is None else half
    if half is not None:
        total = half.bbox.height / half.get_figure(root=True).dpi
        height = (total - inches_of(text, width, 0.0)) / rows - below - above
    bottom, top = set_words(figure, text, width, total)
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    between = left + right if between is None else between
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom + (below + footer) / total,
        top=top - above / total,
        wspace=between * columns / (width - left - right - (columns - 1) * between),
        hspace=(below + above) / height,
    )
    return figure, axes


def inches_of(text: FigureText, width: float, height: float) -> float:
    """Inches of height of a figure of this width, whose axes take ``height``."""
    parts = ((text.title, BOLD_FACTOR, TITLE_SIZE), (text.subtitle, 1.0, SUBTITLE_SIZE), (text.notes, 1.0, NOTE_SIZE))
    lines = sum(lines_inches(wrapped(part, wide * size, width), size) for part, wide, size in parts)
    return 2 * MARGIN + lines + height


def set_words(figure: FigureBase, text: FigureText, width: float, height: float) -> tuple[float, float]:
    """Write the text of a figure of this size. Returns (bottom, top), fractions between which axes have room."""
    title = wrapped(text.title, BOLD_FACTOR * TITLE_SIZE, width)
    subtitle, notes = wrapped(text.subtitle, SUBTITLE_SIZE, width), wrapped(text.notes, NOTE_SIZE, width)
    left, margin = 0.15 / width, MARGIN / height
    below_title = 1 - margin - lines_inches(title, TITLE_SIZE) / height
    small = {"color": FAINT, "linespacing": LINE_FACTOR}
    figure.text(left, 1 - margin, title, fontsize=TITLE_SIZE, fontweight="bold", va="top")
    figure.text(left, below_title, subtitle, fontsize=SUBTITLE_SIZE, va="top", **small)
    figure.text(left, margin, notes, fontsize=NOTE_SIZE, va="bottom", **small)
    top = below_title - lines_inches(subtitle, SUBTITLE_SIZE) / height
    return margin + lines_inches(notes, NOTE_SIZE) / height, top


def wrapped(text: str, size: float, width: float) -> str:
    """``text`` with lines wrapped to ``width`` inches at a font ``size`` in points."""
    characters = int((width - 0.3) * POINTS_PER_INCH / (0.53 * size))
    return "\n".join(textwrap.fill(line, characters) for line in text.splitlines())


def lines_inches(text: str, size: float) -> float:
    """The height of the lines of ``text``."""
    return (text.count("\n") + 1) * size * LINE_FACTOR / POINTS_PER_INCH if text else 0.0


def legend(
    place: Axes | FigureBase,
    names: Iterable[str],
    colours: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> None:
    """Names with their colours, by default systems: above the axes, or in the upper right corner of a figure.

    ``size`` is that of a part of a figure, in inches.
    """
    names = tuple(names)
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in colours or map(system_colour, names)]
    if isinstance(place, Axes):
        at = {"loc": "lower right", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.3}
        at |= {"columnspacing": 1.2, "handlelength": 1.2}
    else:
        width, height = size or place.get_size_inches()
        at = {"loc": "upper right", "bbox_to_anchor": (1 - 0.1 / width, 1 - 0.08 / height)}
    place.legend(handles, names, ncols=len(names), frameon=False, **at)


def tidy_axes(ax: Axes, grid: str = "y") -> None:
    """No box around the axes, a faint grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=grid, color=GRID, linewidth=0.7)
    ax.set_axisbelow(True)


def panel_title(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)


def times(ratio: float) -> str:
    """A ratio as text with three significant digits."""
    return f"{ratio:.2f}\u00d7" if ratio < 10 else f"{ratio:.1f}\u00d7"


def save_figure(figure: Figure, folder: Path, name: str = "figure") -> list[Path]:
    """Write <name>.png and <name>.pdf. The same figure gives the same bytes."""
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    figure.savefig(png, dpi=180)
    figure.savefig(pdf, metadata={"CreationDate": None})
    plt.close(figure)
    return [png, pdf]


def show_figure(figure: Figure, folder: Path, console: Console) -> None:
    """Write a figure into a run's folder, and say where it is.

    Raises:
        ValueError: the folder cannot be written to.
    """
    try:
        png, _ = save_figure(figure, folder)
    except OSError as error:
        raise ValueError(f"cannot write the figure: {error}; copy the folder to a writable place") from None
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)
