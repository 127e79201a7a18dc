"""Figure 1 from its command to its files: what the paper states, what is predicted, what is measured here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import pacpu
from evaluation import reproduce_fig1
from evaluation.options import experiment_settings
from evaluation.studies.fig1 import MeasuredAttention, Options, operation_points, panels, stated_words

SETTINGS = experiment_settings("fig1")
KERNEL = "native"


def few(tmp_path: Path, **attention: object) -> Path:
    small = {"batch": [1, 2], "context": 40, "heads": 2, "gpu": ["v100"], "kernel": [KERNEL], "rounds": 2}
    settings = {**SETTINGS, "linear": {**SETTINGS["linear"], "tokens": [1, 2048]}}
    settings["attention"] = {**SETTINGS["attention"], **small, **attention}
    path = tmp_path / "few.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_the_papers_two_numbers_are_5_6_percent_of_each_other() -> None:
    words = stated_words(SETTINGS)
    assert "170 us on V100 (197 GB/s) and 3,031 us on 2x EPYC 7251 (11 GB/s) for 33.6 MB: 5.6%" in words


def test_linear_operations_are_flat_and_then_rise_as_the_papers_figure_1a() -> None:
    tasks = [point.task for point in operation_points(SETTINGS, None)]
    linear = {task.size: task.seconds for task in tasks if not isinstance(task, MeasuredAttention) and task.size != 0}
    seconds = [task.seconds for task in tasks if getattr(task, "operation", "") == "linear"]
    assert len(seconds) == len(SETTINGS["linear"]["tokens"]) and linear
    assert seconds[6] < 1.2 * seconds[0] and seconds[-1] > 10 * seconds[0]  # 64 and 2,048 tokens


def test_from_the_command_to_the_files(tmp_path, capsys) -> None:
    options = Options(config=few(tmp_path), results_dir=tmp_path, jobs=1)
    assert reproduce_fig1.main(options) == 0
    folder = (tmp_path / "fig1/latest").resolve()
    rows = json.loads((folder / "summary.json").read_text())
    kinds = [(row["workload"], row["backend"].split(":")[0]) for row in rows]
    assert kinds == [("linear", "simulated")] * 2 + [("attention", "simulated")] * 2 + [("attention", "measured")] * 2
    assert all(row["operation_us"] > 0 for row in rows) and rows[-1]["kernel"] == KERNEL and rows[-1]["cpu"]
    assert (folder / "figure.png").stat().st_size > 20_000
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "measured" in printed and "The paper states" in printed
    assert reproduce_fig1.main(Options(from_folder=folder)) == 0


def test_stated_times_are_marks_beside_the_lines() -> None:
    row = {"system": "native", "backend": "measured: x", "batch": 1, "operation_us": 9.0}
    _, attention = panels(SETTINGS, [], [row])
    assert [(s.label, s.points) for s in attention.series] == [
        ("CPU, native", [(1, 9.0)]), ("paper: V100", [(4, 170)]), ("paper: 2x EPYC 7251", [(4, 3031)])
    ]  # fmt: skip


def test_a_kernel_that_is_not_here_is_refused(tmp_path) -> None:
    settings = yaml.safe_load(few(tmp_path, kernel=["cuda"]).read_text())
    with pytest.raises(ValueError, match="no kernel 'cuda'"):
        operation_points(settings, None)
    assert KERNEL in pacpu.kernels("float16")
