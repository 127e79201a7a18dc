"""Measured against SIMULATED throughput of one machine, with a band of the error that is aimed at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt

from evaluation.plots.style import FAINT, FigureText, legend, sheet, system_colour, tidy_axes
from evaluation.results.folder import FlatRecord

MARKERS = "osD^vP"
WIDTH, HEIGHT = 6.6, 4.6
"""Inches, of the figure and of its axes."""


def draw_validation(summary: Sequence[FlatRecord], machine: Mapping[str, Any], aim: float) -> plt.Figure:
    """A point for each pair of runs in ``summary``: colours are systems, shapes are workloads."""
    records = [record for record in summary if record["simulated_error"] is not None]
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    systems = tuple(dict.fromkeys(record["system"] for record in records))
    first = records[0]
    device = first["gpu"] or f"{machine['cpu']}, {machine['usable_cores']} cores, no GPU"
    text = FigureText(
        "The simulator against this machine",
        f"{first['model']} ({first['dtype']}) on {device}\n{first['num_requests']} requests at once; a point is a pair "
        "of runs",
        "Vertical: SIMULATED from profiles measured right before and after the run. "
        f"Band: within {aim:.0%} of the measured rate.",
    )
    rates = [record[name] for record in records for name in ("output_tokens_per_s", "simulated_output_tokens_per_s")]
    ends = (0.0, 1.1 * max(rates))
    figure, axes = sheet(text, width=WIDTH, height=HEIGHT, below=0.5, above=0.2)
    ax = axes[0, 0]
    ax.fill_between(ends, [(1 - aim) * x for x in ends], [(1 + aim) * x for x in ends], color="#E8E8E8", zorder=0)
    ax.plot(ends, ends, color=FAINT, linewidth=0.8, zorder=1)
    for record in records:
        marker = MARKERS[workloads.index(record["workload"]) % len(MARKERS)]
        pair = record["output_tokens_per_s"], record["simulated_output_tokens_per_s"]
        ax.plot(*pair, marker, color=system_colour(record["system"]), markersize=6, alpha=0.85, markeredgewidth=0)
    for place, workload in enumerate(workloads):
        ax.plot([], [], MARKERS[place % len(MARKERS)], color=FAINT, label=workload, linestyle="none")
    ax.legend(loc="upper left", frameon=False)
    legend(figure, systems)
    ax.set(xlim=ends, ylim=ends, xlabel="measured output tokens/s", ylabel="SIMULATED output tokens/s")
    tidy_axes(ax, grid="both")
    return figure
