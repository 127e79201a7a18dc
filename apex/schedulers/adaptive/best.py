"""Which strategy yields most tokens per second at a load, and at the loads that more CPU decodes would make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from apex.schedulers.adaptive.rates import SteadyLoad, gpu_only_rate, overlap_rate, pipelining_rate
from apex.schedulers.adaptive.times import OperationTimes
from swiftllm.core.plan import Strategy


@dataclass(frozen=True)
class Best:
    """The best strategy at one load, and what it yields there and beyond."""

    strategy: Strategy
    tokens_per_s: float
    prompt_tokens: float
    """Prompt tokens of an iteration in the steady state."""
    riders: float
    """CPU decodes beside the lane's own in a boundary of the lane."""
    num_cohorts: int
    steps_per_layer_s: float
    """Seconds that the lane spends on steps of cohorts between two of its layers."""
    reachable_tokens_per_s: float
    """The best rate of any strategy with any of the larger numbers of CPU decodes that were asked about."""


def best_strategy(
    times: OperationTimes,
    load: SteadyLoad,
    cpu_decodes: int,
    larger: Sequence[float],
    strategies: Sequence[Strategy],
    *,
    max_cohorts: int,
) -> Best:
    """Compare ``strategies`` at ``cpu_decodes``, and find the best rate with any of the ``larger`` numbers of them."""
    numbers = np.array([cpu_decodes, *larger], float)
    functions = {
        Strategy.GPU_ONLY: gpu_only_rate,
        Strategy.PIPELINING: pipelining_rate,
        Strategy.OVERLAP: partial(overlap_rate, max_cohorts),
    }
    rates = {strategy: functions[strategy](times, load, numbers) for strategy in strategies}
    strategy = max(rates, key=lambda strategy: rates[strategy].tokens_per_s[0])
    best = rates[strategy]
    return Best(
        strategy,
        float(best.tokens_per_s[0]),
        float(best.prompt_tokens[0]),
        float(best.riders[0]),
        int(best.num_cohorts[0]),
        float(best.steps_s[0]),
        max(float(rate.tokens_per_s.max()) for rate in rates.values()),
    )
