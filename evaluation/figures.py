"""Figures, readable without the paper they reproduce, drawn from summary records alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from evaluation.results import FlatRecord

# Okabe and Ito's colours: distinct for every common kind of colour vision, and in grey by their lightness.
COLOURS = {
    "vllm": "#CC79A7",
    "swiftllm": "#8C8C8C",
    "fastdecode": "#009E73",
    "neo": "#E69F00",
    "apex": "#0072B2",
    "apex-adaptive": "#D55E00",
}
FALLBACK_COLOUR = "#56B4E9"
INK = "#222222"
FAINT = "#666666"


@dataclass(frozen=True)
class Group:
    """Bars side by side: one per system at one point. ``label`` stands under them."""

    label: str
    records: tuple[FlatRecord, ...]


@dataclass(frozen=True)
class FigureText:
    """Words of a figure: what it shows, what it was made with, and the small print."""

    title: str
    subtitle: str
    notes: str


def figure5(
    panel_a: Sequence[Group], panel_b: Sequence[Group], systems: Sequence[str], baseline: str, text:
    FigureText, panel_a_title: str,
) -> plt.Figure:  # fmt: skip
    """Output throughput: one workload with varied average output length (a), and the other workloads (b)."""
    panels = [
        (panel_a, f"(a) {panel_a_title}, varied output length", "average output tokens per request"),
        (panel_b, "(b) other workloads", "workload, average input / output tokens"),
    ]
    panels = [panel for panel in panels if panel[0]]
    if not panels:
        raise ValueError("nothing to draw: no point is finished")
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.edgecolor": FAINT,
        "text.color": INK,
        "pdf.fonttype": 42,
    }
    with plt.rc_context(style):
        widths = [max(len(groups), 2) for groups, _, _ in panels]
        figure, axes = plt.subplots(
            1,
            len(panels),
            figsize=(10.5, 4.9),
            squeeze=False,
            gridspec_kw={"width_ratios": widths, "wspace": 0.16},
        )
        for ax, (groups, title, x_label) in zip(axes[0], panels, strict=True):
            grouped_bars(ax, groups, systems, baseline)
            ax.set_title(title, loc="left", fontsize=10, fontweight="bold", pad=8)
            ax.set_xlabel(x_label, color=FAINT, labelpad=6)
        axes[0][0].set_ylabel("output tokens per second")
        handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS.get(name, FALLBACK_COLOUR)) for name in systems]
        figure.legend(
            handles,
            systems,
            loc="upper right",
            bbox_to_anchor=(0.985, 0.985),
            ncols=len(systems),
            frameon=False,
        )
        figure.text(0.015, 0.965, text.title, fontsize=12.5, fontweight="bold", va="top")
        figure.text(0.015, 0.912, text.subtitle, fontsize=9, color=FAINT, va="top", linespacing=1.4)
        figure.text(0.015, 0.015, text.notes, fontsize=7.5, color=FAINT, va="bottom", linespacing=1.4)
        note_lines = text.notes.count("\n") + 1
        figure.subplots_adjust(left=0.065, right=0.985, top=0.765, bottom=0.19 + 0.03 * note_lines)
    return figure


def grouped_bars(ax: Axes, groups: Sequence[Group], systems: Sequence[str], baseline: str) -> None:
    """One bar per system in each group; above it its ratio to the baseline (above the baseline its value)."""
    bar_width = 0.84 / len(systems)
    highest = max((r["output_tokens_per_s"] or 0.0 for group in groups for r in group.records), default=0.0)
    for index, group in enumerate(groups):
        by_system = {record["system"]: record["output_tokens_per_s"] for record in group.records}
        reference = by_system.get(baseline)
        for place, system in enumerate(systems):
            value = by_system.get(system)
            if not value:
                continue
            x = index + (place - (len(systems) - 1) / 2) * bar_width
            ax.bar(x, value, bar_width * 0.92, color=COLOURS.get(system, FALLBACK_COLOUR))
            is_ratio = system != baseline and reference
            ax.annotate(
                f"{value / reference:.2f}\u00d7" if is_ratio else f"{value:.0f}",
                (x, value),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
                color=INK if is_ratio else FAINT,
                fontweight="bold" if is_ratio else "normal",
            )
    ax.set_xticks(range(len(groups)), [group.label for group in groups], linespacing=1.4)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_ylim(0, highest * 1.13 or 1.0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y", color="#E2E2E2", linewidth=0.7)
    ax.set_axisbelow(True)


def save(figure: plt.Figure, folder: Path) -> list[Path]:
    """Write figure.png and figure.pdf."""
    paths = [folder / "figure.png", folder / "figure.pdf"]
    for path in paths:
        figure.savefig(path, dpi=180)
    plt.close(figure)
    return paths
