"""The points of NEO's figures, and values computed from all their rows.

A figure is a section of ``configs/experiments/neo.yaml``. A panel's swept variable decides what it shows. Several
request rates give a load-latency curve. One request rate gives the distribution of latencies. Output lengths give the
throughput relative to the baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apex.simulator.hardware import load_host
from apex.simulator.paper_settings import PaperSetting
from evaluation.experiments.runner import Point
from evaluation.experiments.sensitivity import Variation
from evaluation.experiments.simulated_sweeps import (
    Panel,
    Sweep,
    make_sensitivity_points,
    make_simulated_points,
    make_sweep,
)
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import kind_of

LATENCY = "per_token_latency_s_mean"


def make_neo_points(
    settings: Mapping[str, Any],
    variation: Variation | None = None,
    **options: Any,
) -> list[Point]:
    """The simulated points of one figure.

    Args:
        settings: a section of the experiment file, see :func:`neo_sweep`.
        variation: an assumption and its values. Only the points of ``sensitivity_at`` run then, once for each value.
        options: those of ``make_sweep``.
    """
    sweep = neo_sweep(settings, **options)
    if variation is None:
        return with_latencies(settings, make_simulated_points(sweep))
    varied = replace(sweep, panels=tuple(panel for panel in sweep.panels if panel.sensitivity_at))
    return with_latencies(settings, make_sensitivity_points(varied, variation))


def neo_sweep(settings: Mapping[str, Any], **options: Any) -> Sweep:
    """The sweep of a section of the experiment file, read as :func:`make_sweep` does.

    A panel may also list ``hosts``, and becomes a panel for each of them. Another entry of a panel is the latency
    ``at_latency_s`` (seconds) at which its curves are compared.
    """
    shared = [{key: raw[key] for key in raw if key not in ("hosts", "at_latency_s")} for raw in settings["panels"]]
    hosts = {raw["panel"]: raw.get("hosts", ()) for raw in settings["panels"]}
    sweep = make_sweep({**settings, "panels": shared}, **options)
    panels = [moved for panel in sweep.panels for moved in on_hosts(panel, hosts[panel.panel])]
    return replace(sweep, panels=tuple(panels))


def with_latencies(settings: Mapping[str, Any], points: Sequence[Point]) -> list[Point]:
    """The points with the latency at which their panel's curves are compared in their rows."""
    latency_s = {raw["panel"]: raw.get("at_latency_s") for raw in settings["panels"]}
    return [with_values(point, {"at_latency_s": latency_s[point.task.values["panel"]]}) for point in points]


def with_values(point: Point, values: Mapping[str, Any]) -> Point:
    """The point with ``values`` and its key in its row; the key names the file of its records."""
    row = {**point.task.values, **values, "point": point.key}
    return replace(point, task=replace(point.task, values=row))


def on_hosts(panel: Panel, hosts: Sequence[str]) -> list[Panel]:
    """The panel once for each host; without hosts, unchanged."""
    return [replace(panel, setting=on_host(panel.setting, host)) for host in hosts] or [panel]


def on_host(setting: PaperSetting, host: str) -> PaperSetting:
    """A setting on another host. CPU KV cache scales with the number of cores (NEO section 5.5)."""
    there, here = load_host(host), load_host(setting.host)
    title = f"{setting.title.split(' (')[0]} ({there.name.split(' (')[0]})"
    name = f"{setting.name.split('-')[0]}-{host}"
    moved = replace(setting, name=name, host=host, title=title)
    cpu_kv_gb = setting["cpu_kv_gb"] * there["cores"] / here["cores"]
    return moved.with_figures("NEO section 5.5: in proportion to the cores", cpu_kv_gb=cpu_kv_gb)


def with_rates_at_latency(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with ``request_rate_at_latency``: the request rate at which a curve reaches ``at_latency_s``.

    The first row of a curve has the value, interpolated between the two rates around the first crossing. It is None
    in the other rows, and where the curve does not cross.
    """
    curves: dict[tuple[str, str, str], list[FlatRecord]] = {}
    for row in rows:
        if row.get("at_latency_s") is not None:
            curves.setdefault((row["setting"], row["system"], kind_of(row)), []).append(row)
    rates = {
        curve[0]["point"]: crossing([(r["request_rate"], r[LATENCY]) for r in curve], curve[0]["at_latency_s"])
        for curve in curves.values()
    }
    return [{**row, "request_rate_at_latency": rates.get(row["point"])} for row in rows]


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The x at which a curve of (x, y) first rises through ``level``, interpolated linearly; None if it never does."""
    for (left, below), (right, above) in itertools.pairwise(sorted(curve)):
        if below <= level < above:
            return left + (right - left) * (level - below) / (above - below)
    return None
