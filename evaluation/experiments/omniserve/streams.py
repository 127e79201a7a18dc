"""The two streams of requests: latency-sensitive ones at a rate, best-effort ones behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apex.workloads.catalogue import load_trace
from apex.workloads.requests import Lengths, WorkloadSpec, make_lengths, merge_lengths

SPARE = 1.25
"""Arrivals that are drawn, over those expected: enough to fill the duration."""
OTHER_STREAM = 1000
"""Added to the seed for the best-effort stream."""
RATES = 3
"""Distinguishes the draws of rates from the others of a seed."""


def latency_sensitive(
    workload: str, request_rate: float, duration_s: float, seed: int, trace_dir: Path | None, scale: float = 1.0
) -> Lengths:
    """Poisson arrivals at ``request_rate`` per second over the duration. ``scale`` is a factor for all lengths."""
    spec = replace(poisson_spec(workload, request_rate, duration_s, seed), scale=scale)
    return cut(make_lengths(spec, load_trace(workload, trace_dir)), duration_s)


def bursty(
    workload: str,
    lowest: float,
    highest: float,
    interval_s: float,
    duration_s: float,
    seed: int,
    trace_dir: Path | None,
) -> Lengths:
    """Poisson arrivals at a rate that is drawn anew every ``interval_s`` (OmniServe, Figure 14).

    Rates are uniform between the lowest and the highest. Arrivals of rate 1 are mapped onto the sum of the rates.
    """
    rng = np.random.default_rng([seed, RATES])
    rates = rng.uniform(lowest, highest, math.ceil(duration_s / interval_s))
    expected = np.concatenate([[0.0], np.cumsum(rates) * interval_s])
    edges = np.arange(len(expected)) * interval_s
    spec = poisson_spec(workload, 1.0, float(expected[-1]), seed)
    steady = make_lengths(spec, load_trace(workload, trace_dir))
    rows = tuple(
        replace(row, arrival_s=float(np.interp(row.arrival_s, expected, edges)))
        for row in steady.rows
        if row.arrival_s < expected[-1]
    )
    mean_rate = round(float(expected[-1]) / float(edges[-1]), 6)
    changed = replace(steady, spec=replace(spec, request_rate=mean_rate), rows=rows)
    return cut(changed, duration_s)


def best_effort(settings: Mapping[str, Any], duration_s: float, seed: int, trace_dir: Path | None) -> Lengths:
    """The stream of a section: a Poisson stream of ``request_rate``, or a backlog that is there at once.

    The backlog is of ``backlog`` requests and ``backlog_per_s`` for each second of the run, lengths times ``scale``.
    ``output_len``: their mean output in tokens, before scaling; by default that of the workload.
    """
    workload, seed = settings["workload"], seed + OTHER_STREAM
    if "request_rate" in settings:
        return latency_sensitive(workload, settings["request_rate"], duration_s, seed, trace_dir)
    count = settings["backlog"] + math.ceil(settings.get("backlog_per_s", 0.0) * duration_s)
    spec = WorkloadSpec(workload, count, settings.get("scale", 1.0), settings.get("output_len"), seed=seed)
    return make_lengths(spec, load_trace(workload, trace_dir))


def with_best_effort(
    urgent: Lengths, settings: Mapping[str, Any] | None, duration_s: float, seed: int, trace_dir: Path | None
) -> Lengths:
    """The requests beside the best-effort stream of a section; alone for None."""
    if settings is None:
        return urgent
    return merge_lengths(urgent, best_effort(settings, duration_s, seed, trace_dir))


def poisson_spec(workload: str, rate: float, duration_s: float, seed: int) -> WorkloadSpec:
    count = math.ceil(SPARE * rate * duration_s) + 20
    return WorkloadSpec(workload, count, arrivals="poisson", request_rate=rate, seed=seed)


def cut(lengths: Lengths, duration_s: float) -> Lengths:
    """The requests that arrive within the duration."""
    rows = tuple(row for row in lengths.rows if row.arrival_s < duration_s)
    return replace(lengths, spec=replace(lengths.spec, num_requests=len(rows)), rows=rows)
