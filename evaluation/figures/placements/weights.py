"""Draws throughput with weights in 16 and 4 bits, with and without the CPU tier of KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.figures.style import (
    FAINT,
    FigureText,
    figure_style,
    panel_title,
    set_words,
    system_colour,
    tidy_axes,
)
from evaluation.results.folder import FlatRecord

PANEL_WIDTH, PANEL_HEIGHT, TEXT_HEIGHT = 2.9, 2.6, 1.5
BAR = 0.8
"""Of a group's width, for all of its bars."""
IDLE_CPU = "#C9C9C9"
TEXT = FigureText(
    "What 4-bit weights and the CPU tier of KV cache bring",
    "Output tokens per second, all requests at once. SIMULATED: predicted times, nothing measured. Axes differ.",
    "GPU-only has no KV cache in host memory. Weights that do not fit are streamed over PCIe, or computed by the CPU "
    "where the bar's name allows it and that is predicted to be faster. 4-bit products are as fast as assumed "
    "(configs/hardware/assumptions.yaml), on a T4 those of its optional library.",
)


def draw_weights(rows: Sequence[FlatRecord]) -> Figure:
    """A column of panels for each machine and model, a row for each pair of lengths."""
    machines = list(dict.fromkeys((row["gpu"], row["host"], row["model"]) for row in rows))
    lengths = list(dict.fromkeys(str(row["mean_lengths"]) for row in rows))
    runs = list(dict.fromkeys(str(row["run"]) for row in rows))
    width, height = max(7.0, PANEL_WIDTH * len(machines)), PANEL_HEIGHT * len(lengths) + TEXT_HEIGHT
    with figure_style():
        figure, grid = plt.subplots(len(lengths), len(machines), figsize=(width, height), squeeze=False)
        for axes, wanted in zip(grid, lengths, strict=True):
            for ax, machine in zip(axes, machines, strict=True):
                there = [
                    row
                    for row in rows
                    if (row["gpu"], row["host"], row["model"]) == machine and row["mean_lengths"] == wanted
                ]
                _draw_panel(ax, there, runs)
                gpu, host, model = machine
                panel_title(ax, f"{gpu}, {model}")
                ax.set_xlabel(f"weights; requests of {wanted}\n{host}", color=FAINT, fontsize=8)
            axes[0].set_ylabel("tokens/s")
        systems = {str(row["run"]): str(row["system"]) for row in rows}
        handles = [plt.Rectangle((0, 0), 1, 1, color=_colour(run, systems[run])) for run in runs]
        figure.legend(handles, runs, loc="upper right", ncols=len(runs), frameon=False)
        bottom, top = set_words(figure, TEXT, width, height)
        figure.tight_layout(rect=(0, bottom, 1, top))
    return figure


def _draw_panel(ax: Axes, rows: Sequence[FlatRecord], runs: Sequence[str]) -> None:
    weights = list(dict.fromkeys(str(row["weights"]) for row in rows))
    step = BAR / len(runs)
    for row in rows:
        tokens_per_s, run = row["output_tokens_per_s"], str(row["run"])
        if tokens_per_s is None:  # nothing was finished
            continue
        place = weights.index(str(row["weights"])) + (runs.index(run) - (len(runs) - 1) / 2) * step
        ax.bar(place, tokens_per_s, 0.94 * step, color=_colour(run, str(row["system"])))
        ax.annotate(
            f"{tokens_per_s:.0f}", (place, tokens_per_s), xytext=(0, 1.5), textcoords="offset points",
            ha="center", va="bottom", fontsize=6.5,
        )  # fmt: skip
    ax.set_xticks(range(len(weights)), weights)
    ax.set_xlim(-0.5, max(1.5, len(weights) - 0.5))
    ax.margins(y=0.12)
    tidy_axes(ax)


def _colour(run: str, system: str) -> str:
    """Two runs have one system: the one that uses more of the machine is darker."""
    return IDLE_CPU if run == "GPU-only" else system_colour(system)
