"""The common style of all figures: colours, the text around the axes, files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import FigureBase

if TYPE_CHECKING:
    from rich.console import Console  # a machine that has little more than torch draws, too

# The hues of Okabe and Ito, distinct for every common kind of colour vision, and distinct in lightness for grey prints.
COLOURS = {
    "vllm": "#E3A5C9",
    "swiftllm": "#848484",
    "fastdecode": "#009A70",
    "neo": "#E69F00",
    "apex": "#0B5CAD",
    "adaptive": "#7A0019",
    "llumnix": "#A6D8F5",
    "sarathi": "#1A1A1A",
    "omniserve": "#D55E00",
    "omniserve-stepping": "#5A3A8C",
}
OTHER_COLOURS = ("#56B4E9", "#D55E00", "#C9B800", "#7A4FA3")
"""Colours of systems with other names, such as servers: each takes the next one when first drawn."""
_others: dict[str, str] = {}
INK = "#222222"
FAINT = "#666666"

TITLE_SIZE, SUBTITLE_SIZE, NOTE_SIZE = 12.5, 9.0, 7.5
LINE_FACTOR = 1.4
BOLD_FACTOR = 1.12
"""Width of bold letters over normal ones."""
POINTS_PER_INCH = 72


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


def figure_style() -> AbstractContextManager[None]:
    """Context in which a figure is drawn: fonts and text colours."""
    return plt.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "axes.edgecolor": FAINT,
            "text.color": INK,
            "pdf.fonttype": 42,
        }
    )


MARGIN = 0.13
"""Inches above and below the text."""


def words_inches(text: FigureText, width: float) -> float:
    """Inches of height that the text takes in a figure of this width (inches)."""
    parts = ((text.title, BOLD_FACTOR, TITLE_SIZE), (text.subtitle, 1.0, SUBTITLE_SIZE), (text.notes, 1.0, NOTE_SIZE))
    return 2 * MARGIN + sum(lines_height(wrapped(part, wide * size, width), size, 1.0) for part, wide, size in parts)


def set_words(figure: FigureBase, text: FigureText, width: float, height: float) -> tuple[float, float]:
    """Write title and subtitle at the top and the notes at the bottom of a figure of this size in inches.

    Long lines are wrapped to the width. Returns (bottom, top), fractions of the height between which axes and their
    titles fit.
    """
    margin = MARGIN / height
    title = wrapped(text.title, BOLD_FACTOR * TITLE_SIZE, width)
    title_height = lines_height(title, TITLE_SIZE, height)
    left = 0.15 / width
    subtitle, notes = wrapped(text.subtitle, SUBTITLE_SIZE, width), wrapped(text.notes, NOTE_SIZE, width)
    below_title = 1 - margin - title_height
    small = {"color": FAINT, "linespacing": LINE_FACTOR}
    figure.text(left, 1 - margin, title, fontsize=TITLE_SIZE, fontweight="bold", va="top")
    figure.text(left, below_title, subtitle, fontsize=SUBTITLE_SIZE, va="top", **small)
    figure.text(left, margin, notes, fontsize=NOTE_SIZE, va="bottom", **small)
    top = below_title - lines_height(subtitle, SUBTITLE_SIZE, height)
    return margin + lines_height(notes, NOTE_SIZE, height), top


def wrapped(text: str, size: float, width: float) -> str:
    """``text`` with lines wrapped to ``width`` inches at a font ``size`` in points."""
    characters = int((width - 0.3) * POINTS_PER_INCH / (0.53 * size))
    return "\n".join(textwrap.fill(line, characters) for line in text.splitlines())


def lines_height(text: str, size: float, height: float) -> float:
    """The fraction of the height that the lines of ``text`` take."""
    return (text.count("\n") + 1) * size * LINE_FACTOR / POINTS_PER_INCH / height if text else 0.0


def panel_legend(ax: Axes, systems: Sequence[str]) -> None:
    """The systems' colours on the line of the panel's title, at its right end."""
    handles = [plt.Rectangle((0, 0), 1, 1, color=system_colour(system)) for system in systems]
    place = {"loc": "lower right", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.3}
    ax.legend(handles, systems, ncols=len(systems), frameon=False, columnspacing=1.2, handlelength=1.2, **place)


def figure_legend(figure: FigureBase, systems: tuple[str, ...], width: float, height: float) -> None:
    """The systems' colours in the upper right corner."""
    handles = [plt.Rectangle((0, 0), 1, 1, color=system_colour(system)) for system in systems]
    corner = (1 - 0.1 / width, 1 - 0.08 / height)
    figure.legend(handles, systems, loc="upper right", bbox_to_anchor=corner, ncols=len(systems), frameon=False)


def tidy_axes(ax: Axes) -> None:
    """No box around the axes, a faint grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color="#E2E2E2", linewidth=0.7)
    ax.set_axisbelow(True)


def panel_title(ax: Axes, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)


def save_figure(figure: plt.Figure, folder: Path, name: str = "figure") -> list[Path]:
    """Write <name>.png and <name>.pdf. The same figure gives the same bytes."""
    png, pdf = folder / f"{name}.png", folder / f"{name}.pdf"
    figure.savefig(png, dpi=180)
    figure.savefig(pdf, metadata={"CreationDate": None})
    plt.close(figure)
    return [png, pdf]


def show_figure(figure: plt.Figure, folder: Path, console: Console) -> None:
    """Write a figure into a run's folder, and say where it is.

    Raises:
        ValueError: the folder cannot be written to.
    """
    try:
        png, _ = save_figure(figure, folder)
    except OSError as error:
        raise ValueError(f"cannot write the figure: {error}; copy the folder to a writable place") from None
    console.print(f"figure: {png}", highlight=False, soft_wrap=True)
