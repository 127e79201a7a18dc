"""Tables and figures of two classes of service, from summary records: lines over what was swept, or bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from evaluation.plots.bars import Bar, BarPanel, draw_bars
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.notes import Records, span_text, trace_note
from evaluation.plots.style import FigureText, legend, sheet, system_colour, times
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct, label_of
from evaluation.results.known import known_notes
from evaluation.results.tables import Columns, rows_table

BEST_EFFORT, ATTAINMENT = "best_effort_tokens_per_s", "slo_attainment"
AXES = {
    "request_rate": "latency-sensitive requests/s (Poisson arrivals)",
    "rate_interval_s": "seconds between changes of the request rate",
    "tpot_slo_s": "target: seconds per output token",
    "cpu_hosts": "CPU hosts, the GPUs' own included",
}
METRICS = {
    BEST_EFFORT: "best-effort tokens/s",
    ATTAINMENT: "share of requests within targets",
    "best_effort_over_one_host": "best-effort tokens/s over 1 host",
    "latency_sensitive_tpot_s_p50": "median seconds per token",
    "latency_sensitive_tokens_per_s": "latency-sensitive tokens/s",
    "ttft_attainment": "first tokens in time, of offered",
    "ttft_attainment_admitted": "first tokens in time, of admitted",
}
SHARES = (ATTAINMENT, "ttft_attainment", "ttft_attainment_admitted")
UNCONTROLLED_COLOUR = "#848484"
SYSTEM_NOTES = {
    "neo": "neo knows one class of requests, and serves them in the order of arrival.",
    "omniserve-stepping": "omniserve-stepping (a line's name: stepping) is this project's own scheduler; the paper "
    "does not have it.",
}

SWEPT: Columns = (
    ("req/s", "request_rate", "g"), ("burst s", "rate_interval_s", "g"), ("target", "tpot_slo_s", "g"),
    ("hosts", "cpu_hosts", "d"), ("blocks", "num_gpu_blocks", "d"), ("slower", "slower", "g"),
    ("control", "admission_control", ""),
)  # fmt: skip
"""Shown where they differ."""
COLUMNS: Columns = (
    ("system", "system", "s"), ("in SLO", "slo_attainment", ".2%"), ("points", "points_over_alone", "+.2f"),
    ("refused", "refused", "d"), ("TTFT p99", "latency_sensitive_ttft_s_p99", ".2f"),
    ("TPOT p50", "latency_sensitive_tpot_s_p50", ".3f"), ("p99", "latency_sensitive_tpot_s_p99", ".3f"),
    ("LS tok/s", "latency_sensitive_tokens_per_s", ".0f"), ("BE tok/s", "best_effort_tokens_per_s", ".1f"),
    ("ratio", "best_effort_over_baseline", ".2f"),
)  # fmt: skip
OF_HOSTS: Columns = (("/ 1 host", "best_effort_over_one_host", ".2f"),)
OF_ADMISSION: Columns = (
    ("TTFT ok", "ttft_attainment", ".2%"),
    ("admitted", "ttft_attainment_admitted", ".2%"),
    ("LS / all", "throughput_over_uncontrolled", ".3f"),
)
"""Where hosts, or admission control, differ."""


# -- tables -----------------------------------------------------------------------------------------------------------


def print_omniserve(shows: str, summary: Records, console: Console) -> None:
    """A table for each machine and best-effort stream, with what differs in it."""
    kind, baseline = label_of(summary), summary[0]["baseline"]
    console.print(
        f"\n{shows}, {kind}. in SLO: share of offered latency-sensitive requests (LS) within both targets; "
        f"points: that minus attainment without best effort (BE); ratio: BE tokens/s over {baseline}'s",
        highlight=False,
        soft_wrap=True,
    )
    for title, rows in grouped(summary, panel_words).items():
        console.print(title, style="bold", highlight=False)
        console.print(rows_table(rows, shown_columns(rows)))


def shown_columns(rows: Records) -> list[tuple[str, str, str]]:
    """What differs among the rows, and what is known of them."""
    varied = {field for _, field, _ in SWEPT if len({row.get(field) for row in rows}) > 1}
    columns = [column for column in SWEPT if column[1] in varied] + list(COLUMNS)
    columns += OF_HOSTS if "cpu_hosts" in varied else ()
    if "admission_control" in varied:
        columns = [column for column in columns if column[0] not in ("ratio", "p99", "TPOT p50")] + list(OF_ADMISSION)
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


# -- figures ----------------------------------------------------------------------------------------------------------


def draw_omniserve(section: Mapping[str, Any], records: Records) -> Figure:
    """The figure of a section of the experiment file: lines over its ``x``, or bars without one.

    Raises:
        ValueError: there is nothing to draw.
    """
    drawn = [row for row in records if row["best_effort"]]
    if not drawn:
        raise ValueError("nothing to draw: no point is finished")
    if section.get("x") is None:
        return draw_groups(section, drawn, records)
    panels = grouped(drawn, "panel").values()
    lines = [line_panel(rows, section["x"], metric) for metric in section["metrics"] for rows in panels]
    return line_figure(lines, figure_text(section["shows"], records), len(panels) if len(panels) > 1 else 3)


def line_panel(records: Records, x: str, metric: str) -> LinePanel:
    """A line for each system, or for each way to admit requests where rows differ in that."""
    by_control = len({row["admission_control"] for row in records}) > 1
    lines = []
    for (system, control), rows in grouped(records, "system", "admission_control").items():
        label = ("admission" if control else "admit all") if by_control else system.removeprefix("omniserve-")
        colour = system_colour(system) if control else UNCONTROLLED_COLOUR
        points = [(row[x], row[metric]) for row in rows if row.get(metric) is not None]
        lines.append(Series(label, colour, points))
    reach = 1.0 if metric in SHARES else 0.0
    return LinePanel(panel_words(records[0]), AXES[x], f"{METRICS[metric]}, SIMULATED", lines, y_to=reach)


def draw_groups(section: Mapping[str, Any], drawn: Records, records: Records) -> Figure:
    """Best-effort throughput above, attainment below; a group for each panel and best-effort stream."""
    systems = [name for name in section["system"] if name in distinct(records, "system")]
    baseline = section["baseline"]
    text = figure_text(
        section["shows"],
        records,
        f"Above: best-effort throughput, with its ratio to {baseline}. "
        "Below: share of latency-sensitive requests within both targets",
    )
    titles = {
        BEST_EFFORT: "Best-effort tokens/s, SIMULATED",
        ATTAINMENT: "Latency-sensitive requests within their targets, SIMULATED",
    }
    figure, axes = sheet(text, len(titles), width=12.0, height=2.4, below=0.7, above=0.35)
    for ax, (metric, title) in zip(axes.flat, titles.items(), strict=True):
        groups = []
        for rows in grouped(drawn, "panel", "best_effort").values():
            by_system = {row["system"]: row for row in rows}
            bars = [service_bar(by_system.get(system, {}), metric, baseline) for system in systems]
            groups.append((group_label(rows[0]), bars))
        draw_bars(ax, BarPanel(title, "", groups), size=6.3)
    legend(axes[0, 0], systems)
    return figure


def service_bar(row: Mapping[str, Any], metric: str, baseline: str) -> Bar:
    value = row.get(metric)
    if value is None:
        return Bar(0.0, "none")
    ratio = row["best_effort_over_baseline"]
    words = f"{value:.0f}" if ratio is None or row["system"] == baseline else times(ratio)
    return Bar(value, system_colour(row["system"]), f"{value:.1%}" if metric == ATTAINMENT else words)


def group_label(row: FlatRecord) -> str:
    stream = row["best_effort"].removesuffix("-backlog")
    slower = row["slower"] - 1
    error = f"\n{abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than believed" if slower else ""
    return f"{stream}\n{row['num_gpu_blocks']} GPU blocks{error}"


# -- words ------------------------------------------------------------------------------------------------------------


def panel_words(record: FlatRecord) -> str:
    """Machine and best-effort stream of a row."""
    stream = record["best_effort"] or "no best effort"
    return f"{record['setting_title']}, {stream.removesuffix('-backlog')}"


def figure_text(shows: str, records: Records, subtitle: str = "") -> FigureText:
    first = records[0]
    one_target = len({row["tpot_slo_s"] for row in records}) <= 2
    targets = dict.fromkeys(
        f"{row['setting_title']}: {row['ttft_slo_s']:g} s to the first token"
        + (f" and {row['tpot_slo_s']:g} s per token" if one_target else "")
        for row in records
    )
    pools = dict.fromkeys(
        f"{row['setting_title']}: {row['num_gpu_blocks']} GPU blocks of 16 tokens, {row['cpu_kv_gb']:g} GB of KV cache "
        "in each CPU host"
        for row in records
    )
    durations = span_text([f"{value:g}" for value in sorted(distinct(records, "window_s"))])
    notes = [
        f"Latency-sensitive requests: {trace_title(first)}, {first['trace_origin']} lengths. {trace_note(records)} "
        "Best-effort lengths are synthetic shapes with the stated means, or Dolphin-r1's.",
        f"{durations} virtual seconds a point, seed {first['seed']}; tokens are "
        "counted within them, from the start, while CPU memory still fills. A refused request misses its targets.",
        "; ".join(pools) + ".",
        *(note for system, note in SYSTEM_NOTES.items() if system in distinct(records, "system")),
        *known_notes(records),
    ]
    lines = [*([subtitle] if subtitle else []), "Targets: " + "; ".join(targets)]
    return FigureText(f"{shows} \u2014 SIMULATED", "\n".join(lines), "\n".join(notes))


def trace_title(record: FlatRecord) -> str:
    return record["workload_title"].split(" beside ")[0]
