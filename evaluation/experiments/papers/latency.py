"""The request rate at which a curve of latencies reaches a level, as NEO's figures compare them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import kind_of

LATENCY = "per_token_latency_s_mean"


def with_rates_at_latency(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with ``request_rate_at_latency``: the request rate at which a curve reaches ``at_latency_s``.

    The first row of a curve has the value, interpolated between the two rates around the first crossing. It is None
    in the other rows, and where the curve does not cross.
    """
    read = (row for row in rows if row.get("at_latency_s") is not None)
    rates = {
        curve[0]["point"]: crossing([(r["request_rate"], r[LATENCY]) for r in curve], curve[0]["at_latency_s"])
        for curve in grouped(read, "setting", "system", kind_of).values()
    }
    return [{**row, "request_rate_at_latency": rates.get(row["point"])} for row in rows]


def crossing(curve: Sequence[tuple[float, float]], level: float) -> float | None:
    """The x at which a curve of (x, y) first rises through ``level``, interpolated linearly; None if it never does."""
    for (left, below), (right, above) in itertools.pairwise(sorted(curve)):
        if below <= level < above:
            return left + (right - left) * (level - below) / (above - below)
    return None
