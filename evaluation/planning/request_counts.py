"""Chooses how many requests the points of a figure have, so that all of them fit the hours there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FEWEST_REQUESTS = 16
"""Fewer requests than this say little about throughput."""
PILOT_REQUESTS = (16, 64)
"""Requests of the largest panel in two pilot simulations, from which the time of more requests is extrapolated."""
CORRECTIONS = 4


class TooLittleTime(ValueError):
    """Even the fewest requests do not fit the time."""


def counts_at(fraction: float, most: Sequence[int]) -> tuple[int, ...]:
    """Requests of each panel at a fraction of its full number: at least ``FEWEST_REQUESTS``, at most all of them."""
    return tuple(min(full, max(FEWEST_REQUESTS, round(fraction * full))) for full in most)


def counts_within(
    most: Sequence[int], limit_s: float, seconds_of: Callable[[tuple[int, ...]], float]
) -> tuple[int, ...]:
    """The largest common fraction of the panels' requests whose points take at most ``limit_s`` in all.

    ``most`` are the panels' full numbers of requests; ``seconds_of`` predicts the total time of some numbers.

    Raises:
        TooLittleTime: the fewest requests take longer; the message names the hours that they need.
    """
    low, high = (min(1.0, pilot / max(most)) for pilot in PILOT_REQUESTS)
    low_s = seconds_of(counts_at(low, most))
    if low_s > limit_s:
        raise TooLittleTime(
            f"{limit_s / 3600:.2g} hours are too few: {FEWEST_REQUESTS} requests per point take {low_s / 3600:.2f} "
            "hours; give more --hours, or fewer --workloads or --systems"
        )
    high_s = seconds_of(counts_at(high, most))
    fraction = high
    at_s = high_s
    for _ in range(CORRECTIONS):
        if at_s > low_s:
            fraction = low + (fraction - low) * (limit_s - low_s) / (at_s - low_s)
        elif at_s <= limit_s:
            fraction = 1.0
        fraction = min(1.0, max(low, fraction))
        at_s = seconds_of(counts_at(fraction, most))
        if at_s <= limit_s and (fraction == 1.0 or at_s > 0.9 * limit_s):
            break
    while at_s > limit_s and counts_at(fraction, most) != counts_at(low, most):
        fraction = max(low, low + 0.95 * (fraction - low))
        at_s = seconds_of(counts_at(fraction, most))
    return counts_at(fraction, most)
