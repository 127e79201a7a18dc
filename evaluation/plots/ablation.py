"""Draws the ablation: throughput of each row relative to APEX's, a panel for each machine."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.plots.style import FAINT, INK, FigureText, panel_title, sheet, system_colour, tidy_axes, times
from evaluation.results.folder import FlatRecord
from evaluation.results.rows import grouped, is_simulated
from evaluation.studies.ablation import OURS, RATE, ROWS, SYSTEMS, AblationRow, machine_of

SUBJECT = "apex"
PANEL_WIDTH, BAR_HEIGHT = 7.4, 0.23  # inches
LABELS_WIDTH = 3.5
"""Inches of the rows' words, left of the bars."""


def draw_ablation(rows: Sequence[FlatRecord], text: FigureText) -> Figure:
    """A bar for each row, in groups; the line is at the rate of ``apex``, 1.

    Raises:
        ValueError: there is nothing to draw.
    """
    panels = [here for here in grouped(rows, "case").values() if any(row[RATE] for row in here)]
    if not panels:
        raise ValueError("nothing to draw: no row is finished")
    lines = max(len(lines_of(here)) for here in panels)
    sizes = {"left": LABELS_WIDTH, "right": 0.55, "below": 0.55, "above": 0.42}
    figure, axes = sheet(text, 1, len(panels), width=PANEL_WIDTH * len(panels), height=lines * BAR_HEIGHT, **sizes)
    for ax, here in zip(axes.flat, panels, strict=True):
        draw_panel(ax, here, lines)
    return figure


def lines_of(rows: Sequence[FlatRecord]) -> list[str | FlatRecord]:
    """The lines of a panel from the top: a group's name, then its rows."""
    groups = grouped(rows, lambda row: ROWS[row["row"]].group)
    return [line for group, here in groups.items() for line in (group, *here)]


def draw_panel(ax: Axes, rows: Sequence[FlatRecord], lines: int) -> None:
    rates = {row["row"]: row[RATE] for row in rows}
    unit = rates.get(SUBJECT) or max(rate for rate in rates.values() if rate)
    ticks, words = [], []
    for place, line in enumerate(lines_of(rows)):
        if isinstance(line, str):
            ax.text(-0.01, place, line, ha="right", va="center", fontweight="bold", transform=ax.get_yaxis_transform())
            continue
        row = ROWS[line["row"]]
        ticks.append(place)
        words.append(label_of(row))
        if not line[RATE]:
            ax.text(0.0, place, " no result", va="center", fontsize=7.5, color=FAINT)
            continue
        ratio = line[RATE] / unit
        ax.barh(place, ratio, 0.74, color=system_colour(row.system), alpha=1.0 if row.unchanged is None else 0.62)
        number = f"{line[RATE]:.0f}" if line["row"] == SUBJECT else times(ratio)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # the line at 1 would cross the number
        beside = {"xytext": (3.5, 0), "textcoords": "offset points", "va": "center"}
        ax.annotate(number, (ratio, place), **beside, fontsize=7.5, color=INK, bbox=behind)
    ax.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    ax.set_yticks(ticks, words, fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(lines - 0.4, -0.6)
    ax.set_xlim(0, 1.12 * max(rate / unit for rate in rates.values() if rate))
    tidy_axes(ax, grid="x")
    first = rows[0]
    panel_title(ax, machine_of(first))
    how = "SIMULATED" if is_simulated(first) else "measured"
    tokens = f"{SUBJECT}: {unit:.0f} tokens/s" if rates.get(SUBJECT) else f"1: {unit:.0f} tokens/s"
    ax.set_xlabel(f"output tokens/s relative to {SUBJECT}, {how} ({tokens})", color=FAINT, labelpad=5)


def label_of(row: AblationRow) -> str:
    """A row in words; a whole system by its name, too."""
    return f"{row.name}: {row.words}" if row.group in (SYSTEMS, OURS) and row.unchanged is None else row.words
