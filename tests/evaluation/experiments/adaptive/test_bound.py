"""The bound of a case: the best split of its attention, and how it follows the machine."""

from __future__ import annotations

import pytest

from evaluation.experiments.adaptive.bound import bound_tokens_per_s, least_makespan_s
from evaluation.experiments.adaptive.cases import Selection, make_case_points
from evaluation.experiments.options import experiment_settings

SETTINGS = experiment_settings("adaptive")


def test_the_best_split_of_the_attention() -> None:
    """Of all splits, tried one by one, none is better."""
    for lane in ([(10.0, 1e-3), (0.0, 5e-3)], [(10.0, 1e-3)], [(1e6, 1e-3), (0.0, 5e-3)], [(0.0, 1e-9)]):
        for cpu_s in (1e-4, 1e-2, 10.0):
            attended = 10_000
            tried = [
                max((attended - y) * cpu_s, *(fixed_s + token_s * y for fixed_s, token_s in lane))
                for y in range(0, attended + 1, 5)
            ]
            assert least_makespan_s(lane, attended, cpu_s) == pytest.approx(min(tried), rel=2e-3)
            assert least_makespan_s(lane, attended, cpu_s) <= min(tried) * (1 + 1e-6)


def test_a_faster_cpu_and_fewer_prompts_raise_the_bound() -> None:
    names = ("a10-20gbps-u1000-500", "a10-35gbps-u1000-500", "a10-60gbps-u1000-500", "a10-u1000-500")
    bounds = [
        bound_tokens_per_s(
            make_case_points(SETTINGS, Selection(cases=[name], systems=["adaptive"], quick=True))[0].task
        )
        for name in names
    ]
    assert bounds == sorted(bounds) and bounds[-1] > 2 * bounds[0]
