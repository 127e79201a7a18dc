"""The points of the figures: a machine, a stream of latency-sensitive requests, a best-effort stream, a system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apex.workloads.requests import Lengths
from evaluation.experiments.grid import Grid, Place
from evaluation.experiments.omniserve.streams import bursty, latency_sensitive, with_best_effort
from evaluation.experiments.places import FIELDS, simulate, simulated_point
from evaluation.experiments.runner import Point
from swiftllm.systems import find_system

WITHOUT_CLASSES = ("neo", "apex", "adaptive", "swiftllm", "vllm", "fastdecode")
"""Systems that know one class of requests."""
USUAL = {
    "best_effort": None,
    "request_rate": None,
    "rate_interval_s": None,
    "tpot_slo_s": None,
    "cpu_hosts": 1,
    "admission_control": True,
    "slower": 1.0,
}
"""Fields of a panel that does not have them, in the order in which they vary.

``best_effort`` is the name of the best-effort stream; None for latency-sensitive requests alone. The rate of arrivals
changes after each ``rate_interval_s`` seconds, between ``lowest_rate`` and ``highest_rate``; None for a steady rate.
"""
ROW = ("panel", "baseline", *USUAL, "ttft_slo_s", "one_class")
KNOWN = FIELDS | {"panel", "baseline", "best_effort", "rate_interval_s", "lowest_rate", "highest_rate"}
NOTES = ("shows", "x", "metrics", "differs")
"""Entries of a section that say how its figure is drawn."""


def read_grid(settings: Mapping[str, Any], section: str, variant: str | None) -> Grid:
    """The grid of a section of the experiment file, each panel with the targets of its setting."""
    grid = Grid.read(settings["figures"][section], KNOWN, variant, NOTES)
    targets = settings["targets"]
    return Grid(tuple({**USUAL, **targets[panel["setting"]], **panel} for panel in grid.panels))


def omniserve_points(settings: Mapping[str, Any], grid: Grid) -> list[Point]:
    """The points of a grid of :func:`read_grid` that also has ``seed`` and ``trace_dir``."""
    points, lengths = [], {}
    for place in grid.places():
        place = {**place, "one_class": place["system"] in WITHOUT_CLASSES}
        parts = parts_of(place)
        if parts not in lengths:  # the systems of a place share its requests
            lengths[parts] = lengths_at(place, settings)
        cost = place["duration_s"] * (2.0 if find_system(place["system"]).needs_predictions else 1.0)
        task = simulate(place, ROW, lengths[parts])
        points.append(simulated_point(parts, task, cost))
    return points


def parts_of(place: Place) -> tuple[str, ...]:
    """What distinguishes the place, for keys."""
    rate, interval_s = place["request_rate"], place["rate_interval_s"]
    blocks, slower = place.get("num_gpu_blocks"), place["slower"]
    return (
        place["panel"],
        place["setting"],
        place["best_effort"] or "alone",
        f"rate{rate:g}" if interval_s is None else f"every{interval_s:g}s",
        f"tpot{place['tpot_slo_s']:g}",
        f"hosts{place['cpu_hosts']}",
        *([f"blocks{blocks}"] if blocks else []),
        *([f"slower{slower:g}"] if slower != 1.0 else []),
        *([] if place["admission_control"] else ["admit-all"]),
    )


def lengths_at(place: Place, settings: Mapping[str, Any]) -> Lengths:
    """The requests of both streams."""
    workload, interval_s = settings["latency_sensitive"], place["rate_interval_s"]
    of_run = (place["duration_s"], place["seed"], place["trace_dir"])
    if interval_s is None:
        urgent = latency_sensitive(workload, place["request_rate"], *of_run)
    else:
        urgent = bursty(workload, place["lowest_rate"], place["highest_rate"], interval_s, *of_run)
    name = place["best_effort"]
    return with_best_effort(urgent, None if name is None else settings["best_effort"][name], *of_run)
