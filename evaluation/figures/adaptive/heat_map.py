"""The map of CPU bandwidth by output length: a cell for each pair, coloured and marked with its ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, NullLocator

from evaluation.experiments.axes import OWN_KERNELS
from evaluation.figures.adaptive.tables import subject_rows
from evaluation.figures.style import FAINT, INK, FigureText, figure_style, panel_title, set_words, words_inches
from evaluation.figures.words import span_text
from evaluation.results.folder import FlatRecord

Records = Sequence[FlatRecord]

COLOURS = plt.get_cmap("RdBu")
DARK = 0.55
"""Lightness of a cell below which its number is white."""
LEAST_SPAN = 1.1
"""The colours span at least the ratios from 1/LEAST_SPAN to LEAST_SPAN."""
WIDTH, CELL_HEIGHT = 11.5, 0.36
LEFT, RIGHT, BETWEEN, BELOW, ABOVE = 0.75, 0.95, 0.35, 0.6, 0.4
"""Inches around the panels: names of rows, the colour bar, names of columns, the panels' titles."""


def draw_map(summary: Records) -> plt.Figure:
    """A panel for each kernel.

    Raises:
        ValueError: there is nothing to draw.
    """
    rows = subject_rows(summary)
    if not rows:
        raise ValueError("nothing to draw: no cell is finished")
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    lengths = sorted({row["output_len"] for row in rows})
    bandwidths = sorted({row["host_read_gb_s"] for row in rows})
    span = max(LEAST_SPAN, *(max(ratio, 1 / ratio) for ratio in (row["ratio_to_best_published"] for row in rows)))
    text = map_text(summary, rows)
    height = words_inches(text, WIDTH) + len(lengths) * CELL_HEIGHT + BELOW + ABOVE
    with figure_style():
        figure = plt.figure(figsize=(WIDTH, height))
        bottom, top = set_words(figure, text, WIDTH, height)
        axes = figure.subplots(1, len(kernels), squeeze=False, sharey=True)[0]
        panel_width = (WIDTH - LEFT - RIGHT - (len(kernels) - 1) * BETWEEN) / len(kernels)
        figure.subplots_adjust(
            left=LEFT / WIDTH,
            right=1 - RIGHT / WIDTH,
            bottom=bottom + BELOW / height,
            top=top - ABOVE / height,
            wspace=BETWEEN / panel_width,
        )
        norm = LogNorm(1 / span, span)
        for ax, kernel in zip(axes, kernels, strict=True):
            here = {
                (row["host_read_gb_s"], row["output_len"]): row["ratio_to_best_published"]
                for row in rows
                if row["kernel"] == kernel
            }
            draw_cells(ax, here, bandwidths, lengths, norm)
            own = kernel == OWN_KERNELS
            panel_title(ax, "Each system with its own CPU kernel" if own else f"All systems with the kernel {kernel}")
        axes[0].set_ylabel("mean output (tokens)")
        draw_scale(figure, axes[-1], norm, height)
    return figure


def draw_cells(
    ax: Axes,
    ratios: dict[tuple[float, float], float],
    bandwidths: Sequence[float],
    lengths: Sequence[float],
    norm: LogNorm,
) -> None:
    """Ratios by (bandwidth, output length); bold where below 1."""
    grid = [[ratios.get((bandwidth, length), math.nan) for bandwidth in bandwidths] for length in lengths]
    ax.pcolormesh(grid, cmap=COLOURS, norm=norm, edgecolors="white", linewidth=1.2)
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if math.isnan(value):
                continue
            red, green, blue, _ = COLOURS(norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < DARK
            weight = "bold" if round(value, 2) < 1 else "normal"
            place = {"ha": "center", "va": "center", "fontsize": 9}
            ax.text(x + 0.5, y + 0.5, f"{value:.2f}", color="white" if dark else INK, fontweight=weight, **place)
    ax.set_xticks([x + 0.5 for x in range(len(bandwidths))], [f"{value:g}" for value in bandwidths])
    ax.set_yticks([y + 0.5 for y in range(len(lengths))], [f"{value:g}" for value in lengths])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("GB/s that the CPU's cores read from memory", color=FAINT, labelpad=5)


def draw_scale(figure: plt.Figure, last: Axes, norm: LogNorm, height: float) -> None:
    """The colours and their ratios, to the right of the last panel."""
    box = last.get_position()
    ax = figure.add_axes((1 - (RIGHT - 0.15) / WIDTH, box.y0, 0.16 / WIDTH, box.height))
    scale = figure.colorbar(plt.cm.ScalarMappable(norm, COLOURS), cax=ax)
    scale.outline.set_visible(False)
    steps = [value for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0) if norm.vmin <= value <= norm.vmax]
    scale.set_ticks(steps)
    scale.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}\u00d7"))
    scale.ax.yaxis.set_minor_locator(NullLocator())
    scale.ax.tick_params(length=2)


def map_text(summary: Records, rows: Records) -> FigureText:
    first = rows[0]
    published = " and ".join(dict.fromkeys(row["system"] for row in summary if row["system"] != first["system"]))
    counts = span_text(sorted(set(row["num_requests"] for row in rows)))
    return FigureText(
        f"{first['system']} over the best of {published.replace(' and ', ', ')} \u2014 SIMULATED",
        "Output tokens/s, all requests at once; above 1 (blue) "
        f"{first['system']} is faster, below 1 (red, bold) another system is\n"
        f"{first['setting_title']} in {first['host']}; prompts of about {round(first['input_len'], -1):.0f} tokens",
        f"Predicted times, nothing measured. {counts} requests a cell, lengths uniform within "
        f"10% of the mean, seed {first['seed']}. {first['num_gpu_blocks']} GPU blocks of 16 tokens, "
        f"{first['cpu_kv_gb']:g} GB of host memory for KV cache.\n"
        "Own kernels: neo computes CPU attention with ISPC, apex and adaptive with llamafile. A kernel reaches less "
        "than the cores read, the more arithmetic it does.",
    )
