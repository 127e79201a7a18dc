"""Draws the APEX paper's figures 5, 6 and 7 from summary records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from evaluation.plots.bars import BarPanel, Half, rate_bars, throughput_figure
from evaluation.plots.lines import COLUMNS, LinePanel, Series, line_figure
from evaluation.plots.notes import (
    Records,
    figure_text,
    half_word,
    halves_of,
    lettered_title,
    panel_name,
    panels_of,
)
from evaluation.plots.style import system_colour
from evaluation.results.claims import place_of
from evaluation.results.folder import PREDICTED, FlatRecord, span_of
from evaluation.results.frame import grouped
from evaluation.results.kinds import card_of, distinct, is_simulated

RATE = "output_tokens_per_s"


def draw_fig5(records: Records, machine: Mapping[str, Any]) -> Figure:
    """Throughput as bars: a part for each reading of the paper's machines, and one for what was measured here.

    A panel that only another part has keeps its place, empty.
    """
    halves, letters, systems = [], sorted(distinct(records, "panel")), distinct(records, "system")
    for half in halves_of(records):
        simulated, baseline, here = is_simulated(half[0]), half[0]["baseline"], distinct(half, "system")
        where = "simulated" if simulated else f"measured on {card_of(half)}"
        y_label = "predicted output tokens/s (SIMULATED)" if simulated else "measured output tokens/s"
        panels = [
            bar_panel([row for row in half if row["panel"] == letter], here, records, y_label)
            if letter in distinct(half, "panel")
            else BarPanel(f"({letter}) not {where}", "", ())
            for letter in letters
        ]
        what = f"Output throughput, all requests at once; bars are marked with their ratio to {baseline}"
        text = figure_text(what, half, machine, in_title=False)
        if absent := [system for system in systems if system not in here]:
            text = replace(text, notes=f"{text.notes}\nNot {where.split()[0]}: {', '.join(absent)}.")
        halves.append(Half(panels, here, text))
    return throughput_figure(halves)


def bar_panel(rows: Records, systems: Sequence[str], records: Records, y_label: str) -> BarPanel:
    """The groups of bars of one panel, in the order of its rows; ``records`` are those of the whole figure."""
    first = rows[0]
    by_length, names = first["panel"] == "a", distinct(rows, "workload_title")
    titles = " and ".join(names) if by_length or len(names) == 1 else f"{len(names)} workloads"
    title = ", ".join((*distinct(rows, "setting_title"), titles))

    def label(row: FlatRecord) -> str:
        if by_length:
            return f"{row['output_len']:.0f}"
        return f"{row['workload_title']}\n{row['input_len']:.0f} / {row['output_len_mean']:.0f}"

    return BarPanel(
        lettered_title(title, first["panel"], records) + (", varied output length" if by_length else ""),
        "average output tokens per request" if by_length else "workload, average input / output tokens",
        [(label(here[0]), rate_bars(here, systems, first["baseline"])) for here in grouped(rows, place_of).values()],
        y_label,
    )


def draw_fig6(records: Records, machine: Mapping[str, Any]) -> Figure:
    """Mean per-token latency over the request rate, one panel per setting."""
    panels = [latency_panel(rows, records) for rows in panels_of(records)]
    columns = len(distinct(records, "panel")) if len(halves_of(records)) > 1 else COLUMNS  # a row for each half
    return line_figure(panels, figure_text("Mean per-token latency under load", records, machine), columns)


def draw_fig7(records: Records, machine: Mapping[str, Any]) -> Figure:
    """Throughput relative to the baseline over the average output length."""
    panels = [ratio_panel(rows, records) for rows in panels_of(records)]
    return line_figure(panels, figure_text("Throughput over the output length", records, machine))


def latency_panel(rows: Records, records: Records) -> LinePanel:
    """Latency of one panel; ``records`` are those of the whole figure."""
    return LinePanel(
        lettered_title(panel_name(rows), rows[0]["panel"], records),
        "request rate (requests/s, Poisson arrivals)",
        f"mean per-token latency (s), {half_word(rows)}",
        system_lines(rows, "request_rate", "per_token_latency_s_mean"),
        log_y=True,
    )


def ratio_panel(rows: Records, records: Records) -> LinePanel:
    """Throughput of one panel over the baseline's; ``records`` are those of the whole figure."""
    baseline = rows[0]["baseline"]
    return LinePanel(
        lettered_title(panel_name(rows), rows[0]["panel"], records),
        "average output tokens per request",
        f"throughput relative to {baseline}, {half_word(rows)}",
        system_lines(rows, "output_len", RATE, baseline),
    )


def system_lines(records: Records, x: str, metric: str, baseline: str | None = None) -> list[Series]:
    """A line per system in ``metric``, or in its ratio to the baseline's. Throughput also has its prediction."""

    def with_units(rows: Records, field: str) -> Iterator[tuple[FlatRecord, float]]:
        """The rows that have a value, with the baseline's at the same x."""
        units = {row[x]: row.get(field) for row in records if row["system"] == baseline}
        for row in rows:
            unit = 1.0 if baseline is None else units.get(row[x])
            if row.get(field) and unit:
                yield row, unit

    lines = []
    for system, rows in grouped(records, "system").items():
        drawn = list(with_units(rows, metric))
        points = tuple((row[x], row[metric] / unit) for row, unit in drawn)
        repeated = [(row, unit) for row, unit in drawn if row.get("repeats", 1) > 1]
        spans = tuple((row[x], *(end / unit for end in span_of(row, metric))) for row, unit in repeated)
        predicted = [(row[x], row[PREDICTED] / unit) for row, unit in with_units(rows, PREDICTED) if metric == RATE]
        lines.append(Series(system, system_colour(system), points, spans=spans, predicted=predicted))
    return lines
