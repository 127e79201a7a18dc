"""Draws NEO's figures 6 to 10a from summary records. The distribution of latencies also reads per-request records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from apex.replay.metrics import per_token_latency_s
from apex.replay.records import RequestRecord, RequestSummary
from evaluation.plots.apex_paper import latency_panel, ratio_panel
from evaluation.plots.lines import Level, LinePanel, Series, line_figure
from evaluation.plots.notes import (
    Records,
    figure_text,
    half_notes,
    half_word,
    halves_of,
    lettered_title,
    measured_subtitle,
    own_system_notes,
    panel_name,
    panels_of,
    trace_note,
)
from evaluation.plots.style import FAINT, FigureText, system_colour
from evaluation.results.folder import read_records, records_file
from evaluation.results.frame import grouped
from evaluation.results.kinds import card_of, distinct, is_simulated

PERCENTS = (1, 2, 5, *range(10, 91, 5), 93, 95, 97, 98, 99)
# Light to dark in the order of the hosts, as each has more cores than the last; hues that are easy to distinguish.
HOST_COLOURS = ("#9FB827", "#21A083", "#31688E", "#440154")


def draw_neo(what: str, records: Records, folder: Path, machine: Mapping[str, Any] | None = None) -> Figure:
    """All panels of a figure, simulated ones first; ``what`` is its title, ``machine`` the one that measured."""
    halves = halves_of(records)
    panels = [panel for rows in panels_of(records) for panel in draw_panels(rows, records, folder)]
    texts = [half_text(what, half, machine or {}) for half in halves]
    kinds = " and ".join("SIMULATED" if is_simulated(half[0]) else f"MEASURED on {card_of(half)}" for half in halves)
    notes = dict.fromkeys(line for text in texts for line in text.notes.splitlines())
    subtitle = "\n".join(text.subtitle for text in texts)
    return line_figure(panels, FigureText(f"{what} \u2014 {kinds}", subtitle, "\n".join(notes)))


def half_text(what: str, records: Records, machine: Mapping[str, Any]) -> FigureText:
    """Subtitle and notes of one half."""
    if not is_simulated(records[0]):
        return FigureText("", measured_subtitle(records, machine), "\n".join(half_notes(records)))
    by_host = len(distinct(records, "setting")) > len(distinct(records, "panel"))
    text = host_words(records) if by_host else figure_text(what, records, {})
    at_once = any(record["request_rate"] is None for record in records)
    predicted = f"Predicted as: {', '.join(distinct(records, 'gpu'))}." + (
        " Throughput is that of the whole run, all requests there from the start." if at_once else ""
    )
    return replace(text, notes=f"{text.notes}\n{predicted}")


def host_words(records: Records) -> FigureText:
    """Subtitle and notes of a figure whose rows differ in the host only."""
    first = records[0]
    notes = []
    offloading = (r for r in records if r["cpu_bandwidth_gb_s"] is not None)
    for system, here in grouped(offloading, "system").items():
        hosts = {
            host_name(row): f"{row['cpu_bandwidth_gb_s']:.0f} GB/s, {row['cpu_kv_gb']:g} GB" for row in here
        }.items()
        notes.append(
            f"CPU attention of {system} (assumed, {', '.join(distinct(here, 'cpu_kernel'))} kernel) and KV cache by "
            f"host: {'; '.join(f'{host} {pool}' for host, pool in hosts)}."
        )
    notes.append(
        f"GPU attention {first['gpu_attention_gb_s']:.0f} GB/s. {first['workload_title']}: {first['num_requests']} "
        f"requests, {first['trace_origin']} trace. {trace_note(records)}"
    )
    return FigureText(
        "",
        f"{machine_name(first)} ({first['dtype']}): {first['num_gpu_blocks']} GPU blocks of 16 tokens",
        "\n".join([*notes, *own_system_notes(records)]),
    )


def host_name(record: Mapping[str, Any]) -> str:
    return record["host"].split(" (")[0]


def machine_name(record: Mapping[str, Any]) -> str:
    """GPU and model, without the host."""
    return record["setting_title"].split(" (")[0]


def draw_panels(rows: Records, records: Records, folder: Path) -> list[LinePanel]:
    """A panel of the paper, of one kind of rows; ``records`` are those of the whole figure.

    What is drawn depends on the variable that its rows sweep; hosts have a panel for each system.
    """
    rates = {row["request_rate"] for row in rows}
    if rates == {None}:
        if len(distinct(rows, "setting")) > 1:
            return by_host_panels(rows, records)
        panel = ratio_panel(rows, records)
        return [replace(panel, y_from=axis_start(panel.series))]
    if len(rates) == 1:
        return [distribution_panel(rows, records, folder)]
    level = rows[0].get("at_latency_s")
    levels = () if level is None else (Level(level, f"where the paper compares: {level:g} s", FAINT),)
    return [replace(latency_panel(rows, records), levels=levels)]


def by_host_panels(rows: Records, records: Records) -> list[LinePanel]:
    """A panel for each system but the baseline, with a line per host; ratios are to the baseline on the same host.

    All have the same y axis.
    """
    first, baseline = rows[0], rows[0]["baseline"]
    hosts = [(here, ratio_panel(here, records)) for here in grouped(rows, "setting").values()]
    ones = tuple((length, 1.0) for length in distinct(rows, "output_len"))
    panels = []
    for system in distinct(rows, "system"):
        if system == baseline:
            continue
        lines = [Series(baseline, system_colour(baseline), ones)]
        for place, (here, panel) in enumerate(hosts):
            shade = HOST_COLOURS[place % len(HOST_COLOURS)]
            drawn = (line for line in panel.series if line.label == system)
            lines += [replace(line, label=host_name(here[0]), colour=shade) for line in drawn]
        title = f"{machine_name(first)}, {first['workload_title']}, {system} by host"
        panels.append(replace(hosts[0][1], title=lettered_title(title, first["panel"], records), series=lines))
    y_from = min(axis_start(panel.series) for panel in panels)
    y_to = max(ratio for panel in panels for line in panel.series for _, ratio in line.points)
    return [replace(panel, y_from=y_from, y_to=y_to) for panel in panels]


def axis_start(lines: Sequence[Series]) -> float:
    """The start of an axis of ratios: 0.9 if all ratios are near 1, else 0."""
    ratios = [ratio for line in lines for _, ratio in [*line.points, *line.predicted]]
    return 0.9 if min(ratios) > 0.92 and max(ratios) < 2 else 0.0


def distribution_panel(rows: Records, records: Records, folder: Path) -> LinePanel:
    """The percentage of requests within each latency; a system's line ends at its 99th percentile."""
    first, lines = rows[0], []
    for row in rows:
        latencies = per_token_latencies_s(records_file(folder, row["point"]))
        points = tuple(zip(np.percentile(latencies, PERCENTS).tolist(), PERCENTS, strict=True))
        lines.append(Series(row["system"], system_colour(row["system"]), points))
    which = ", first seed" if first.get("repeats", 1) > 1 else ""
    title = f"{panel_name(rows)}, {first['request_rate']:g} requests/s{which}"
    return LinePanel(
        lettered_title(title, first["panel"], records),
        f"per-token latency (s), {half_word(rows)}",
        "percent of requests (up to 99)",
        lines,
    )


def per_token_latencies_s(path: Path) -> list[float]:
    """Per-token latency (seconds) of every completed request of a point, from its records.

    Measured points keep full records, simulated ones summaries.
    """
    done = [r for r in read_records(path) if r["failure"] is None]
    return [per_token_latency_s((RequestRecord if "token_times_s" in r else RequestSummary)(**r)) for r in done]
