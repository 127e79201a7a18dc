"""Draws how ratios of a figure depend on an assumption that was varied, beside the papers' claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from evaluation.experiments.papers.sensitivity import Assumption, varied_in
from evaluation.plots.lines import Level, LinePanel, Series, line_figure
from evaluation.plots.notes import Records, figure_text, panel_name, swept_words
from evaluation.plots.style import INK, system_colour
from evaluation.results.claims import Claim, place_of
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped

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
