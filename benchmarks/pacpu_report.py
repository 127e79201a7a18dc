"""The output of bench_pacpu.py: tables, verdicts, a figure."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from benchmarks.pacpu_cases import ALL_WAYS, HEAD_DIM, PEER_NOTES
from evaluation.plots.style import FAINT, INK, FigureText, set_words, tidy_axes
from evaluation.results.folder import FlatRecord

PLAIN_LINE_EVERY_S = 15.0
# Okabe and Ito's colours.
COLOURS = {"native": "#0072B2", "llamafile": "#D55E00", "ispc": "#009E73"}
LINES = {"avx2": "--", "avx512bf16": ":", "amx": "-."}
PEER_COLOURS = ("#8C8C8C", "#CC79A7")
LEGEND_ENTRY, LEGEND_LINE = 1.5, 0.2
"""Inches."""


@dataclass(frozen=True)
class Requirement:
    """Required speed of a kernel on one thread, as medians over all shapes.

    `fraction` of the read limit and `ratio` to `ispc` are pairs of the required value and the aim.
    """

    name: str
    kernel: str
    isas: tuple[str, ...]
    dtype: str
    is_gqa: bool
    fraction: tuple[float, float] | None
    ratio: tuple[float, float] | None


REQUIREMENTS = (
    Requirement("float16 GQA (AVX-512)", "native", ("avx512",), "float16", True, (0.62, 0.80), (1.8, 2.3)),
    Requirement("float16 MHA (AVX-512)", "native", ("avx512",), "float16", False, (0.78, 0.90), (1.2, 1.4)),
    Requirement("bfloat16 GQA (AMX)", "native", ("amx",), "bfloat16", True, (0.75, 0.88), (2.1, 2.5)),
    Requirement("float16 GQA (AVX2)", "native", ("avx2",), "float16", True, (0.55, 0.65), None),
    Requirement("llamafile, float16 GQA", "llamafile", ("avx512", "avx2"), "float16", True, None, (1.2, 1.4)),
)


def verdicts(rows: Sequence[FlatRecord]) -> Iterator[str]:
    """A line for each requirement: met, missed, or skipped with the reason."""
    for wanted in REQUIREMENTS:
        mine = []
        for isa in wanted.isas:
            mine = mine or [
                row
                for row in rows
                if (row["kernel"], row["isa"], row["dtype"], row["threads"]) == (wanted.kernel, isa, wanted.dtype, 1)
                and (row["heads"] > row["kv_heads"]) == wanted.is_gqa
            ]
        if not mine:
            yield f"{wanted.name}: skipped, no {wanted.kernel} with {' or '.join(wanted.isas)} on this machine"
            continue
        parts, met = [], True
        if wanted.fraction:
            value = statistics.median(row["fraction_of_read"] for row in mine)
            parts.append(
                f"{value:.0%} of the read limit (required {wanted.fraction[0]:.0%}, aim {wanted.fraction[1]:.0%})"
            )
            met &= value >= wanted.fraction[0]
        if wanted.ratio:
            ratios = [row["ratio_to_ispc"] for row in mine if row["ratio_to_ispc"]]
            if ratios:
                value = statistics.median(ratios)
                parts.append(f"{value:.2f}x ispc (required {wanted.ratio[0]}, aim {wanted.ratio[1]})")
                met &= value >= wanted.ratio[0]
            else:
                parts.append("ratio to ispc skipped, ispc is not available")
        yield f"{wanted.name}: {'met' if met else 'MISSED'}, {', '.join(parts)}"


def median_cells(rows: Sequence[FlatRecord]) -> Iterator[tuple[str, ...]]:
    """Cells of medians over shapes, for each kind of heads, dtype, number of threads and contender."""
    groups: dict[tuple, list[FlatRecord]] = {}
    for row in rows:
        key = (heads_name(row), row["dtype"], row["threads"], row["kernel"], row["isa"])
        groups.setdefault(key, []).append(row)
    for (heads, dtype, threads, kernel, isa), members in groups.items():
        ratios = [row["ratio_to_ispc"] for row in members if row["ratio_to_ispc"]]
        yield (
            heads, dtype, str(threads), kernel, isa,
            f"{statistics.median(row['gbps'] for row in members):.1f}",
            f"{statistics.median(row['read_gbps'] for row in members):.1f}",
            f"{statistics.median(row['fraction_of_read'] for row in members):.0%}",
            f"{statistics.median(ratios):.2f}" if ratios else "-",
        )  # fmt: skip


def heads_name(row: FlatRecord) -> str:
    kind = "MHA" if row["heads"] == row["kv_heads"] else "GQA"
    return f"{kind} {row['heads']}/{row['kv_heads']}"


def print_medians(rows: Sequence[FlatRecord]) -> None:
    table = Table(box=None, pad_edge=False, title="medians over shapes", title_justify="left")
    for name in ("heads", "dtype", "threads", "kernel", "isa", "GB/s", "read GB/s", "of read", "/ispc"):
        table.add_column(name, justify="left" if name in ("heads", "dtype", "kernel", "isa") else "right")
    before = None
    for cells in median_cells(rows):
        if before not in (None, cells[:3]):
            table.add_row()
        before = cells[:3]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def share_of_read(rows: Sequence[FlatRecord], way: str) -> str:
    return f"{statistics.median(row[f'{way}_gbps'] / row['read_gbps'] for row in rows):.0%}"


def print_prefetches(rows: Sequence[FlatRecord]) -> None:
    """The native kernel's parts of the read limit with each way of prefetching, as medians over shapes, and the row
    whose way in use is furthest from the fastest."""
    native = [row for row in rows if row["prefetch"]]
    groups: dict[tuple, list[FlatRecord]] = {}
    for row in native:
        groups.setdefault((heads_name(row), row["dtype"], row["isa"], str(row["threads"])), []).append(row)
    table = Table(box=None, pad_edge=False, title="native: prefetches, % of the read limit", title_justify="left")
    for name in ("heads", "dtype", "isa", "threads", *ALL_WAYS, "in use", "of fastest, worst row"):
        table.add_column(name, justify="left" if name in ("heads", "dtype", "isa", "in use") else "right")
    for key, members in groups.items():
        cells = ["-" if members[0][f"{way}_gbps"] is None else share_of_read(members, way) for way in ALL_WAYS]
        worst = min(row["of_fastest_prefetch"] for row in members)
        table.add_row(*key, *cells, members[0]["prefetch"], f"{worst:.1%}")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    lost = [1 - row["of_fastest_prefetch"] for row in native]
    print(
        f"prefetch in use: within 3% of the fastest in {sum(part <= 0.03 for part in lost)} of {len(lost)} rows, "
        f"{max(lost):.1%} behind in the worst"
    )


def print_ratios(rows: Sequence[FlatRecord]) -> None:
    """Tokens/s of int8 by those of float16, and of the native kernel by those of vLLM's faster one, as medians over
    shapes."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        kind = heads_name(row), row["isa"], row["threads"]
        if row["ratio_to_float16"]:
            groups.setdefault(("int8 to float16", *kind), []).append(row["ratio_to_float16"])
        if row["ratio_to_vllm"] and row["kernel"] == "native":
            peer = "vLLM's fp8" if row["dtype"] == "int8" else "vLLM"
            groups.setdefault((f"{row['dtype']} to {peer}", *kind), []).append(row["ratio_to_vllm"])
    for (what, heads, isa, threads), ratios in groups.items():
        middle = f"{statistics.median(ratios):.2f}x tokens/s ({min(ratios):.2f}x in the worst shape)"
        print(f"{what}, {heads}, {isa}, {threads} threads: {middle}")


def markdown_rows(rows: Sequence[FlatRecord]) -> str:
    """Every row as Markdown."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw_kernels(rows: Sequence[FlatRecord], made: str) -> plt.Figure:
    """Fraction of the read limit over shapes: columns are kinds of heads and dtypes, rows are numbers of threads.

    ``made`` names the machine and the date of the measurement.
    """
    columns = list(dict.fromkeys((heads_name(row), row["dtype"]) for row in rows))
    teams = sorted({row["threads"] for row in rows})
    shapes = list(dict.fromkeys((row["batch"], row["context"], row["ragged"]) for row in rows))
    contenders = list(dict.fromkeys((row["kernel"], row["isa"]) for row in rows))
    peers = [name for name in dict.fromkeys(kernel for kernel, _ in contenders) if name not in COLOURS]
    colours = COLOURS | dict(zip(peers, PEER_COLOURS, strict=False))
    contenders.sort(key=lambda contender: list(colours).index(contender[0]))
    notes = [PEER_NOTES[name] for name in peers if name in PEER_NOTES]
    text = FigureText("CPU decode attention against memory", f"{made}; head dimension {HEAD_DIM}", "\n".join(notes))
    width = 3.3 * max(2, len(columns)) + 0.6
    legend_columns = int(width / LEGEND_ENTRY)
    legend_height = LEGEND_LINE * -(-len(contenders) // legend_columns)
    height = 2.5 * len(teams) + 1.9 + legend_height
    highest = max(110.0, *(105 * row["fraction_of_read"] for row in rows))
    drawing = plt.figure(figsize=(width, height))
    bottom, top = set_words(drawing, text, width, height)
    axes = drawing.subplots(len(teams), len(columns), sharex=True, sharey=True, squeeze=False)
    for line, threads in zip(axes, teams, strict=True):
        for ax, (heads, dtype) in zip(line, columns, strict=True):
            here = [r for r in rows if (heads_name(r), r["dtype"], r["threads"]) == (heads, dtype, threads)]
            draw_panel(ax, here, shapes, contenders, colours)
            ax.set_ylim(0, highest)
        line[0].set_ylabel("% of streaming reads")
    for ax in axes[-1]:
        ax.set_xlabel("batch x context (~: ragged, mean)", color=FAINT)
    entries = [entry for ax in axes.flat for entry in zip(*ax.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in entries}
    labels = [label for kernel, isa in contenders if (label := f"{kernel}, {isa}") in handles]
    drawing.legend(
        [handles[label] for label in labels], labels, loc="upper left", bbox_to_anchor=(0.05 / width, top),
        ncols=legend_columns, frameon=False, fontsize=8, columnspacing=1.4,
    )  # fmt: skip
    drawing.tight_layout(rect=(0, bottom, 1, top - legend_height / height))
    return drawing


def draw_panel(
    ax: Axes,
    rows: Sequence[FlatRecord],
    shapes: Sequence[tuple[int, int, bool]],
    contenders: Sequence[tuple[str, str]],
    colours: Mapping[str, str],
) -> None:
    """The rows of one kind of heads, dtype and number of threads: a line for each contender."""
    if not rows:
        return
    for kernel, isa in contenders:
        mine = {
            shapes.index((r["batch"], r["context"], r["ragged"])): 100 * r["fraction_of_read"]
            for r in rows
            if (r["kernel"], r["isa"]) == (kernel, isa)
        }
        thin = {"marker": ".", "linewidth": 0.9} if isa == "avx2" else {"marker": "o", "linewidth": 1.4}
        if mine:
            ax.plot(
                list(mine), list(mine.values()), color=colours[kernel], markersize=4, linestyle=LINES.get(isa, "-"),
                label=f"{kernel}, {isa}", **thin,
            )  # fmt: skip
    first, read = rows[0], statistics.median(row["read_gbps"] for row in rows)
    team = "1 thread" if first["threads"] == 1 else f"{first['threads']} threads"
    ax.set_title(f"{heads_name(first)}, {first['dtype']}, {team}\n100% = {read:.0f} GB/s", fontsize=9, loc="left")
    ax.axhline(100, color=INK, linewidth=0.8)
    labels = [f"{batch}x{'~' if ragged else ''}{context}" for batch, context, ragged in shapes]
    ax.set_xticks(range(len(shapes)), labels, rotation=60, fontsize=8)
    tidy_axes(ax)


class Progress:
    """Progress of the rounds. The time left is known, since rounds stop at a deadline."""

    def __init__(self, num_points: int, start_s: float, seconds: float) -> None:
        self.num_points, self.end_s, self.last_line_s = num_points, start_s + seconds, start_s
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self.bar = RichProgress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("measuring", total=num_points)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def update(self, round_number: int, points_done: int) -> None:
        now_s = time.perf_counter()
        what = f"round {round_number}, about {max(0, round(self.end_s - now_s))} s left"
        self.bar.update(self.task, completed=points_done, description=what)
        if not self.console.is_terminal and now_s - self.last_line_s > PLAIN_LINE_EVERY_S:
            self.last_line_s = now_s
            print(f"{what}: {points_done}/{self.num_points} cases", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
