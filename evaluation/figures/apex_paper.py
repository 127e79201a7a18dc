"""Draws the APEX paper's figures 5, 6 and 7 from summary records, and how they depend on an assumption."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib import pyplot as plt

from evaluation.experiments.papers.sensitivity import varied_in
from evaluation.figures.bars import BarPanel, Group, Half, throughput_figure
from evaluation.figures.lines import Level, LinePanel, Series, line_figure
from evaluation.figures.style import INK, system_colour
from evaluation.figures.words import (
    figure_text,
    half_word,
    halves_of,
    lettered_title,
    panel_name,
    unique_values,
)
from evaluation.results.claims import Claim, place_of
from evaluation.results.folder import PREDICTED, FlatRecord, span_of
from evaluation.results.kinds import card_of, distinct, is_simulated

Records = Sequence[FlatRecord]


def draw_fig5(records: Records, machine: Mapping[str, Any]) -> plt.Figure:
    """Throughput as bars. Simulated and measured halves stand side by side where both exist.

    A panel that only the other half has keeps its place, empty.
    """
    halves = []
    letters = sorted(unique_values(records, "panel"))
    for half in halves_of(records):
        simulated = is_simulated(half[0])
        panels = []
        for panel in letters:
            here = [record for record in half if record["panel"] == panel]
            if not here:
                where = "simulated" if simulated else f"measured on {card_of(half)}"
                panels.append(BarPanel(f"({panel}) not {where}", "", ()))
                continue
            names = unique_values(here, "workload_title")
            titles = " and ".join(names) if panel == "a" or len(names) == 1 else f"{len(names)} workloads"
            where = ", ".join((*distinct(here, "setting_title"), ""))
            title = lettered_title(f"{where}{titles}", panel, records)
            title += ", varied output length" if panel == "a" else ""
            x_label = "average output tokens per request" if panel == "a" else "workload, average input / output tokens"
            panels.append(BarPanel(title, x_label, tuple(bar_groups(here))))
        how = "predicted output tokens/s (SIMULATED)" if simulated else "measured output tokens/s"
        baseline = half[0]["baseline"]
        what = f"Output throughput, all requests at once; bars are marked with their ratio to {baseline}"
        text = figure_text(what, half, machine, in_title=False)
        if absent := [
            system for system in unique_values(records, "system") if system not in unique_values(half, "system")
        ]:
            where = "simulated" if simulated else "measured"
            text = replace(text, notes=f"{text.notes}\nNot {where}: {', '.join(absent)}.")
        halves.append(Half(tuple(panels), unique_values(half, "system"), baseline, how, text))
    return throughput_figure(halves)


def draw_fig6(records: Records, machine: Mapping[str, Any]) -> plt.Figure:
    """Mean per-token latency over the request rate, one panel per setting."""
    metric = "per_token_latency_s_mean"
    panels = []
    for half in halves_of(records):
        for letter in dict.fromkeys(record["panel"] for record in half):
            here = [record for record in half if record["panel"] == letter]
            y_label = f"mean per-token latency (s), {half_word(half)}"
            lines = tuple(system_lines(here, "request_rate", metric))
            title = lettered_title(panel_name(here), letter, records)
            panels.append(LinePanel(title, "request rate (requests/s, Poisson arrivals)", y_label, lines, log_y=True))
    text = figure_text("Mean per-token latency under load", records, machine)
    return line_figure(panels, text)


def draw_fig7(records: Records, machine: Mapping[str, Any]) -> plt.Figure:
    """Throughput relative to the baseline over the average output length."""
    panels = []
    for half in halves_of(records):
        baseline = half[0]["baseline"]
        y_label = f"throughput relative to {baseline}, {half_word(half)}"
        for letter in dict.fromkeys(record["panel"] for record in half):
            here = [record for record in half if record["panel"] == letter]
            lines = tuple(system_lines(here, "output_len", "output_tokens_per_s", baseline))
            title = lettered_title(panel_name(here), letter, records)
            panels.append(LinePanel(title, "average output tokens per request", y_label, lines))
    text = figure_text("Throughput over the output length", records, machine)
    return line_figure(panels, text)


def draw_sensitivity(
    records: Records, claims: Sequence[Claim], metric: str, what: str, machine: Mapping[str, Any]
) -> plt.Figure:
    """Ratios in ``metric`` over the varied assumption, one panel per point of the figure, with the papers' claims.

    Solid lines are ratios to the baseline; dashed lines are ratios that a paper claims to another system."""
    assumption, baseline = varied_in(records), records[0]["baseline"]
    panels = []
    for place in dict.fromkeys(place_of(record) for record in records):
        here = [record for record in records if place_of(record) == place]
        first = here[0]
        values = {
            system: {r[assumption.field]: r[metric] for r in here if r["system"] == system and r[metric]}
            for system in unique_values(here, "system")
        }
        lines = [
            Series(system, system_colour(system), ratios_by_value(values[system], values.get(baseline, {})))
            for system in values
            if system != baseline
        ]
        claimed = [claim.systems for claim in claims_about(claims, metric, first) if claim.systems[1] != baseline]
        for pair in dict.fromkeys([("apex", "neo"), *claimed]):
            points = ratios_by_value(values.get(pair[0], {}), values.get(pair[1], {}))
            lines.append(Series(" / ".join(pair), pair_colour(pair), points, dashed=True))
        levels = tuple(claim_levels(claims, metric, first))
        swept = f", {first['output_len']:.0f} output tokens" if first["request_rate"] is None else (
            f", {first['request_rate']:g} requests/s"
        )  # fmt: skip
        title = f"{first['setting_title']}, {first['workload_title']}{swept}"
        y_label = f"{what} relative to {baseline}, SIMULATED"
        panels.append(LinePanel(title, assumption.axis, y_label, tuple(lines), levels, log_x=True))
    text = figure_text(f"{what.capitalize()} against {assumption.words}", records, machine)
    return line_figure(panels, text)


def ratios_by_value(
    values: Mapping[float | None, float], base: Mapping[float | None, float]
) -> tuple[tuple[float, float], ...]:
    """(x, ratio) of two systems' values. x is the assumption's value; None marks a system independent of it."""
    bases = {x: base.get(x, base.get(None)) for x in values if x is not None}
    return tuple((x, values[x] / at) for x, at in bases.items() if at)


def pair_colour(systems: tuple[str, str]) -> str:
    return INK if systems[1] == "neo" else system_colour(systems[0])


def claims_about(claims: Sequence[Claim], metric: str, record: FlatRecord) -> list[Claim]:
    """The claims about a point that state a ratio. Claims about any workload count only if there is no other."""
    about = [claim for claim in claims if claim.ratio and claim.metric == metric and claim.covers(record)]
    return [claim for claim in about if claim.workload is not None] or about


def claim_levels(claims: Sequence[Claim], metric: str, record: FlatRecord) -> Iterable[Level]:
    """The claims about a point as horizontal lines."""
    for claim in claims_about(claims, metric, record):
        at_best = "up to " if claim.up_to else ""
        label = f"claimed: {'/'.join(claim.systems)} {at_best}{claim.ratio:g}"
        yield Level(claim.ratio, label, pair_colour(claim.systems))


# -- records ----------------------------------------------------------------------------------------------------------


def bar_groups(records: Records) -> list[Group]:
    """The bars of one panel, in the order of the records."""
    by_place: dict[tuple[Any, ...], list[FlatRecord]] = {}
    for record in records:
        by_place.setdefault(place_of(record), []).append(record)
    return [Group(group_label(here[0]), tuple(here)) for here in by_place.values()]


def group_label(record: FlatRecord) -> str:
    if record["panel"] == "a":
        return f"{record['output_len']:.0f}"
    return f"{record['workload_title']}\n{record['input_len']:.0f} / {record['output_len_mean']:.0f}"


def system_lines(records: Records, x: str, metric: str, baseline: str | None = None) -> list[Series]:
    """A line per system in ``metric``, or in its ratio to the baseline's. Throughput also has its prediction."""
    base = {r[x]: r[metric] for r in records if r["system"] == baseline}
    predicted: dict[str, tuple[tuple[float, float], ...]] = {}
    if metric == "output_tokens_per_s" and any(r.get(PREDICTED) for r in records):
        rows = [{**r, metric: r.get(PREDICTED), PREDICTED: None, "repeats": 1} for r in records]
        predicted = {line.label: line.points for line in system_lines(rows, x, metric, baseline)}
    lines = []
    for system in unique_values(records, "system"):
        here = [r for r in records if r["system"] == system and r[metric]]
        if baseline is not None:
            here = [r for r in here if base.get(r[x])]
        unit = {r[x]: 1.0 if baseline is None else base[r[x]] for r in here}
        points = tuple((r[x], r[metric] / unit[r[x]]) for r in here)
        spans = tuple(
            (r[x], *(end / unit[r[x]] for end in span_of(r, metric))) for r in here if r.get("repeats", 1) > 1
        )
        lines.append(Series(system, system_colour(system), points, spans=spans, predicted=predicted.get(system, ())))
    return lines
