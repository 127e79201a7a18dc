"""Tables and figures of `adaptive`, from summary records."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from matplotlib.figure import Figure
from rich.console import Console

from evaluation.experiments.adaptive.ratios import LATENCY_RATIOS as RATIOS
from evaluation.grid import OWN_KERNELS, SUBJECT
from evaluation.plots.bars import Bar
from evaluation.plots.heat_map import Cell, Plane, heat_map
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.notes import Records, span_text
from evaluation.plots.rows_of_bars import rows_of_bars
from evaluation.plots.style import FigureText, system_colour, times
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct
from evaluation.results.known import known_notes
from evaluation.results.tables import LATENCY_COLUMNS, Columns, rows_table

CASES: Columns = (
    ("case", "case", "s"), ("system", "system", "s"), ("tok/s", "output_tokens_per_s", ".1f"),
    ("over best", "ratio_to_best_published", ".3f"), ("of bound", "fraction_of_bound", ".2f"),
    ("TTFT p50", "ttft_s_p50", ".1f"), ("p99 (s)", "ttft_s_p99", ".1f"), ("TPOT p50", "tpot_s_p50", ".3f"),
    ("p99 (s)", "tpot_s_p99", ".3f"), ("GPU batch", "gpu_batch_busy_fraction", ".0%"),
    ("CPU", "cpu_busy_fraction", ".0%"),
)  # fmt: skip
CELLS: Columns = (
    ("kernel", "kernel", "s"), ("CPU GB/s", "host_read_gb_s", "g"), ("mean output", "output_len", ".0f"),
    ("tok/s", "output_tokens_per_s", ".1f"), ("best published", "best_published", "s"),
    ("over best", "ratio_to_best_published", ".3f"), ("of bound", "fraction_of_bound", ".2f"),
)  # fmt: skip
LATENCIES: Columns = (
    ("case", "case", "s"), ("load", "load", ".0%"), ("req/s", "request_rate", ".3g"), ("system", "system", "s"),
    ("s/token", "per_token_latency_s_mean", ".3f"), *LATENCY_COLUMNS,
)  # fmt: skip
LATENCY_RATIOS: Columns = (
    ("case", "case", "s"), ("load", "load", ".0%"), ("s/token / neo", "latency_over_neo", ".3f"),
    ("/ apex", "latency_over_apex", ".3f"), ("TTFT p99 / neo", "ttft_p99_over_neo", ".3f"),
    ("/ apex", "ttft_p99_over_apex", ".3f"), ("TPOT p99 / neo", "tpot_p99_over_neo", ".3f"),
    ("/ apex", "tpot_p99_over_apex", ".3f"),
)  # fmt: skip
ERRORS: Columns = (
    ("actual / believed", "actual_over_believed", "g"), ("correction", "correction", "s"), ("cases", "cases", "d"),
    ("mean", "mean", ".3f"), ("over best", "lowest", ".3f"), ("in", "lowest_case", "s"),
    ("over right", "lowest_right", ".3f"), ("in", "lowest_right_case", "s"),
)  # fmt: skip
WORST = 12
"""Cells in the table of the worst ones."""


def print_cases(summary: Records, console: Console) -> None:
    console.print("\nSIMULATED; over best: throughput over the best of the published systems")
    console.print(rows_table(summary, CASES))


def print_map(summary: Records, console: Console) -> None:
    console.print(f"\nSIMULATED; the cells in which {SUBJECT} is worst, over the best of the published systems there")
    for here in grouped(subject_rows(summary), "kernel").values():
        here.sort(key=lambda row: row["ratio_to_best_published"])
        console.print(rows_table(here[:WORST], CELLS))
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
    console.print(rows_table(summary, LATENCIES))
    console.print(f"\nlatencies of {SUBJECT} over those of the others")
    console.print(rows_table([row for row in summary if row["system"] == SUBJECT], LATENCY_RATIOS))


def print_wrong_tables(summary: Records, console: Console) -> None:
    console.print(
        f"\nSIMULATED; {SUBJECT} where CPU attention takes longer or shorter than its profile table says:\n"
        "lowest ratio over the best published system with the same error (mean: geometric, over the cases), and over\n"
        "itself with a right table"
    )
    console.print(rows_table(list(error_rows(summary)), ERRORS))


def error_rows(summary: Records) -> Iterator[FlatRecord]:
    """The lowest ratios of each error, over all cases."""
    for error, here in grouped(subject_rows(summary), "actual_over_believed", "online_correction").items():
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


# -- figures ----------------------------------------------------------------------------------------------------------

LATENCIES_DRAWN = (("per_token_latency_s_mean", "mean s per token"), ("ttft_s_p99", "p99 s to first token"))
LATENCY_PANEL = {"columns": 4, "panel_width": 3.2, "height": 1.35}
LEAST_DECADES = 1.0
"""A vertical axis of latencies spans at least this, so that small differences look small."""
LEAST_SPAN = 1.1
"""The colours of the map span at least the ratios from 1/LEAST_SPAN to LEAST_SPAN."""


def draw_cases(summary: Records) -> Figure:
    """Throughput of each system as a fraction of the bound; a group of bars for each case."""
    systems = distinct(summary, "system")
    groups = []
    for rows in grouped(summary, "case").values():
        by_system = {row["system"]: row for row in rows}
        bars = [case_bar(by_system[system]) if system in by_system else Bar(0.0, "none") for system in systems]
        groups.append((rows[0]["case_title"], bars))
    text = FigureText(
        f"Throughput of {SUBJECT} and the papers' systems \u2014 SIMULATED",
        f"All requests at once; bars of {SUBJECT} are marked with its tokens/s and its ratio to the best of the others",
        "Predicted times, nothing measured. The bound is one of any schedule: it ignores filling, draining and the "
        "attention of prompts, so no schedule reaches 1.\n"
        "Names: GPU (host, where it is not APEX's), CPU attention where it is not the kernel's own rate, workload with "
        "mean input and output tokens.\n" + "\n".join(known_notes(summary)),
    )
    return rows_of_bars(groups, systems, text, "output tokens/s over the bound, SIMULATED")


def case_bar(row: FlatRecord) -> Bar:
    ratio, words = row["ratio_to_best_published"], ""
    if row["system"] == SUBJECT and ratio:
        words = f"{row['output_tokens_per_s']:.0f} tok/s, {ratio:.2f}\u00d7"
    return Bar(row["fraction_of_bound"], system_colour(row["system"]), words, bold=bool(words) and round(ratio, 2) < 1)


def draw_map(summary: Records) -> Figure:
    """CPU bandwidth by output length: a plane for each kernel, a cell for each pair, marked with its ratio.

    Raises:
        ValueError: there is nothing to draw.
    """
    rows = subject_rows(summary)
    if not rows:
        raise ValueError("nothing to draw: no cell is finished")
    lengths, bandwidths = (sorted(set(distinct(rows, field))) for field in ("output_len", "host_read_gb_s"))
    planes = []
    for kernel, here in grouped(rows, "kernel").items():
        cells = {}
        for row in here:
            ratio = row["ratio_to_best_published"]
            place = bandwidths.index(row["host_read_gb_s"]), lengths.index(row["output_len"])
            cells[place] = Cell(ratio, f"{ratio:.2f}", bold=round(ratio, 2) < 1)
        own = kernel == OWN_KERNELS
        title = "Each system with its own CPU kernel" if own else f"All systems with the kernel {kernel}"
        x_label = "GB/s that the CPU's cores read from memory"
        columns, lines = ([f"{value:g}" for value in values] for values in (bandwidths, lengths))
        planes.append(Plane(title, "", x_label, "mean output (tokens)", columns, lines, cells))
    ratios = [row["ratio_to_best_published"] for row in rows]
    span = max(LEAST_SPAN, *(max(ratio, 1 / ratio) for ratio in ratios))
    return heat_map(planes, map_text(summary, rows), span, f"{SUBJECT} over the best of the others")


def map_text(summary: Records, rows: Records) -> FigureText:
    first = rows[0]
    published = [system for system in distinct(summary, "system") if system != first["system"]]
    counts = span_text(sorted(set(distinct(rows, "num_requests"))))
    return FigureText(
        f"{first['system']} over the best of {', '.join(published)} \u2014 SIMULATED",
        "Output tokens/s, all requests at once; above 1 (blue) "
        f"{first['system']} is faster, below 1 (red, bold) another system is\n"
        f"{first['setting_title']} in {first['host']}; prompts of about {round(first['input_len'], -1):.0f} tokens",
        f"Predicted times, nothing measured. {counts} requests a cell, lengths uniform within "
        f"10% of the mean, seed {first['seed']}. {first['num_gpu_blocks']} GPU blocks of 16 tokens, "
        f"{first['cpu_kv_gb']:g} GB of host memory for KV cache.\n"
        "Own kernels: neo computes CPU attention with ISPC, apex and adaptive with llamafile. A kernel reaches less "
        "than the cores read, the more arithmetic it does.\n" + "\n".join(known_notes(rows)),
    )


def draw_latency(summary: Records) -> Figure:
    """For each case the mean latency per token and the p99 time to first token, over the load."""
    first, cases = summary[0], grouped(summary, "case").values()
    panels = [latency_panel(rows, *drawn) for rows in cases for drawn in LATENCIES_DRAWN]
    text = FigureText(
        "Latency under load \u2014 SIMULATED",
        f"Poisson arrivals; a load of 100% is what {first['loaded_as']} serves when all requests are there at once. "
        "Lower is better; vertical axes are logarithmic\n"
        f"Numbers at the bottom of a panel: the latency of {SUBJECT} over that of {first['loaded_as']}",
        f"Predicted times, nothing measured. {span_text(sorted(set(distinct(summary, 'num_requests'))))} requests a "
        f"point, seed {first['seed']}. "
        "Latency per token: a request's time from arrival to its last token, over its output tokens.\n"
        + "\n".join(known_notes(summary)),
    )
    return line_figure(panels, text, **LATENCY_PANEL)


def latency_panel(rows: Records, metric: str, words: str) -> LinePanel:
    """A line for each system, those drawn first wider; at the bottom the ratios of `adaptive`."""
    over = f"{RATIOS[metric]}_{rows[0]['loaded_as']}"
    by_system = grouped((row for row in rows if row[metric]), "system")
    lines = [
        Series(
            system, system_colour(system), [(100 * row["load"], row[metric]) for row in here], width=1.5 + 1.3 * wider
        )
        for wider, (system, here) in zip(reversed(range(len(by_system))), by_system.items(), strict=True)
    ]
    marks = [(100 * row["load"], times(row[over])) for row in by_system.get(SUBJECT, ()) if row[over]]
    title = rows[0]["case_title"] if metric == LATENCIES_DRAWN[0][0] else ""
    axes = {"x_from_0": False, "log_y": True, "decades": LEAST_DECADES}
    return LinePanel(title, "load (%)", words, lines, **axes, marks=marks)
