"""Draws the claims map: a plane of machines for each claim."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from evaluation.figures.claims_map.cells import Cell, MappedClaim
from evaluation.figures.style import FAINT, INK, FigureText, figure_style, set_words, words_inches
from evaluation.results.claims import AGREES, Claim, where_of

COLUMNS = 4
CELL_WIDTH, CELL_HEIGHT = 0.42, 0.29
"""Inches."""
LEFT_SPACE, RIGHT_SPACE, TITLE_SPACE, AXIS_SPACE, BAR_SPACE = 0.95, 0.2, 0.55, 0.42, 0.62
TITLE_WIDTH = 2.6
"""Inches that the titles of a panel take at most."""
STAR = "\u2605"
COLOURS = plt.get_cmap("PuOr_r")
SHADES = Normalize(-1.0, 1.0)
"""Of log2 of our ratio over the claimed one: half of it to twice it."""
TICKS = (0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0)


def draw_map(items: Sequence[MappedClaim], text: FigureText) -> plt.Figure:
    """A panel for each claim: speed of CPU attention by GPU blocks, coloured by our ratio over the claimed one.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not items:
        raise ValueError("nothing to draw: no point of a mapped claim is finished")
    columns = min(COLUMNS, len(items))
    rows = -(-len(items) // columns)
    across = max(TITLE_WIDTH, *(len(speeds_of(item)) * CELL_WIDTH for item in items))
    up = max(len(pools_of(item)) for item in items) * CELL_HEIGHT
    width = max(columns * (LEFT_SPACE + across + RIGHT_SPACE), 9.0)
    height = words_inches(text, width) + BAR_SPACE + rows * (TITLE_SPACE + up + AXIS_SPACE)
    with figure_style():
        figure = plt.figure(figsize=(width, height))
        bottom, top = set_words(figure, text, width, height)
        for number, item in enumerate(items):
            row, column = divmod(number, columns)
            left = column * (LEFT_SPACE + across + RIGHT_SPACE) + LEFT_SPACE
            above = row * (TITLE_SPACE + up + AXIS_SPACE) + TITLE_SPACE
            high = len(pools_of(item)) * CELL_HEIGHT
            wide = len(speeds_of(item)) * CELL_WIDTH
            ax = figure.add_axes((left / width, top - (above + high) / height, wide / width, high / height))
            draw_plane(ax, item)
        bar = figure.add_axes((LEFT_SPACE / width, bottom + 0.42 / height, 4.2 / width, 0.14 / height))
        draw_bar(bar)
    return figure


def speeds_of(item: MappedClaim) -> list[float]:
    return sorted({cell.machine.cpu_gb_s for cell in item.cells})


def pools_of(item: MappedClaim) -> list[int]:
    return sorted({cell.machine.gpu_blocks for cell in item.cells})


def draw_plane(ax: Axes, item: MappedClaim) -> None:
    """One claim. Framed cells hold, a star marks the machine that the figures assume."""
    speeds, pools = speeds_of(item), pools_of(item)
    framed = []
    for cell in item.cells:
        x, y = speeds.index(cell.machine.cpu_gb_s), pools.index(cell.machine.gpu_blocks)
        shade = shade_of(cell, item.claim)
        ax.add_patch(Rectangle((x, y), 1, 1, facecolor=shade, edgecolor="white", linewidth=0.8))
        if cell.holds:
            framed.append(Rectangle((x + 0.04, y + 0.05), 0.92, 0.9, fill=False, edgecolor=INK, linewidth=1.6))
        star = STAR if cell.machine == item.own else ""
        number = "-" if cell.ours is None else f"{cell.ours:.3g}" if cell.ours >= 10 else f"{cell.ours:.2f}"
        ink = "white" if brightness(shade) < 0.45 else INK
        ax.text(x + 0.5, y + 0.46, number + star, ha="center", va="center", fontsize=6.8, color=ink)
    for frame in framed:
        ax.add_patch(frame)
    ax.set_xlim(0, len(speeds))
    ax.set_ylim(0, len(pools))
    ax.set_xticks([x + 0.5 for x in range(len(speeds))], [f"{speed:.0f}" for speed in speeds])
    labels = [f"{blocks} ({blocks / item.own.gpu_blocks:.2g}x)" for blocks in pools]
    ax.set_yticks([y + 0.5 for y in range(len(pools))], labels)
    ax.tick_params(length=0, labelsize=7, colors=FAINT)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("CPU attention (GB/s)", fontsize=7, color=FAINT, labelpad=2)
    ax.set_ylabel("GPU blocks", fontsize=7, color=FAINT, labelpad=2)
    first, second = panel_titles(item.claim)
    ax.set_title(second, loc="left", fontsize=7.5, color=FAINT, pad=4)
    ax.annotate(
        first, (0, 1), (0, 15), xycoords="axes fraction", textcoords="offset points", fontsize=9, fontweight="bold"
    )


def panel_titles(claim: Claim) -> tuple[str, str]:
    """What is claimed, and of which machine and workload in which section."""
    up_to = "up to " if claim.up_to else ""
    return f"{' over '.join(claim.systems)}: {up_to}{claim.ratio:g}x", f"{where_of(claim)} ({claim.section})"


def shade_of(cell: Cell, claim: Claim) -> tuple[float, ...]:
    if not cell.ours:
        return (0.93, 0.93, 0.93, 1.0)
    return COLOURS(SHADES(math.log2(cell.ours / claim.ratio)))


def brightness(colour: Sequence[float]) -> float:
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def draw_bar(ax: Axes) -> None:
    """The colours, with the meaning of frame and star."""
    bar = ax.figure.colorbar(ScalarMappable(SHADES, COLOURS), cax=ax, orientation="horizontal")
    bar.set_ticks([math.log2(tick) for tick in TICKS], labels=[f"{tick:g}" for tick in TICKS])
    bar.outline.set_visible(False)
    ax.tick_params(length=2, labelsize=7, colors=FAINT)
    ax.set_xlabel("our ratio over the claimed one (darkest: half and less, twice and more)", fontsize=7.5, color=FAINT)
    words = f"framed: within {AGREES:.0%} of the claim\n{STAR}: the machine that our figures assume"
    ax.annotate(words, (1.06, 0.5), xycoords="axes fraction", va="center", fontsize=8.5, linespacing=1.5)
