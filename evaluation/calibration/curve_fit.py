"""Fits a curve of few points to many, and a sum of terms. Both minimise relative errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apex.perf.model import Curve


def compact_curve(sizes: Sequence[float], seconds: Sequence[float], num_points: int) -> Curve:
    """The curve through ``num_points`` of the measured points that minimises the sum of relative errors at all points.

    Dynamic programming chooses the points, so a jump in the data keeps a point on either side. The first and the last
    point always stay. Values are made ascending first, as in every curve.
    """
    x, measured = np.asarray(sizes, float), np.asarray(seconds, float)
    y = np.asarray(Curve(tuple(x), tuple(measured)).seconds)
    count = len(x)
    if num_points >= count:
        return Curve(tuple(x), tuple(y))
    # cost[i, j]: relative errors at the points from i to before j if a straight line joins points i and j.
    cost = np.full((count, count), np.inf)
    for i in range(count - 1):
        slopes = (y[i + 1 :] - y[i]) / (x[i + 1 :] - x[i])
        lines = y[i] + slopes[:, None] * (x[None, i:] - x[i])
        sums = np.cumsum(np.abs(lines / measured[None, i:] - 1), axis=1)
        cost[i, i + 1 :] = sums[np.arange(count - 1 - i), np.arange(count - 1 - i)]
    best, came_from = cost[0].copy(), []
    for _ in range(num_points - 2):
        through = best[:, None] + cost
        came_from.append(through.argmin(axis=0))
        best = through.min(axis=0)
    kept = [count - 1]
    for step in reversed(came_from):
        kept.append(int(step[kept[-1]]))
    kept = [0, *reversed(kept)]
    return Curve(tuple(x[kept]), tuple(y[kept]))


def fit_terms(terms: Sequence[Sequence[float]], seconds: Sequence[float], rounds: int = 80) -> np.ndarray:
    """Coefficients of the terms whose sum has the least mean absolute relative error (reweighted least squares)."""
    columns, target = np.stack([np.asarray(term, float) for term in terms], axis=1), np.asarray(seconds, float)
    weights = 1 / target
    for _ in range(rounds):
        coefficients = np.linalg.lstsq(columns * weights[:, None], target * weights, rcond=None)[0]
        errors = np.abs(columns @ coefficients / target - 1)
        weights = 1 / target / np.sqrt(np.maximum(errors, 1e-3))
    return coefficients
