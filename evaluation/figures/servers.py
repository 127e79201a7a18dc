"""Comparison of servers: ratios to vLLM on the same number of cores, medians over rounds, table and bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from apex.cli.output import number, table
from evaluation.plots.bars import BarPanel, Half, rate_bars, throughput_figure
from evaluation.plots.style import FigureText, save_figure
from evaluation.plots.table import LATENCY_COLUMNS
from evaluation.results.folder import FlatRecord, median_record
from evaluation.results.frame import bases, frame_of, over, with_columns
from swiftllm.machine import cpu_model

BASELINE = "vllm"


def cores_text(cores: int) -> str:
    return f"{cores} core{'s' if cores > 1 else ''}"


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with ``ratio``: output tokens/s over vLLM's with as many cores in the same round, or None."""
    frame = frame_of(rows)
    base = bases(frame, frame["system"] == BASELINE, ["cores", "round"])
    return with_columns(rows, ratio=over(frame["output_tokens_per_s"], base))


COLUMNS = (
    ("tok/s", "output_tokens_per_s", ".1f"),
    ("ratio", "ratio", ".2f"),
    *LATENCY_COLUMNS,
    ("cores busy", "server_cores_busy", ".2f"),
    ("failed", "failed", ".0f"),
)
# Columns of summary.md, which has a row for every round.
ROUND_COLUMNS = (
    ("cores", "cores", "{}"),
    ("system", "system", "{}"),
    ("round", "round", "{}"),
    *((field, title, f"{{:{form}}}") for title, field, form in COLUMNS),
    ("idle_servers_cores_busy", "idle servers' cores busy", "{:.3f}"),
    ("resident_gib", "resident GiB", "{:.2f}"),
)


def median_rows(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """One row per system and number of cores: the median of each column over the rounds, the sum of failures."""
    groups: dict[tuple[int, str], list[FlatRecord]] = {}
    for row in rows:
        groups.setdefault((row["cores"], row["system"]), []).append(row)

    def median(group: Sequence[FlatRecord], field: str) -> float | None:
        values = [row[field] for row in group if row[field] is not None]
        return statistics.median(values) if values else None

    return [
        {**median_record(group), **{field: median(group, field) for _, field, _ in COLUMNS}}
        | {"failed": sum(row["failed"] for row in group), "rounds": len(group)}
        for _, group in sorted(groups.items())
    ]


def results_table(middle: Sequence[FlatRecord], rows: Sequence[FlatRecord]) -> Table:
    cells = []
    for row in middle:
        mine = [r for r in rows if (r["system"], r["cores"]) == (row["system"], row["cores"])]
        by_round = " ".join(number(r["output_tokens_per_s"], ".0f") for r in sorted(mine, key=lambda r: r["round"]))
        figures = [number(row[field], form) for _, field, form in COLUMNS]
        cells.append([str(row["cores"]), row["system"], *figures, by_round])
    titles = ("cores", "system", *(title for title, _, _ in COLUMNS), "tok/s by round")
    return table(titles, cells, left=("system",))


def draw_servers(middle: Sequence[FlatRecord], folder: Path) -> Path:
    """Bars of the medians, one panel per number of cores. Returns the path of the figure."""
    first = middle[0]
    systems, panels = tuple(dict.fromkeys(row["system"] for row in middle)), []
    for cores in sorted({row["cores"] for row in middle}):
        mine = tuple(row for row in middle if row["cores"] == cores)
        label = f"{first['num_requests']} requests at once, {first['input_len']:.0f} in / {first['output_len']:.0f} out"
        groups = [(label, rate_bars(mine, systems, BASELINE))]
        panels.append(BarPanel(cores_text(cores), "", groups, "output tokens/s, measured"))
    text = FigureText(
        "This engine's servers and vLLM's CPU build, over HTTP",
        f"{first['model']}, bfloat16, on {cpu_model()}; medians of {first['rounds']} interleaved rounds, "
        "thin lines from the lowest to the highest",
        f"Above the bars: ratio to vLLM on as many cores, or tokens/s. {BASELINE}: its default, which computes on all "
        "cores but one unless it is given one; vllm-all-cores: OpenMP threads on every core.",
    )
    return save_figure(throughput_figure([Half(panels, systems, text)]), folder)[0]
