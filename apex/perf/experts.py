"""How long an FFN of experts takes: the weights that are read depend on how many experts the rows pick."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, log

MOSTLY_TOUCHED = 0.95  # of the experts: from so many on, more rows read little more


def touched_experts(rows: float, num_experts: int, per_token: int) -> float:
    """Of a layer's experts, those that some row picks, on average if all are equally likely and rows independent."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** rows)


def flat_from_tokens(num_experts: int, per_token: int) -> float:
    """Rows that touch :data:`MOSTLY_TOUCHED` of the experts; 1 where there are none, or all are computed for each."""
    if per_token >= num_experts:
        return 1.0
    return max(1.0, log(1.0 - MOSTLY_TOUCHED) / log(1.0 - per_token / num_experts))


@dataclass(frozen=True)
class ExpertTimes:
    """Of a layer's FFN of experts on one card.

    Attributes:
        fixed_s: sorting of rows and launches.
        read_bytes_per_s, flops_per_s: at which weights are read and rows are multiplied.
    """

    fixed_s: float
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, touched: float, expert_bytes: float, pairs: float, expert_elements: float) -> float:
        """Of ``touched`` experts of ``expert_bytes`` and ``expert_elements`` each, and so many pairs of a row and an
        expert. Reading and multiplying are combined as for other matrices
        (:func:`apex.simulator.prediction.calibrated_profile.gemm_s`)."""
        read_s = touched * expert_bytes / self.read_bytes_per_s
        multiply_s = 2 * pairs * expert_elements / self.flops_per_s
        return self.fixed_s + hypot(read_s, multiply_s)
