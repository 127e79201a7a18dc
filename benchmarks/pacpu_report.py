"""What bench_pacpu.py shows of its rows: tables, verdicts, a figure."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from evaluation.results import FlatRecord

PLAIN_LINE_EVERY_S = 15.0
# Okabe and Ito's colours.
COLOURS = {"native": "#0072B2", "llamafile": "#D55E00", "ispc": "#009E73"}
LINES = {"avx2": "--", "avx512bf16": ":", "amx": "-."}
PEER_COLOURS = ("#8C8C8C", "#CC79A7")


@dataclass(frozen=True)
class Floor:
    """What a kernel shall reach on one thread: shares of the read limit and ratios to `ispc`, at the least and at best.

    Medians over all shapes count. `heads` is query heads per KV head: more than one with GQA.
    """

    name: str
    kernel: str
    isas: tuple[str, ...]
    dtype: str
    is_gqa: bool
    fraction: tuple[float, float] | None
    ratio: tuple[float, float] | None


FLOORS = (
    Floor("float16 GQA (AVX-512)", "native", ("avx512",), "float16", True, (0.62, 0.80), (1.8, 2.3)),
    Floor("float16 MHA (AVX-512)", "native", ("avx512",), "float16", False, (0.78, 0.90), (1.2, 1.4)),
    Floor("bfloat16 GQA (AMX)", "native", ("amx",), "bfloat16", True, (0.75, 0.88), (2.1, 2.5)),
    Floor("float16 GQA (AVX2)", "native", ("avx2",), "float16", True, (0.55, 0.65), None),
    Floor("llamafile, float16 GQA", "llamafile", ("avx512", "avx2"), "float16", True, None, (1.2, 1.4)),
)


def verdicts(rows: Sequence[FlatRecord]) -> Iterator[str]:
    """A line for each floor: met, missed, or skipped and why."""
    for floor in FLOORS:
        mine = []
        for isa in floor.isas:
            mine = mine or [
                row
                for row in rows
                if (row["kernel"], row["isa"], row["dtype"], row["threads"]) == (floor.kernel, isa, floor.dtype, 1)
                and (row["heads"] > row["kv_heads"]) == floor.is_gqa
            ]
        if not mine:
            yield f"{floor.name}: skipped, no {floor.kernel} with {' or '.join(floor.isas)} on this machine"
            continue
        parts, met = [], True
        if floor.fraction:
            value = statistics.median(row["fraction_of_read"] for row in mine)
            parts.append(f"{value:.0%} of the read limit (floor {floor.fraction[0]:.0%}, aim {floor.fraction[1]:.0%})")
            met &= value >= floor.fraction[0]
        if floor.ratio:
            ratios = [row["ratio_to_ispc"] for row in mine if row["ratio_to_ispc"]]
            if ratios:
                value = statistics.median(ratios)
                parts.append(f"{value:.2f}x ispc (floor {floor.ratio[0]}, aim {floor.ratio[1]})")
                met &= value >= floor.ratio[0]
            else:
                parts.append("ratio to ispc skipped, it is not there")
        yield f"{floor.name}: {'met' if met else 'MISSED'}, {', '.join(parts)}"


def medians(rows: Sequence[FlatRecord]) -> Iterator[tuple[str, ...]]:
    """Medians over shapes for each kind of heads, dtype, team size and contender."""
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
    for cells in medians(rows):
        if before not in (None, cells[:3]):
            table.add_row()
        before = cells[:3]
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def markdown(rows: Sequence[FlatRecord]) -> str:
    """Every row, for reading."""
    if not rows:
        return ""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figure(rows: Sequence[FlatRecord]) -> plt.Figure:
    """Share of the read limit over shapes: a column for each kind of heads and dtype, a row for each team size."""
    columns = list(dict.fromkeys((heads_name(row), row["dtype"]) for row in rows))
    teams = sorted({row["threads"] for row in rows})
    shapes = list(dict.fromkeys((row["batch"], row["context"], row["ragged"]) for row in rows))
    contenders = list(dict.fromkeys((row["kernel"], row["isa"]) for row in rows))
    peers = [name for name in dict.fromkeys(kernel for kernel, _ in contenders) if name not in COLOURS]
    colours = COLOURS | dict(zip(peers, PEER_COLOURS, strict=False))
    style = {"font.family": "DejaVu Sans", "font.size": 9, "pdf.fonttype": 42}
    with plt.rc_context(style):
        drawing, axes = plt.subplots(
            len(teams), len(columns), figsize=(3.3 * len(columns) + 0.6, 2.7 * len(teams) + 1.3),
            sharex=True, sharey=True, squeeze=False,
        )  # fmt: skip
        for line, threads in enumerate(teams):
            for place, (heads, dtype) in enumerate(columns):
                ax = axes[line][place]
                here = [r for r in rows if (heads_name(r), r["dtype"], r["threads"]) == (heads, dtype, threads)]
                for kernel, isa in contenders:
                    mine = {
                        (r["batch"], r["context"], r["ragged"]): r["fraction_of_read"]
                        for r in here
                        if (r["kernel"], r["isa"]) == (kernel, isa)
                    }
                    if not mine:
                        continue
                    is_second = isa == "avx2"
                    ax.plot(
                        [shapes.index(shape) for shape in mine], [100 * share for share in mine.values()],
                        color=colours[kernel], marker="o" if not is_second else ".", markersize=4,
                        linewidth=1.4 if not is_second else 0.9, linestyle=LINES.get(isa, "-"),
                        label=f"{kernel}, {isa}",
                    )  # fmt: skip
                read = statistics.median([r["read_gbps"] for r in here]) if here else float("nan")
                team = "1 thread" if threads == 1 else f"{threads} threads"
                ax.set_title(f"{heads}, {dtype}, {team}\n100% = {read:.0f} GB/s", fontsize=9, loc="left")
                ax.axhline(100, color="#222222", linewidth=0.8)
                ax.set_ylim(0, 112)
                ax.grid(axis="y", color="#E2E2E2", linewidth=0.7)
                ax.spines[["top", "right"]].set_visible(False)
                labels = [f"{batch}x{'~' if ragged else ''}{context}" for batch, context, ragged in shapes]
                ax.set_xticks(range(len(shapes)), labels, rotation=60, fontsize=8)
            axes[line][0].set_ylabel("% of streaming reads")
        for ax in axes[-1]:
            ax.set_xlabel("batch x context (~: ragged, mean)")
        entries = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in axes.flat]
        handles = {label: handle for ax_entries in entries for handle, label in ax_entries}
        drawing.legend(
            handles.values(), handles.keys(), loc="upper right", ncols=min(4, len(handles)), frameon=False, fontsize=8
        )
        drawing.suptitle("CPU decode attention against memory", x=0.01, ha="left", fontweight="bold")
        drawing.tight_layout(rect=(0, 0, 1, 0.95))
    return drawing


class Progress:
    """How far the rounds are; the time left is known, since rounds stop at a deadline."""

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
