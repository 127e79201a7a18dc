"""Summary records of `adaptive` as tables on the terminal."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from apex.cli.output import number, table
from evaluation.experiments.axes import SUBJECT
from evaluation.results.folder import FlatRecord

Records = Sequence[FlatRecord]
Columns = Sequence[tuple[str, str, str]]

CASES: Columns = (
    ("case", "case", "s"),
    ("system", "system", "s"),
    ("tok/s", "output_tokens_per_s", ".1f"),
    ("over best", "ratio_to_best_published", ".3f"),
    ("of bound", "fraction_of_bound", ".2f"),
    ("TTFT p50", "ttft_s_p50", ".1f"),
    ("p99 (s)", "ttft_s_p99", ".1f"),
    ("TPOT p50", "tpot_s_p50", ".3f"),
    ("p99 (s)", "tpot_s_p99", ".3f"),
    ("lane", "lane_busy_fraction", ".0%"),
    ("CPU", "cpu_busy_fraction", ".0%"),
)
CELLS: Columns = (
    ("kernel", "kernel", "s"),
    ("CPU GB/s", "host_read_gb_s", "g"),
    ("mean output", "output_len", ".0f"),
    ("tok/s", "output_tokens_per_s", ".1f"),
    ("best published", "best_published", "s"),
    ("over best", "ratio_to_best_published", ".3f"),
    ("of bound", "fraction_of_bound", ".2f"),
)
LATENCIES: Columns = (
    ("case", "case", "s"),
    ("load", "load", ".0%"),
    ("req/s", "request_rate", ".3g"),
    ("system", "system", "s"),
    ("s/token", "per_token_latency_s_mean", ".3f"),
    ("TTFT p50", "ttft_s_p50", ".2f"),
    ("p99 (s)", "ttft_s_p99", ".2f"),
    ("TPOT p50", "tpot_s_p50", ".3f"),
    ("p99 (s)", "tpot_s_p99", ".3f"),
)
LATENCY_RATIOS: Columns = (
    ("case", "case", "s"),
    ("load", "load", ".0%"),
    ("s/token / neo", "latency_over_neo", ".3f"),
    ("/ apex", "latency_over_apex", ".3f"),
    ("TTFT p99 / neo", "ttft_p99_over_neo", ".3f"),
    ("/ apex", "ttft_p99_over_apex", ".3f"),
    ("TPOT p99 / neo", "tpot_p99_over_neo", ".3f"),
    ("/ apex", "tpot_p99_over_apex", ".3f"),
)
ERRORS: Columns = (
    ("actual / believed", "actual_over_believed", "g"),
    ("correction", "correction", "s"),
    ("cases", "cases", "d"),
    ("mean", "mean", ".3f"),
    ("over best", "lowest", ".3f"),
    ("in", "lowest_case", "s"),
    ("over right", "lowest_right", ".3f"),
    ("in", "lowest_right_case", "s"),
)
WORST = 12
"""Cells in the table of the worst ones."""


def print_cases(summary: Records, console: Console) -> None:
    console.print("\nSIMULATED; over best: throughput over the best of the published systems")
    console.print(as_table(summary, CASES))


def print_map(summary: Records, console: Console) -> None:
    console.print(f"\nSIMULATED; the cells in which {SUBJECT} is worst, over the best of the published systems there")
    for kernel in dict.fromkeys(row["kernel"] for row in subject_rows(summary)):
        here = [row for row in subject_rows(summary) if row["kernel"] == kernel]
        here.sort(key=lambda row: row["ratio_to_best_published"])
        console.print(as_table(here[:WORST], CELLS))
        ratios = [row["ratio_to_best_published"] for row in here]
        mean = statistics.geometric_mean(ratios)
        console.print(
            f"{len(ratios)} cells: {ratios[0]:.3f} to {ratios[-1]:.3f}, geometric mean {mean:.3f}, "
            f"{sum(ratio < 1 for ratio in ratios)} below 1\n"
        )


def print_latency(summary: Records, console: Console) -> None:
    console.print(
        f"\nSIMULATED; load: requests/s over what {summary[0]['loaded_as']} serves when all are there at once"
    )
    console.print(as_table(summary, LATENCIES))
    console.print(f"\nlatencies of {SUBJECT} over those of the others")
    console.print(as_table([row for row in summary if row["system"] == SUBJECT], LATENCY_RATIOS))


def print_wrong_tables(summary: Records, console: Console) -> None:
    console.print(
        f"\nSIMULATED; {SUBJECT} where CPU attention takes longer or shorter than its profile table says:\n"
        "lowest ratio over the best published system with the same error (mean: geometric, over the cases), and over\n"
        "itself with a right table"
    )
    console.print(as_table(list(error_rows(summary)), ERRORS))


def error_rows(summary: Records) -> Iterator[FlatRecord]:
    """The lowest ratios of each error, over all cases."""
    mine = subject_rows(summary)
    for error in dict.fromkeys((row["actual_over_believed"], row["online_correction"]) for row in mine):
        here = [row for row in mine if (row["actual_over_believed"], row["online_correction"]) == error]
        worst = min(here, key=lambda row: row["ratio_to_best_published"])
        changed = [row for row in here if row["ratio_to_right_table"] is not None]
        most = min(changed, key=lambda row: row["ratio_to_right_table"], default={})
        yield {
            "actual_over_believed": error[0],
            "correction": "on" if error[1] else "off",
            "cases": len(here),
            "mean": math.exp(statistics.fmean(math.log(row["ratio_to_best_published"]) for row in here)),
            "lowest": worst["ratio_to_best_published"],
            "lowest_case": worst["case"],
            "lowest_right": most.get("ratio_to_right_table"),
            "lowest_right_case": most.get("case"),
        }


def subject_rows(summary: Records) -> list[FlatRecord]:
    """The rows of `adaptive` that have a ratio."""
    return [row for row in summary if row["system"] == SUBJECT and row["ratio_to_best_published"] is not None]


def rows_by_case(summary: Records) -> dict[str, list[FlatRecord]]:
    """The rows of each case, in the order of the summary.

    Raises:
        ValueError: there is nothing to draw.
    """
    cases: dict[str, list[FlatRecord]] = {}
    for row in summary:
        cases.setdefault(row["case"], []).append(row)
    if not cases:
        raise ValueError("nothing to draw: no case is finished")
    return cases


def as_table(summary: Records, columns: Columns) -> Table:
    rows = [tuple(number(record.get(field), form) for _, field, form in columns) for record in summary]
    left = [title for title, _, form in columns if form == "s"]
    return table([title for title, _, _ in columns], rows, left=left)
