"""Draws the split search: a layer's latency over the operation up to which the CPU computes (their Fig. 14)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.experiments.placements.split import Operation, in_pieces, single_splits
from evaluation.figures.style import FigureText, figure_style, panel_title, set_words, system_colour, tidy_axes

WIDTH, HEIGHT = 9.0, 6.2
TEXT = FigureText(
    "Park and Egger's split search",
    "Latency of a layer of OPT-30B if the CPU computes all operations up to and including the one named. SIMULATED: "
    "computed from the times in the paper's Fig. 6a and 8a.",
    "The latency is the longest of CPU, host-to-device transfers and decompression (section 4.2). For a batch of 100, "
    "attention and KV cache of the batch of 50 count twice.",
)
LINES = {"CPU": "neo", "host to device": "apex", "decompression": "fastdecode"}


def draw_search(panels: Mapping[str, Sequence[Operation]], pieces: int) -> Figure:
    """A row of two panels for each list of operations: with Scores whole, and in ``pieces``."""
    with figure_style():
        figure, rows = plt.subplots(len(panels), 2, figsize=(WIDTH, HEIGHT), squeeze=False)
        for axes, (name, operations) in zip(rows, panels.items(), strict=True):
            _draw_panel(axes[0], name, operations)
            _draw_panel(axes[1], f"{name}, Scores in {pieces} pieces", in_pieces(operations, "Scores", pieces))
            top = 1.3 * max(ax.get_ylim()[1] for ax in axes)
            for ax in axes:
                ax.set_ylim(0, top)
        rows[-1][0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
        bottom, top = set_words(figure, TEXT, WIDTH, HEIGHT)
        figure.tight_layout(rect=(0, bottom, 1, top))
    return figure


def _draw_panel(ax: Axes, title: str, operations: Sequence[Operation]) -> None:
    splits = single_splits(operations)
    # The first label means that the GPU computes all; a label that follows means: up to and including that operation.
    labels = ["GPU-only", *(op.name for op in operations[:-1])]
    gpu_only_s = splits[0].latency_s
    within = [split for split in splits if split.latency_s <= 1.6 * gpu_only_s]
    times = {
        "CPU": [split.cpu_s for split in within],
        "host to device": [split.host_to_device_s for split in within],
        "decompression": [split.decompress_s for split in within],
    }
    for name, seconds in times.items():
        if any(seconds):
            ax.plot([1e3 * s for s in seconds], color=system_colour(LINES[name]), label=name, linewidth=1.3)
    ax.bar(range(len(within)), [1e3 * split.latency_s for split in within], color="#D8D8D8", label="latency")
    best = min(range(len(within)), key=lambda index: within[index].latency_s)
    saved = 1 - within[best].latency_s / gpu_only_s
    ax.annotate(f"-{saved:.0%}", (best, 1e3 * within[best].latency_s), ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(within)), labels[: len(within)], rotation=60, fontsize=7)
    ax.set_ylabel("ms a layer")
    panel_title(ax, title)
    tidy_axes(ax)
