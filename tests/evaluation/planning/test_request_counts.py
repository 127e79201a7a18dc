"""Requests per point: as many as fit the time, and the same share of each panel."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation.planning.plan import FEWEST_REQUESTS, TooLittleTime, counts_at, counts_within

PANELS = st.lists(st.integers(FEWEST_REQUESTS, 2000), min_size=1, max_size=5)


class Times:
    """Seconds of a plan: a constant, and for each request ``per_request`` seconds to a power of the number."""

    def __init__(self, constant: float, per_request: float, power: float) -> None:
        self.constant, self.per_request, self.power = constant, per_request, power
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, counts: tuple[int, ...]) -> float:
        self.asked.append(tuple(counts))
        return self.constant + self.per_request * sum(count**self.power for count in counts)


def largest_common(most: list[int], fits) -> int:
    """The largest number of requests of the largest panel that fits, by trying all."""
    return max(n for n in range(FEWEST_REQUESTS, max(most) + 1) if fits(counts_at(n / max(most), most)))


@settings(max_examples=60)
@given(
    PANELS,
    st.floats(0.0, 3000.0),
    st.floats(0.01, 50.0),
    st.sampled_from((1.0, 1.3, 1.7, 2.0)),
    st.floats(0.0, 1.2),
)
def test_the_time_is_used_and_never_exceeded(most, constant, per_request, power, share):
    times = Times(constant, per_request, power)
    fewest, full = times(counts_at(0.0, most)), times(tuple(most))
    limit_s = fewest + share * (full - fewest)
    times.asked.clear()
    counts = counts_within(most, limit_s, times)
    assert times(counts) <= limit_s
    assert counts in times.asked[:-1], "a choice whose time was not predicted"
    num_predicted = len(set(times.asked))
    best = largest_common(most, lambda counts: times(counts) <= limit_s)
    assert counts[most.index(max(most))] >= 0.85 * best - 1
    # One share for all panels, but for the fewest requests and for all there are.
    chosen = counts[most.index(max(most))] / max(most)
    for count, full in zip(counts, most, strict=True):
        assert count in (FEWEST_REQUESTS, full) or count == pytest.approx(chosen * full, abs=1.0 + full / max(most))
    assert num_predicted <= 12, "each prediction is a simulation"


@settings(max_examples=30)
@given(PANELS, st.floats(1.0, 1e5), st.floats(0.0, 0.99))
def test_less_time_than_the_fewest_requests_take_is_refused(most, constant, share):
    times = Times(constant, 1.0, 1.0)
    needed_s = times(counts_at(0.0, most))
    with pytest.raises(TooLittleTime, match=r"16 requests per point take [\d.]+ hours; give more") as refusal:
        counts_within(most, share * needed_s, times)
    named = float(re.search(r"take ([\d.]+) hours", str(refusal.value))[1])
    assert needed_s <= named * 3600.0 + 1e-6 and named * 3600.0 <= needed_s + 36.1


def test_all_requests_are_taken_where_there_is_time():
    assert counts_within([800, 1000], 1e6, Times(100.0, 0.5, 1.0)) == (800, 1000)
    assert counts_within([800, 1000], 1e6, Times(100.0, 0.0, 1.0)) == (800, 1000)  # time that requests do not change
    assert counts_within([8], 1e6, Times(0.0, 1.0, 1.0)) == (8,)  # fewer than the fewest: all of them
