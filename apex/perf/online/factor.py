"""A running factor: how much longer an operation takes than the profile table predicts."""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

WINDOW = 32
"""Observations that count. Their median follows a lasting change within half as many."""
LEAST_OBSERVATIONS = 8
"""Before that the factor is 1: the first iterations compile kernels and fill caches."""
MOST = 3.0
"""Factors lie between 1/MOST and MOST. Beyond that the table belongs to another machine."""
DEAD_BAND = 0.05
"""A median this close to 1 means that the table is right: the factor is then exactly 1."""
STEP = 0.03
"""The factor changes when the median differs from it by more than this share. Each change rebuilds the model."""
LEAST_S = 1e-4
"""Predictions below this many seconds are not compared: the clock and the interpreter decide those times."""


class SecondsRange(NamedTuple):
    """Seconds known to lie between two bounds."""

    least: float
    most: float


def nearest_ratio(measured: SecondsRange, predicted: SecondsRange, expected: float = 1.0) -> float:
    """Measured over predicted seconds: of the ratios that the bounds allow, the nearest to the one expected.

    ``predicted.most`` must be positive.
    """
    ratio = max(expected, measured.least / predicted.most)
    return min(ratio, measured.most / predicted.least) if predicted.least > 0.0 else ratio


class RunningFactor:
    """The median ratio of the last observations, bounded.

    Attributes:
        value: the factor, between ``1 / MOST`` and ``MOST``.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def observe(self, measured: SecondsRange, predicted: SecondsRange, expected: float = 1.0) -> None:
        """Take in the seconds of one operation; predictions that are too short are ignored.

        ``expected`` is the ratio that is assumed as far as the bounds allow.
        """
        if predicted.most < LEAST_S:
            return
        self._ratios.append(min(max(nearest_ratio(measured, predicted, expected), 1.0 / MOST), MOST))
        if len(self._ratios) < LEAST_OBSERVATIONS:
            return
        median = statistics.median(self._ratios)
        if abs(median - 1.0) <= DEAD_BAND:
            median = 1.0
        if abs(median / self.value - 1.0) > STEP:
            self.value = median
