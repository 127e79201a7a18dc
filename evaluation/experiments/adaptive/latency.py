"""Latency of the cases under load: Poisson arrivals at fractions of what a published system serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.experiments.adaptive.cases import (
    Selection,
    case_point,
    case_task,
    chosen_cases,
    chosen_systems,
    seed_of,
)
from evaluation.experiments.runner import Derive, Point
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns

PLACE = ("case", "load")
"""Fields of a row that name its point of load."""
RATIOS = {
    "per_token_latency_s_mean": "latency_over",
    "ttft_s_p99": "ttft_p99_over",
    "tpot_s_p99": "tpot_p99_over",
}
"""Metrics of which a row has ratios to other systems, and how the names of these begin."""


def make_capacity_points(settings: Mapping[str, Any], selection: Selection) -> list[Point]:
    """The system of which loads are fractions, with all requests at once.

    Raises:
        ValueError: a case is unknown.
    """
    section, seed = settings["latency"], seed_of(settings, selection)
    return [
        case_point(
            (case.case,),
            case_task(
                case,
                case.paper_setting(selection.kernel),
                section["loaded_as"],
                case.lengths(seed, selection.trace_dir),
                selection,
            ),
        )
        for case in chosen_cases(settings, selection, section["cases"])
    ]


def requests_per_s(rows: Sequence[FlatRecord]) -> dict[str, float]:
    """Requests per second that the system of each row serves, by case."""
    return {row["case"]: row["output_tokens_per_s"] / row["output_len_mean"] for row in rows}


def make_latency_points(
    settings: Mapping[str, Any], selection: Selection, capacities: Mapping[str, float]
) -> list[Point]:
    """Each case at each load with each system of the section ``latency``.

    ``capacities`` are the requests per second at a load of 1, by case.

    Raises:
        ValueError: a name is unknown.
    """
    section, seed = settings["latency"], seed_of(settings, selection)
    points = []
    for case in chosen_cases(settings, selection, section["cases"]):
        setting = case.paper_setting(selection.kernel)
        for load in section["loads"]:
            lengths = case.lengths(seed, selection.trace_dir, load * capacities[case.case])
            for system in chosen_systems(section, selection):
                values = {"load": load, "loaded_as": section["loaded_as"]}
                task = case_task(case, setting, system, lengths, selection, values)
                points.append(case_point((case.case, f"load{load:.0%}"), task))
    return points


def with_latency_ratios(published: Sequence[str]) -> Derive:
    """Adds to each row its latencies over those of each ``published`` system at the same load, named as in ``RATIOS``
    with the system's name; None where that did not run."""

    def complete(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
        frame, ratios = frame_of(rows), {}
        for system in published:
            base = bases(frame, frame["system"] == system, PLACE)
            ratios |= {f"{name}_{system}": over(frame[metric], base) for metric, name in RATIOS.items()}
        return with_columns(rows, **ratios)

    return complete
