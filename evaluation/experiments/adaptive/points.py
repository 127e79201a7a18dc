"""The points that compare `adaptive` with the papers' schedulers, from grids of the experiment file (adaptive.yaml).

Cases; a map of CPU bandwidth by output length; cases under load; cases whose profile table is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apex.simulator.paper_settings import load_setting
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.grid import FIELDS, SUBJECT, Grid, Place, concerns, simulate, simulated_point, trace_of
from evaluation.results.folder import FlatRecord
from evaluation.run import Point

ERROR = ("actual_over_believed", "online_correction")
"""Fields of a row that name the error of its profile table; None for a system that has no table."""
ROW = ("case", "kernel", "without", "hand_over_us")
"""Fields that every row has."""


def case_points(grid: Grid) -> list[Point]:
    """Each case with each system, all requests at once."""
    return [_point((place["case"],), place, bound_tokens_per_s=_bound(place)) for place in grid.places(concerns)]


def map_points(grid: Grid) -> list[Point]:
    """Every cell with every system, GPU-only systems once for each output length."""
    points = []
    for place in grid.places(concerns):
        place = {**place, "case": f"out{place['output_len']}"}
        names, bound = (place["case"],), None
        if place["host_read_gb_s"] is not None:
            names, bound = (place["kernel"], f"{place['host_read_gb_s']:g}gbps", *names), _bound(place)
        points.append(_point(names, place, ["host_read_gb_s"], bound_tokens_per_s=bound))
    return points


def capacity_points(grid: Grid) -> list[Point]:
    """The system of which loads are fractions, with all requests at once."""
    return [_point((place["case"],), place) for place in grid.places(concerns)]


def requests_per_s(rows: Sequence[FlatRecord]) -> dict[str, float]:
    """Requests per second that the system of each row serves, by case."""
    return {row["case"]: row["output_tokens_per_s"] / row["output_len_mean"] for row in rows}


def latency_points(grid: Grid, capacities: Mapping[str, float]) -> list[Point]:
    """Each case at each ``load`` with each system: Poisson arrivals.

    ``capacities`` are the requests per second at a load of 1, by case.
    """
    points = []
    for place in grid.places(concerns):
        rate = place["load"] * capacities[place["case"]]
        names = (place["case"], f"load{place['load']:.0%}")
        points.append(_point(names, {**place, "request_rate": rate}, ("load", "loaded_as")))
    return points


def wrong_table_points(grid: Grid) -> list[Point]:
    """Each case with each system and each error of its profile table, GPU-only systems once."""
    points = []
    for place in grid.places(concerns):
        ratio, corrects = (place[field] for field in ERROR)
        error = () if ratio is None else (f"x{ratio:g}", "corrected" if corrects else "uncorrected")
        points.append(_point((place["case"], *error), place, ERROR, bound_tokens_per_s=_bound(place)))
    return points


def title_of(place: Place) -> str:
    """Machine and workload in words, for figures."""
    gpu, _, model_and_host = load_setting(place["setting"]).title.partition(" + ")
    _, bracket, host = model_and_host.partition(" (")
    speed, output_len = place.get("cpu_bandwidth_gb_s"), place.get("output_len")
    cpu = f", CPU {speed:g} GB/s" if speed else ""
    workload = trace_of(place).title if place.get("workload") else f"{place['input_len']} in"
    return f"{gpu}{bracket}{host}{cpu}: {workload}" + (f", {output_len:g} out" if output_len else "")


def _point(names: Sequence[str], place: Place, row: Iterable[str] = (), **values: Any) -> Point:
    return simulated_point(names, simulate(place, (*ROW, *row), case_title=title_of(place), **values))


def _bound(place: Place) -> float:
    """The bound of any schedule with the CPU attention of the ``SUBJECT``; tables that are wrong do not change it."""
    of_machine = {field: value for field, value in place.items() if field in FIELDS and field not in ERROR}
    return _bound_of(frozenset({**of_machine, "system": SUBJECT}.items()))


@functools.cache
def _bound_of(place: frozenset[tuple[str, Any]]) -> float:
    return bound_tokens_per_s(simulate(dict(place)))
