"""The tables of evaluation/report.py: records as cells, with the column titles of summary.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apex.replay.metrics import compute_metrics
from evaluation.results.folder import DRAWN, SWEPT, TABLE, FlatRecord
from evaluation.results.kinds import kind_of

# Metrics of replays that are not in the summary table: shown under "all columns", not in the short table.
SIDE_METRICS = {
    *compute_metrics([], 0.0), "iterations", "preemptions", "swapped_blocks", "gpu_busy_fraction", "extrapolated",
    "trace_note", "predicted_wall_s", "trace_file", "seed", "repeats", "max_send_lag_s", "others_busy_cores",
    *(f"{metric}_{end}" for metric in DRAWN for end in ("low", "high")),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """``text`` is shown; ``order`` is the sort key, a number if the value is one."""

    text: str
    order: float | str
    numeric: bool


@dataclass(frozen=True)
class Column:
    title: str
    name: str
    numeric: bool
    simulated: bool


@dataclass(frozen=True)
class Table:
    """``origins`` says for each row whether it is simulated or measured."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    origins: tuple[str, ...]


def make_cell(value: Any, form: str | None = None) -> Cell:
    if value is None:
        return Cell("\u2013", "", False)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return Cell(str(value), str(value), False)
    if form is None:
        form = "{:.4g}" if isinstance(value, float) and abs(value) < 1e4 else "{:.0f}"
    return Cell(form.format(value), value, True)


def make_table(records: Sequence[FlatRecord], names: Sequence[str]) -> Table:
    """The named fields of the records, with titles and formats of summary.md if it has the field."""
    known = {name: (title, form) for name, title, form in TABLE}
    rows = [tuple(make_cell(record.get(name), known.get(name, ("", None))[1]) for name in names) for record in records]
    columns = [
        Column(
            title=known.get(name, (name.replace("_", " "), None))[0],
            name=name,
            numeric=any(row[place].numeric for row in rows),
            simulated=name.startswith(("simulated_", "predicted_wall")),
        )
        for place, name in enumerate(names)
    ]
    return Table(tuple(columns), tuple(rows), tuple(kind_of(record) for record in records))


def columns_of(records: Sequence[FlatRecord]) -> tuple[list[str], list[str], dict[str, str]]:
    """Names for the short table, names of all fields that have a value, and the inputs that all rows share.

    The short table has the system, the swept variables, the main metrics, and every other input that differs.
    """
    names = [name for name in dict.fromkeys(name for record in records for name in record)]
    names = [name for name in names if any(record.get(name) is not None for record in records)]
    headline = [name for name, _, _ in TABLE if name in names]
    inputs = [name for name in names if name not in SIDE_METRICS and name not in headline]
    same = [name for name in inputs if len({record.get(name) for record in records}) == 1]
    common = {name: make_cell(records[0][name]).text for name in same} if len(records) > 1 else {}
    first = [name for name in ("system", "workload", *SWEPT) if name in names and name not in common]
    return list(dict.fromkeys([*first, *headline, *(name for name in inputs if name not in common)])), names, common
