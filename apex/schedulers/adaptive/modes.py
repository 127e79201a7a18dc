"""Which mode yields most tokens per second at a load, and at the loads that more CPU decodes would make."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from apex.schedulers.adaptive.rates import SteadyLoad, feed_rate, lockstep_rate, only_rate
from apex.schedulers.adaptive.times import OperationTimes


class Mode(enum.Enum):
    """How the CPU decodes go along."""

    ONLY = "only"  # they don't: the lane alone
    LOCKSTEP = "lockstep"  # two batches, which the lane waits for
    FEED = "feed"  # free-running cohorts, which the lane does not wait for


@dataclass(frozen=True)
class ModeRates:
    """The best mode at one load, and what it yields there and beyond."""

    mode: Mode
    tokens_per_s: float
    prompt_tokens: float
    """Prompt tokens of an iteration in the steady state."""
    riders: float
    """CPU decodes beside the lane's own in a boundary of the lane."""
    num_cohorts: int
    steps_per_layer_s: float
    """Seconds that the lane spends on steps of cohorts between two of its layers."""
    reachable_tokens_per_s: float
    """The best rate of any mode with any of the larger numbers of CPU decodes that were asked about."""


def best_mode(
    times: OperationTimes,
    load: SteadyLoad,
    cpu_decodes: int,
    larger: Sequence[float],
    modes: Sequence[Mode],
    *,
    max_cohorts: int,
) -> ModeRates:
    """Compare ``modes`` at ``cpu_decodes``, and find the best rate with any of the ``larger`` numbers of them."""
    numbers = np.array([cpu_decodes, *larger], float)
    functions = {Mode.ONLY: only_rate, Mode.LOCKSTEP: lockstep_rate, Mode.FEED: partial(feed_rate, max_cohorts)}
    rates = {mode: functions[mode](times, load, numbers) for mode in modes}
    mode = max(rates, key=lambda mode: rates[mode].tokens_per_s[0])
    best = rates[mode]
    return ModeRates(
        mode,
        float(best.tokens_per_s[0]),
        float(best.prompt_tokens[0]),
        float(best.riders[0]),
        int(best.num_cohorts[0]),
        float(best.steps_s[0]),
        max(float(rate.tokens_per_s.max()) for rate in rates.values()),
    )
