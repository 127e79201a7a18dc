"""The cases of `adaptive`: their points, kernels, names."""

from __future__ import annotations

import pytest

from apex.perf.model import PerfModel
from apex.strategy import StrategyConfig
from evaluation.experiments.adaptive.cases import IDEAS, Case, Selection, make_case_points
from evaluation.experiments.options import experiment_settings

SETTINGS = experiment_settings("adaptive")


def test_every_case_has_a_point_for_each_system() -> None:
    points = make_case_points(SETTINGS, Selection(quick=True))
    assert len(points) == len({point.key for point in points}) == 25 * 4
    assert max(point.task.lengths.spec.num_requests for point in points) == SETTINGS["quick_num_requests"]
    assert {point.task.system for point in points} == set(SETTINGS["systems"])


def test_kernels_are_those_of_the_papers_unless_one_is_given() -> None:
    def kernels(**options: object) -> dict[str, str]:
        points = make_case_points(SETTINGS, Selection(cases=["t4-osc-50"], quick=True, **options))
        return {point.task.system: point.task.hardware.table.identity["cpu_kernel"] for point in points}

    assert kernels() == {"swiftllm": "native", "neo": "ispc", "apex": "llamafile", "adaptive": "llamafile"}
    assert set(kernels(kernel="ispc").values()) == {"ispc", "native"}  # swiftllm computes no attention on the CPU
    assert set(kernels(kernel="native").values()) == {"native"}


def test_a_hand_over_costs_the_lane_of_every_system() -> None:
    for microseconds in (0.0, 50.0):
        for point in make_case_points(SETTINGS, Selection(cases=["t4-osc-50"], quick=True, hand_over_us=microseconds)):
            model = PerfModel(point.task.hardware.table, point.task.hardware.num_layers)
            assert model.hand_over_s(1) == model.hand_over_s(300) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_is_switched_off_in_adaptive_alone(idea: str) -> None:
    points = make_case_points(SETTINGS, Selection(cases=["t4-osc-50"], quick=True, without=idea))
    changed = {
        point.task.system: point.task.values["without"] for point in points if point.task.strategy != StrategyConfig()
    }
    assert changed == {"adaptive": idea}


def test_unknown_names_are_refused() -> None:
    for options, message in (
        ({"cases": ["a11"]}, "no case a11.*there are a10-u1000-500"),
        ({"systems": ["neon"]}, "unknown system 'neon'"),
        ({"hand_over_us": -1.0}, "must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            make_case_points(SETTINGS, Selection(**options))


def test_a_case_is_named_by_its_machine_and_workload() -> None:
    titles = {raw["case"]: (case := Case(**raw)).title(case.trace()) for raw in SETTINGS["cases"]}
    assert len(set(titles.values())) == 25
    assert titles["a10-35gbps-u1000-100"] == "A10, CPU 35 GB/s: 1000 in, 100 out"
    assert titles["neo-t4-osc-50"] == "T4 (g4dn.4xlarge): OSC, 50 out"
    assert titles["2xh100-azure-code"] == "2x H100: Azure code"
