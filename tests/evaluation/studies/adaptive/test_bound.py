"""The bound of a case: the best split of its attention, and how it follows the machine."""

from __future__ import annotations

import pytest

from evaluation.studies.adaptive import least_makespan_s


def test_the_best_split_of_the_attention() -> None:
    """Of all splits, tried one by one, none is better."""
    for gpu_batch in ([(10.0, 1e-3), (0.0, 5e-3)], [(10.0, 1e-3)], [(1e6, 1e-3), (0.0, 5e-3)], [(0.0, 1e-9)]):
        for cpu_s in (1e-4, 1e-2, 10.0):
            attended = 10_000
            tried = [
                max((attended - y) * cpu_s, *(fixed_s + token_s * y for fixed_s, token_s in gpu_batch))
                for y in range(0, attended + 1, 5)
            ]
            assert least_makespan_s(gpu_batch, attended, cpu_s) == pytest.approx(min(tried), rel=2e-3)
            assert least_makespan_s(gpu_batch, attended, cpu_s) <= min(tried) * (1 + 1e-6)
