"""Points with wrong profile tables: the machine stays, what schedulers believe changes."""

from __future__ import annotations

import pytest

from apex.perf.model import PerfModel
from evaluation.experiments.adaptive.cases import Selection
from evaluation.experiments.adaptive.wrong_tables import make_wrong_table_points, with_error_ratios
from evaluation.experiments.options import experiment_settings
from evaluation.experiments.simulated_point import describe_simulated_points

SETTINGS = experiment_settings("adaptive")


def test_the_machine_stays_and_what_is_believed_changes() -> None:
    points = make_wrong_table_points(SETTINGS, Selection(cases=["t4-osc-50"], quick=True))
    errors = SETTINGS["wrong_tables"]["errors"]
    assert len({point.key for point in points}) == len(points) == 1 + 3 * len(errors)
    machines = {id(point.task.hardware.table) for point in points if point.task.system == "adaptive"}
    assert len(machines) == 1
    for point in points:
        task = point.task
        factor, correction = task.values["actual_over_believed"], task.values["online_correction"]
        if factor in (None, 1.0):
            assert task.believed is None
            continue
        machine, believed = (PerfModel(table, 32) for table in (task.hardware.table, task.believed))
        assert machine.cpu_attention_s(64, 64_000) == pytest.approx(factor * believed.cpu_attention_s(64, 64_000))
        assert machine.linear_s(100) == believed.linear_s(100)
        assert task.strategy.disable_online_correction is not correction
    described = describe_simulated_points([point for point in points if point.task.system == "adaptive"])
    assert len({point["believed"] for point in described}) == len({error["actual_over_believed"] for error in errors})


def test_ratios_are_to_the_same_error() -> None:
    def row(system: str, factor: float | None, correction: bool | None, rate: float) -> dict:
        error = {"actual_over_believed": factor, "online_correction": correction}
        return {"system": system, "case": "a", **error, "output_tokens_per_s": rate, "bound_tokens_per_s": 400.0}

    rows = [
        row("swiftllm", None, None, 90.0),
        row("neo", 1.0, True, 100.0),
        row("neo", 1.5, False, 80.0),
        row("adaptive", 1.0, True, 125.0),
        row("adaptive", 1.5, False, 100.0),
    ]
    completed = with_error_ratios(["swiftllm", "neo"])(rows)
    assert [r["ratio_to_best_published"] for r in completed[3:]] == [1.25, pytest.approx(100 / 90)]
    assert [r["ratio_to_right_table"] for r in completed] == [1.0, 1.0, 0.8, 1.0, 0.8]
