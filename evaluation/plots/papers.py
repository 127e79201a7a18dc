"""Draws and prints the papers' figures from summary records: APEX's 5 to 7, NEO's 6 to 10a, and their sensitivity."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from apex.replay.metrics import per_token_latency_s
from apex.replay.records import RequestRecord, RequestSummary
from evaluation.plots.charts import (
    COLUMNS,
    BarPanel,
    Half,
    Level,
    LinePanel,
    Series,
    line_figure,
    rate_bars,
    throughput_figure,
)
from evaluation.plots.notes import (
    Records,
    figure_text,
    half_notes,
    half_word,
    halves_of,
    lettered_title,
    measured_subtitle,
    neo_notes,
    own_system_notes,
    panel_name,
    panels_of,
    swept_words,
    trace_note,
)
from evaluation.plots.style import FAINT, INK, FigureText, system_colour
from evaluation.results.claims import Claim, place_of
from evaluation.results.folder import PREDICTED, FlatRecord, read_records, records_file, span_of
from evaluation.results.rows import card_of, comparisons, distinct, grouped, is_simulated, label_of
from evaluation.results.tables import Columns, rows_table
from evaluation.studies.papers import Assumption, varied_in

# -- APEX's figures ---------------------------------------------------------------------------------------------------

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


# -- NEO's figures; the distribution of latencies also reads per-request records --------------------------------------

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


# -- ratios over an assumption, beside the papers' claims -------------------------------------------------------------

Values = Mapping[float | None, float]
"""A system's values by the assumption's; None where it does not depend on that."""


def draw_sensitivity(
    records: Records, claims: Sequence[Claim], metric: str, what: str, machine: Mapping[str, Any]
) -> Figure:
    """Ratios in ``metric`` over the varied assumption, one panel per point of the figure, with the papers' claims.

    Solid lines are ratios to the baseline; dashed lines are ratios that a paper claims to another system."""
    assumption = varied_in(records)
    panels = [panel_of(here, claims, metric, what, assumption) for here in grouped(records, place_of).values()]
    text = figure_text(f"{what.capitalize()} against {assumption.words}", records, machine)
    return line_figure(panels, text)


def panel_of(here: Records, claims: Sequence[Claim], metric: str, what: str, assumption: Assumption) -> LinePanel:
    first, baseline = here[0], here[0]["baseline"]
    values = {
        system: {row[assumption.field]: row[metric] for row in rows if row[metric]}
        for system, rows in grouped(here, "system").items()
    }
    about = claims_about(claims, metric, first)
    to_baseline = [(system, baseline) for system in values if system != baseline]
    to_others = [("apex", "neo"), *(claim.systems for claim in about if claim.systems[1] != baseline)]
    return LinePanel(
        f"{panel_name(here)}, {swept_words(first)}",
        assumption.axis,
        f"{what} relative to {baseline}, SIMULATED",
        [Series(pair[0], system_colour(pair[0]), ratios_of(values, pair)) for pair in to_baseline]
        + [
            Series(" / ".join(pair), pair_colour(pair), ratios_of(values, pair), dashed=True)
            for pair in dict.fromkeys(to_others)
        ],
        [Level(claim.ratio, f"claimed: {claim_words(claim)}", pair_colour(claim.systems)) for claim in about],
        log_x=True,
    )


def ratios_of(values: Mapping[str, Values], pair: tuple[str, ...]) -> list[tuple[float, float]]:
    """(assumption's value, ratio) of two systems."""
    ours, base = (values.get(system, {}) for system in pair)
    bases = {x: base.get(x, base.get(None)) for x in ours if x is not None}
    return [(x, ours[x] / at) for x, at in bases.items() if at]


def pair_colour(systems: tuple[str, ...]) -> str:
    return INK if systems[1] == "neo" else system_colour(systems[0])


def claims_about(claims: Sequence[Claim], metric: str, record: FlatRecord) -> list[Claim]:
    """The claims about a point that state a ratio. Claims about any workload count only if there is no other."""
    about = [claim for claim in claims if claim.ratio and claim.metric == metric and claim.covers(record)]
    return [claim for claim in about if claim.workload is not None] or about


def claim_words(claim: Claim) -> str:
    return f"{'/'.join(claim.systems)} {'up to ' if claim.up_to else ''}{claim.ratio:g}"


# -- tables -----------------------------------------------------------------------------------------------------------

# The ratio is computed here.
RESULTS: Columns = (
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
    columns = list(RESULTS)
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
