"""From a place of a grid to a simulated point: its setting, its requests, its task.

A place has ``setting`` (a name of papers.yaml), ``system``, requests (``REQUESTS``), and any of the axes. Its requests
are those of a trace (``workload``) or have lengths around ``input_len`` and ``output_len``. They are all there at once,
or are Poisson arrivals of ``request_rate``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from apex.cli.output import stdout_console
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.workloads.catalogue import Trace, UniformTrace, load_trace, synthetic_name
from apex.workloads.requests import Lengths, WorkloadSpec, make_lengths
from evaluation.experiments.axes import CONCERNS, SETTING, TASK
from evaluation.experiments.grid import Panel, Place
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedTask

REQUESTS = ("workload", "input_len", "output_len", "num_requests", "request_rate", "seed", "scale", "trace_dir")
FIELDS = frozenset({"setting", "system", *REQUESTS, *SETTING, *TASK})
"""Fields of a place that decide its task."""


def concerns(field: str, place: Place) -> bool:
    """Whether the place's system depends on a field of an axis."""
    return field not in CONCERNS or CONCERNS[field](load_setting(place["setting"]), place["system"])


def setting_of(place: Place) -> PaperSetting:
    """The place's setting, as its system sees it. Axes that concern a system need one."""
    setting = load_setting(place["setting"])
    for field, apply in SETTING.items():
        if place.get(field) is not None:
            setting = apply(setting, place.get("system"), place[field])
    return setting


def workload_of(panel: Panel) -> str:
    """The name of the workload, also where it is synthetic."""
    return panel.get("workload") or synthetic_name(panel["input_len"])


def trace_of(place: Place) -> Trace:
    if place.get("workload") is not None:
        return load_trace(place["workload"], place.get("trace_dir"))
    return UniformTrace(place["input_len"], place["output_len"])


def lengths_of(place: Place) -> Lengths:
    """The place's requests. Systems of a place share them."""
    rate = place.get("request_rate")
    spec = WorkloadSpec(
        workload_of(place),
        place["num_requests"],
        place.get("scale", 1.0),
        place.get("output_len"),
        "at-once" if rate is None else "poisson",
        request_rate=rate,
        seed=place.get("seed", 0),
    )
    return _lengths(spec, place.get("workload"), place.get("input_len"), place.get("trace_dir"))


@functools.lru_cache(64)
def _lengths(spec: WorkloadSpec, workload: str | None, input_len: int | None, trace_dir: Path | None) -> Lengths:
    fields = {"workload": workload, "input_len": input_len, "output_len": spec.output_len, "trace_dir": trace_dir}
    return make_lengths(spec, trace_of(fields))


def simulate(place: Place, fields: Iterable[str] = (), lengths: Lengths | None = None, **values: Any) -> SimulatedTask:
    """The task of a place.

    Args:
        fields: those of the place that are also fields of the point's row.
        lengths: requests other than those that the place says.
        values: further fields of the row.
    """
    values = {field: place.get(field) for field in fields} | values
    task = simulated_task(setting_of(place), place["system"], lengths or lengths_of(place), values)
    for field, apply in TASK.items():
        if place.get(field) is not None:
            task = apply(task, place[field])
    return task


def simulated_point(names: Sequence[str], task: SimulatedTask, cost: float | None = None) -> Point:
    """The point of a task. ``names`` and the system's make up its key and its label."""
    names = (*names, task.system)
    key = "-".join(names)
    total = float(task.lengths.total_output_tokens)
    return Point(key, key, ", ".join(names), task, concurrent=True, cost=total if cost is None else cost)


def possible_points(
    places: Iterable[Place], make: Callable[[Place], Point], words: Callable[[Place], str]
) -> list[Point]:
    """The points of places; prints for those of which ``make`` raises ValueError, named in words, why."""
    points, refused = [], {}
    for place in places:
        try:
            points.append(make(place))
        except ValueError as error:
            refused[f"not possible: {words(place)}: {error}"] = None
    for reason in refused:
        stdout_console().print(reason, soft_wrap=True)
    return points
