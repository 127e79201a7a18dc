"""The cases of `adaptive`: their points, the bound, the ratios; and the script on two of them."""

from __future__ import annotations

import json

import pytest
import yaml

from apex.perf.model import PerfModel
from apex.strategy import StrategyConfig
from evaluation import reproduce_adaptive
from evaluation.experiments.adaptive.cases import IDEAS, Selection, make_case_points
from evaluation.experiments.adaptive.ratios import with_ratios
from evaluation.results.paths import EXPERIMENTS_DIR

SETTINGS = yaml.safe_load((EXPERIMENTS_DIR / "adaptive.yaml").read_text())


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


def test_ratios_are_to_the_best_published_system_of_the_case() -> None:
    rates = {("a", "neo"): 100.0, ("a", "apex"): 80.0, ("a", "adaptive"): 120.0, ("b", "adaptive"): 50.0}
    rows = [
        {"case": case, "system": system, "output_tokens_per_s": rate, "bound_tokens_per_s": 200.0}
        for (case, system), rate in rates.items()
    ]
    completed = with_ratios(["neo", "apex"])(rows)
    assert [row["ratio_to_best_published"] for row in completed] == [1.0, 0.8, 1.2, None]
    assert [row["fraction_of_bound"] for row in completed] == [0.5, 0.4, 0.6, 0.25]


def test_the_script_writes_a_row_for_each_case_and_system(tmp_path, capsys) -> None:
    settings = {**SETTINGS, "quick_num_requests": 40, "systems": ["swiftllm", "adaptive"]}
    config = tmp_path / "adaptive.yaml"
    config.write_text(yaml.safe_dump(settings))
    cases = ("a10-20gbps-u1000-100", "t4-osc-50")
    options = reproduce_adaptive.Options(cases=cases, quick=True, jobs=1, config=config, results_dir=tmp_path)
    assert reproduce_adaptive.main(options) == 0
    assert "SIMULATED" in capsys.readouterr().out
    (summary,) = (tmp_path / "adaptive").glob("[0-9a-f]*/summary.json")
    rows = json.loads(summary.read_text())
    assert [(row["case"], row["system"]) for row in rows] == [(c, s) for c in cases for s in settings["systems"]]
    for row in rows:
        assert row["backend"] == "simulated" and row["failed"] == 0 and 0 < row["fraction_of_bound"] < 1
        assert row["ratio_to_best_published"] >= 1.0


def test_an_unknown_case_ends_with_the_names_there_are(tmp_path, capsys) -> None:
    assert reproduce_adaptive.main(reproduce_adaptive.Options(cases=("nothing",), results_dir=tmp_path)) == 2
    assert "no case nothing" in capsys.readouterr().out
