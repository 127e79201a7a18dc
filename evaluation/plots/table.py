"""Prints summary records as tables on the terminal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evaluation.experiments.papers.sensitivity import varied_in
from evaluation.plots.notes import neo_notes
from evaluation.results.claims import place_of
from evaluation.results.folder import PREDICTED, FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import comparisons, label_of
from evaluation.results.tables import Columns, rows_table

# The ratio is computed here.
COLUMNS: Columns = (
    ("out", "output_len_mean", ".0f"), ("req/s", "request_rate", "g"), ("CPU GB/s", "cpu_bandwidth_gb_s", ".0f"),
    ("system", "system", "s"), ("tok/s", "output_tokens_per_s", ".1f"), ("predicted", PREDICTED, ".1f"),
    ("lowest", "output_tokens_per_s_low", ".1f"), ("highest", "output_tokens_per_s_high", ".1f"),
    ("ratio", "ratio", ".2f"), ("s/token", "per_token_latency_s_mean", ".3f"),
    ("goodput", "goodput_requests_per_s", ".2f"), ("GPU batch", "gpu_batch_busy_fraction", ".0%"),
    ("CPU", "cpu_busy_fraction", ".0%"),
)  # fmt: skip
ASSUMED = 2
"""Index of the assumption's column: the varied one, by default the speed of CPU attention."""


def print_results(title: str, summary: Sequence[FlatRecord], console: Console) -> None:
    """The main metrics (summary.md has all of them): a table for each panel and workload.

    ratio: output tokens/s over the baseline's; s/token: mean per-token latency; goodput: requests/s that meet the
    targets; GPU batch and CPU: the fraction of time in which they computed; predicted: SIMULATED tok/s from the profile
    of the machine that measured. Empty columns are left out.
    """
    for compared in comparisons(summary):
        groups = grouped(compared, "panel", lambda row: row.get("setting_title") or row["model"], "workload_title")
        for (panel, machine, workload), records in groups.items():
            baseline = records[0]["baseline"]
            heading = (
                f"{title}, panel ({panel}): {machine}, {workload}\n{label_of(records)}; ratio of tok/s to {baseline}"
            )
            if any(record.get(PREDICTED) for record in records):
                heading += "; predicted: SIMULATED tok/s from this machine's profile"
            console.print(heading, highlight=False, markup=False, soft_wrap=True)
            console.print(results_table(records, baseline))
        for note in neo_notes(compared):
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def results_table(records: Sequence[FlatRecord], baseline: str) -> Table:
    varied = varied_in(records)
    columns = list(COLUMNS)
    if varied is not None:
        columns[ASSUMED] = (varied.column, varied.field, ".4g")

    def place(record: FlatRecord) -> tuple[Any, Any]:
        return place_of(record), record[varied.field] if varied else None

    rates = {place(r): r["output_tokens_per_s"] for r in records if r["system"] == baseline}
    rows = []
    for record in records:
        # A baseline that does not depend on what was varied ran once.
        rate, base = record["output_tokens_per_s"], rates.get(place(record)) or rates.get((place_of(record), None))
        rows.append({**record, "ratio": rate / base if rate and base else None})
        if record["request_rate"] is None:  # goodput means nothing when all requests arrive at once
            rows[-1]["goodput_requests_per_s"] = None
    columns = [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
    if any(row["failed"] for row in rows):
        columns.append(("failed", "failed", "d"))
    shown = rows_table(rows, columns)
    shown.box, shown.header_style, shown.padding = SIMPLE_HEAD, "table.header", (0, 1)
    for index, (row, after) in enumerate(itertools.pairwise(rows)):
        shown.rows[index].end_section = place_of(row) != place_of(after)
    return shown
