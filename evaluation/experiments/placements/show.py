"""Figures of weights that lie in several places: throughput with 16 and 4 bits, and Park and Egger's split search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.plots.bars import Bar, BarPanel, draw_bars
from evaluation.plots.style import FigureText, legend, panel_title, sheet, system_colour, tidy_axes
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct
from evaluation.results.known import known_notes
from evaluation.studies.split_point import Operation, in_pieces, single_splits

PANEL_WIDTH = 2.9
IDLE_CPU = "#C9C9C9"
WEIGHTS_TEXT = FigureText(
    "What 4-bit weights and the CPU tier of KV cache bring",
    "Output tokens per second, all requests at once. SIMULATED: predicted times, nothing measured. Axes differ.",
    "GPU-only has no KV cache in host memory. Weights that do not fit are streamed over PCIe, or computed by the CPU "
    "where the bar's name allows it and that is predicted to be faster. 4-bit products are as fast as assumed "
    "(configs/hardware/assumptions.yaml), on a T4 those of its optional library.",
)
SEARCH_TEXT = FigureText(
    "Park and Egger's split search",
    "Latency of a layer of OPT-30B if the CPU computes all operations up to and including the one named. SIMULATED: "
    "computed from the times in the paper's Fig. 6a and 8a.",
    "The latency is the longest of CPU, host-to-device transfers and decompression (section 4.2). For a batch of 100, "
    "attention and KV cache of the batch of 50 count twice.",
)
LINES = {"CPU": "neo", "host to device": "apex", "decompression": "fastdecode"}


def draw_weights(rows: Sequence[FlatRecord]) -> Figure:
    """A column of panels for each machine and model, a row for each pair of lengths; bars are the runs."""
    machines, runs = grouped(rows, "gpu", "host", "model"), distinct(rows, "run")
    lengths, systems = distinct(rows, "mean_lengths"), {row["run"]: row["system"] for row in rows}
    # Two runs have one system: the one that uses more of the machine is darker.
    colours = [IDLE_CPU if run == "GPU-only" else system_colour(systems[run]) for run in runs]
    width = max(7.0, PANEL_WIDTH * len(machines) + 1.0)
    text = replace(WEIGHTS_TEXT, notes="\n".join([WEIGHTS_TEXT.notes, *known_notes(rows)]))
    figure, axes = sheet(text, len(lengths), len(machines), width=width, height=1.9, left=0.6, right=0.3, below=0.7)
    legend(figure, runs, colours)
    for line, wanted in zip(axes, lengths, strict=True):
        for ax, ((gpu, host, model), here) in zip(line, machines.items(), strict=True):
            groups = []
            there = (row for row in here if row["mean_lengths"] == wanted)
            for weights, of_weights in grouped(there, "weights").items():
                rates = {row["run"]: row["output_tokens_per_s"] for row in of_weights}
                bars = [
                    Bar(rate, colour, f"{rate:.0f}") if (rate := rates.get(run)) is not None else Bar(0.0, "none")
                    for run, colour in zip(runs, colours, strict=True)
                ]
                groups.append((weights, bars))
            draw_bars(ax, BarPanel(f"{gpu}, {model}", f"requests of {wanted}\n{host}", groups), size=6.3)
            ax.set_xlim(-0.5, max(1.5, len(groups) - 0.5))
        line[0].set_ylabel("tokens/s")
    return figure


def draw_search(searches: Mapping[str, Sequence[Operation]], pieces: int) -> Figure:
    """A row of two panels for each list of operations: with Scores whole, and in ``pieces`` (their Fig. 14)."""
    figure, rows = sheet(SEARCH_TEXT, len(searches), 2, width=9.0, height=1.4, left=0.6, below=0.75, sharey="row")
    for axes, (name, operations) in zip(rows, searches.items(), strict=True):
        draw_splits(axes[0], name, operations)
        draw_splits(axes[1], f"{name}, Scores in {pieces} pieces", in_pieces(operations, "Scores", pieces))
        axes[0].set_ylim(0, 1.3 * axes[0].get_ylim()[1])
        axes[0].set_ylabel("ms a layer")
        axes[1].tick_params(labelleft=True)
    rows[-1][0].legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    return figure


def draw_splits(ax: Axes, title: str, operations: Sequence[Operation]) -> None:
    """A layer's latency over the operation up to which the CPU computes."""
    splits = single_splits(operations)
    # The first label means that the GPU computes all; a label that follows means: up to and including that operation.
    labels = ["GPU-only", *(op.name for op in operations[:-1])]
    gpu_only_s = splits[0].latency_s
    within = [split for split in splits if split.latency_s <= 1.6 * gpu_only_s]
    times = (
        [split.cpu_s for split in within],
        [split.host_to_device_s for split in within],
        [split.decompress_s for split in within],
    )
    for (name, system), seconds in zip(LINES.items(), times, strict=True):
        if any(seconds):
            ax.plot([1e3 * s for s in seconds], color=system_colour(system), label=name, linewidth=1.3)
    ax.bar(range(len(within)), [1e3 * split.latency_s for split in within], color="#D8D8D8", label="latency")
    best = min(range(len(within)), key=lambda index: within[index].latency_s)
    saved = 1 - within[best].latency_s / gpu_only_s
    ax.annotate(f"-{saved:.0%}", (best, 1e3 * within[best].latency_s), ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(within)), labels[: len(within)], rotation=60, fontsize=7)
    panel_title(ax, title)
    tidy_axes(ax)
