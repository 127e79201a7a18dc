"""Chooses how many requests the points of a figure have, so that all of them fit the hours there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

FEWEST_REQUESTS = 16
"""Fewer requests than this say little about throughput."""
PILOT_REQUESTS = (16, 64)
"""Requests of the largest panel in two pilot simulations, from which the time of more requests is extrapolated."""
CORRECTIONS = 10
CLOSE = 0.05
"""Numbers of requests that differ by this share or less are not told apart: each try is a simulation."""
FARTHEST = 8
"""Times as many requests as fit are tried at most: farther lines mislead where time grows faster than requests."""


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
    largest = max(most)

    def seconds_at(requests: int) -> float:
        return seconds_of(counts_at(requests / largest, most))

    low, guess = (min(largest, pilot) for pilot in PILOT_REQUESTS)  # numbers of requests of the largest panel
    low_s = seconds_at(low)
    if low_s > limit_s:
        raise TooLittleTime(
            f"{limit_s / 3600:.2g} hours are too few: {FEWEST_REQUESTS} requests per point take "
            f"{math.ceil(low_s / 36) / 100:.2f} hours; give more --hours, or fewer --workloads or --systems"
        )
    # ``low`` requests fit and ``high`` do not. The guess lies on the line through both, or while all that were tried
    # fit, on the line through the last two.
    high, high_s = largest + 1, math.inf  # all fit, as far as is known
    for _ in range(CORRECTIONS):
        guess = min(high - 1, FARTHEST * low, guess)
        if guess - low <= CLOSE * low:
            break
        guess_s = seconds_at(guess)
        before, before_s = low, low_s
        if guess_s > limit_s:
            high, high_s = guess, guess_s
        else:
            low, low_s = guess, guess_s
        if high <= largest:
            guess = low + int((high - low) * (limit_s - low_s) / (high_s - low_s))
        elif low_s > before_s:
            guess = low + int((low - before) * (limit_s - low_s) / (low_s - before_s))
        else:
            guess = largest
    return counts_at(low / largest, most)
