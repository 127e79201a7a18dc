"""Draws NEO's figures 6 to 10a from summary records. The distribution of latencies also reads per-request records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from apex.replay.metrics import per_token_latency_s
from apex.replay.records import RequestRecord, RequestSummary
from evaluation.figures.apex_paper import system_lines
from evaluation.figures.lines import Level, LinePanel, Series, line_figure
from evaluation.figures.style import FAINT, FigureText, system_colour
from evaluation.figures.words import (
    figure_text,
    half_notes,
    half_word,
    halves_of,
    lettered_title,
    measured_subtitle,
    own_system_notes,
    panel_name,
    trace_note,
    unique_values,
)
from evaluation.results.folder import FlatRecord, read_records, records_file
from evaluation.results.kinds import card_of, is_simulated

Records = Sequence[FlatRecord]

PERCENTS = (1, 2, 5, *range(10, 91, 5), 93, 95, 97, 98, 99)
# Light to dark in the order of the hosts, as each has more cores than the last; hues that are easy to distinguish.
HOST_COLOURS = ("#9FB827", "#21A083", "#31688E", "#440154")


def draw_neo(what: str, records: Records, folder: Path, machine: Mapping[str, Any] | None = None) -> plt.Figure:
    """All panels of a figure, simulated ones first; ``what`` is its title, ``machine`` the one that measured."""
    halves = halves_of(records)
    panels, subtitles, notes = [], [], []
    for half in halves:
        letters = unique_values(half, "panel")
        for letter in letters:
            for panel in draw_panels([r for r in half if r["panel"] == letter], folder):
                panels.append(replace(panel, title=lettered_title(panel.title, letter, records)))
        text = half_text(what, half, machine or {})
        subtitles.append(text.subtitle)
        notes += text.notes.splitlines()
    kinds = " and ".join("SIMULATED" if is_simulated(half[0]) else f"MEASURED on {card_of(half)}" for half in halves)
    return line_figure(
        panels, FigureText(f"{what} \u2014 {kinds}", "\n".join(subtitles), "\n".join(dict.fromkeys(notes)))
    )


def half_text(what: str, records: Records, machine: Mapping[str, Any]) -> FigureText:
    """Subtitle and notes of one half."""
    if not is_simulated(records[0]):
        return FigureText("", measured_subtitle(records, machine), "\n".join(half_notes(records)))
    by_host = len(unique_values(records, "setting")) > len(unique_values(records, "panel"))
    text = host_words(records) if by_host else figure_text(what, records, {})
    at_once = any(record["request_rate"] is None for record in records)
    predicted = f"Predicted as: {', '.join(unique_values(records, 'gpu'))}." + (
        " Throughput is that of the whole run, all requests there from the start." if at_once else ""
    )
    return replace(text, notes=f"{text.notes}\n{predicted}")


def host_words(records: Records) -> FigureText:
    """Subtitle and notes of a figure whose rows differ in the host only."""
    first = records[0]
    notes = []
    for system in unique_values(records, "system"):
        here = [r for r in records if r["system"] == system and r["cpu_bandwidth_gb_s"] is not None]
        hosts = {r["host"]: f"{r['cpu_bandwidth_gb_s']:.0f} GB/s, {r['cpu_kv_gb']:g} GB" for r in here}
        if hosts:
            kernels = ", ".join(unique_values(here, "cpu_kernel"))
            text = "; ".join(f"{host.split(' (')[0]} {pool}" for host, pool in hosts.items())
            notes.append(f"CPU attention of {system} (assumed, {kernels} kernel) and KV cache by host: {text}.")
    notes.append(
        f"GPU attention {first['gpu_attention_gb_s']:.0f} GB/s. {first['workload_title']}: {first['num_requests']} "
        f"requests, {first['trace_origin']} trace. {trace_note(records)}"
    )
    machine = first["setting_title"].split(" (")[0]
    return FigureText(
        "",
        f"{machine} ({first['dtype']}): {first['num_gpu_blocks']} GPU blocks of 16 tokens",
        "\n".join([*notes, *own_system_notes(records)]),
    )


def draw_panels(records: Records, folder: Path) -> list[LinePanel]:
    """A panel of the paper. Its kind depends on the variable that its rows sweep; hosts have one for each system."""
    rates = unique_values(records, "request_rate")
    if rates == (None,):
        by_host = len(unique_values(records, "setting")) > 1
        return by_host_panels(records) if by_host else [throughput_panel(records)]
    return [latency_panel(records) if len(rates) > 1 else distribution_panel(records, folder)]


def latency_panel(records: Records) -> LinePanel:
    level = records[0].get("at_latency_s")
    return LinePanel(
        panel_name(records),
        "request rate (requests/s, Poisson arrivals)",
        f"mean per-token latency (s), {half_word(records)}",
        tuple(system_lines(records, "request_rate", "per_token_latency_s_mean")),
        () if level is None else (Level(level, f"where the paper compares: {level:g} s", FAINT),),
        log_y=True,
    )


def throughput_panel(records: Records) -> LinePanel:
    """A line per system over the output length; ratios are to the baseline."""
    baseline = records[0]["baseline"]
    lines = system_lines(records, "output_len", "output_tokens_per_s", baseline)
    return LinePanel(
        panel_name(records),
        "average output tokens per request",
        f"throughput relative to {baseline}, {half_word(records)}",
        tuple(lines),
        y_from=axis_start(lines),
    )


def by_host_panels(records: Records) -> list[LinePanel]:
    """A panel for each system but the baseline, with a line per host; ratios are to the baseline on the same host.

    All have the same y axis.
    """
    baseline = records[0]["baseline"]
    panels = [
        by_host_panel([record for record in records if record["system"] in (baseline, system)], system)
        for system in unique_values(records, "system")
        if system != baseline
    ]
    y_from = min(panel.y_from for panel in panels)
    y_to = max(ratio for panel in panels for line in panel.series for _, ratio in line.points)
    return [replace(panel, y_from=y_from, y_to=y_to) for panel in panels]


def by_host_panel(records: Records, system: str) -> LinePanel:
    baseline = records[0]["baseline"]
    ones = tuple((length, 1.0) for length in unique_values(records, "output_len"))
    lines = [Series(baseline, system_colour(baseline), ones)]
    for place, setting in enumerate(unique_values(records, "setting")):
        here = [record for record in records if record["setting"] == setting]
        host = here[0]["host"].split(" (")[0]
        shade = HOST_COLOURS[place % len(HOST_COLOURS)]
        ratios = system_lines(here, "output_len", "output_tokens_per_s", baseline)
        lines += [replace(line, label=host, colour=shade) for line in ratios if line.label == system]
    machine = records[0]["setting_title"].split(" (")[0]
    return LinePanel(
        f"{machine}, {records[0]['workload_title']}, {system} by host",
        "average output tokens per request",
        f"throughput relative to {baseline}, {half_word(records)}",
        tuple(lines),
        y_from=axis_start(lines),
    )


def axis_start(lines: Sequence[Series]) -> float:
    """The start of an axis of ratios: 0.9 if all ratios are near 1, else 0."""
    ratios = [ratio for line in lines for _, ratio in line.points + line.predicted]
    return 0.9 if min(ratios) > 0.92 and max(ratios) < 2 else 0.0


def distribution_panel(records: Records, folder: Path) -> LinePanel:
    """The percentage of requests within each latency; a system's line ends at its 99th percentile."""
    lines = []
    for record in records:
        latencies = per_token_latencies_s(records_file(folder, record["point"]))
        points = zip(np.percentile(latencies, PERCENTS).tolist(), PERCENTS, strict=True)
        lines.append(Series(record["system"], system_colour(record["system"]), tuple(points)))
    which = ", first seed" if records[0].get("repeats", 1) > 1 else ""
    return LinePanel(
        f"{panel_name(records)}, {records[0]['request_rate']:g} requests/s{which}",
        f"per-token latency (s), {half_word(records)}",
        "percent of requests (up to 99)",
        tuple(lines),
    )


def per_token_latencies_s(path: Path) -> list[float]:
    """Per-token latency (seconds) of every completed request of a point, from its records.

    Measured points keep full records, simulated ones summaries.
    """
    done = [r for r in read_records(path) if r["failure"] is None]
    return [per_token_latency_s((RequestRecord if "token_times_s" in r else RequestSummary)(**r)) for r in done]
