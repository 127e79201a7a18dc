"""Running factors: what they conclude from bounds, how soon they follow, and what they ignore."""

from __future__ import annotations

import math
import random

import pytest

from apex.perf.online_correction import (
    DEAD_BAND,
    LEAST_OBSERVATIONS,
    LEAST_S,
    MOST,
    WINDOW,
    RunningFactor,
    SecondsRange,
    nearest_ratio,
)


def observe(factor: RunningFactor, seconds: float, times: int = 1) -> float:
    for _ in range(times):
        factor.observe(SecondsRange(seconds, seconds), SecondsRange(1.0, 1.0))
    return factor.value


@pytest.mark.parametrize(
    ("measured", "predicted", "ratio"),
    [
        (SecondsRange(2, 2), SecondsRange(1, 1), 2.0),
        (SecondsRange(2, 9), SecondsRange(1, 1.6), 1.25),  # at least 2 where at most 1.6 were predicted
        (SecondsRange(1, 2), SecondsRange(4, 9), 0.5),  # at most 2 where at least 4 were predicted
        (SecondsRange(1, 3), SecondsRange(2, 9), 1.0),  # the prediction may be right
        (SecondsRange(2, 9), SecondsRange(1, 2), 1.0),
        (SecondsRange(1, 1), SecondsRange(0, 4), 1.0),
        (SecondsRange(1, 1), SecondsRange(0, 0.5), 2.0),
        (SecondsRange(0, 0), SecondsRange(1, 2), 0.0),
    ],
)
def test_a_ratio_is_as_far_from_1_as_the_bounds_prove(
    measured: SecondsRange, predicted: SecondsRange, ratio: float
) -> None:
    assert nearest_ratio(measured, predicted) == ratio


def test_within_the_bounds_a_ratio_is_the_one_expected() -> None:
    measured, predicted = SecondsRange(3, 4), SecondsRange(2, 6)  # between 0.5 and 2
    assert [nearest_ratio(measured, predicted, expected) for expected in (0.3, 0.5, 1.7, 5)] == [0.5, 0.5, 1.7, 2]


def test_it_is_1_until_there_are_enough_observations_and_then_their_median() -> None:
    factor = RunningFactor()
    assert observe(factor, 1.5, LEAST_OBSERVATIONS - 1) == 1.0
    assert observe(factor, 1.5) == 1.5


def test_outliers_do_not_move_it() -> None:
    factor = RunningFactor()
    for i in range(5 * WINDOW):
        observe(factor, 100.0 if i % 10 < 3 else 1.25)
        assert factor.value in (1.0, 1.25)
    assert factor.value == 1.25


def test_it_is_exactly_1_near_1() -> None:
    factor = RunningFactor()
    for seconds in (1 + 0.9 * DEAD_BAND, 1 - 0.9 * DEAD_BAND):
        assert observe(factor, seconds, WINDOW) == 1.0
    assert observe(factor, 1 + 1.1 * DEAD_BAND, WINDOW) == pytest.approx(1 + 1.1 * DEAD_BAND)
    assert observe(factor, 1 + 0.9 * DEAD_BAND, WINDOW) == 1.0


def test_noise_changes_it_rarely() -> None:
    rng, factor, values = random.Random(0), RunningFactor(), set()
    for _ in range(1000):
        values.add(observe(factor, rng.gauss(1.5, 0.02)))
    assert len(values) <= 3


@pytest.mark.parametrize("change", [0.5, 0.8, 1.2, 2.0])
def test_it_follows_a_change_within_half_a_window(change: float) -> None:
    factor = RunningFactor()
    observe(factor, 1.5, 3 * WINDOW)
    assert observe(factor, 1.5 * change, WINDOW // 2 - 1) == 1.5
    assert observe(factor, 1.5 * change, 2) == pytest.approx(1.5 * change)


def test_short_predictions_are_ignored() -> None:
    factor = RunningFactor()
    for _ in range(WINDOW):
        factor.observe(SecondsRange(1.0, 1.0), SecondsRange(0.5 * LEAST_S, 0.9 * LEAST_S))
    assert factor.value == 1.0


def test_whatever_is_measured_it_stays_within_its_bounds() -> None:
    for seed in range(200):
        rng, factor = random.Random(seed), RunningFactor()
        choices = (0.0, 1e-300, 1e-9, LEAST_S, 1.0, 1e9, 1e300, math.inf)
        for _ in range(3 * WINDOW):
            measured, predicted = (SecondsRange(*sorted(rng.choices(choices, k=2))) for _ in range(2))
            factor.observe(measured, predicted)
            assert 1 / MOST <= factor.value <= MOST
