"""Two classes of service from the command to the files, on tiny points."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from evaluation.options import experiment_settings
from evaluation.studies.omniserve import Options, main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The experiment file with one small panel a figure."""
    settings = experiment_settings("omniserve")
    for section in settings["figures"].values():
        first = section["panels"][0] | {"setting": "apex-a10", "best_effort": "small"}
        first = {name: value[:2] if isinstance(value, list) else value for name, value in first.items()}
        if isinstance(first.get("request_rate"), list):
            first["request_rate"] = first["request_rate"][0]
        section["panels"] = [{**first, "num_gpu_blocks": 500}, {**first, "panel": "alone", "best_effort": None}]
        section["system"] = ["sarathi", "neo", "omniserve"]
    settings["best_effort"] = {"small": {"workload": "osc", "backlog": 10, "backlog_per_s": 1}}
    path = tmp_path / "omniserve.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(config: Path, *figures: str, **options: Any) -> int:
    chosen = {"set": ("duration_s=3",), "jobs": 1, "config": config, "results_dir": config.parent, **options}
    return main(Options(part=figures, **chosen))


def rows_of(results: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((results / name / "latest" / "summary.json").read_text())


def test_rows_have_both_classes_and_the_same_command_gives_the_same_bytes(config: Path, capsys) -> None:
    assert run(config, "a10") == 0
    rows = [row for row in rows_of(config.parent, "omniserve-a10") if row["best_effort"]]
    assert [row["system"] for row in rows] == ["sarathi", "neo", "omniserve"]
    for row in rows:
        assert row["backend"] == "simulated" and row["window_s"] == 3.0
        assert (row["ttft_slo_s"], row["tpot_slo_s"]) == (2, 0.2) == (row["ttft_target_s"], row["tpot_target_s"])
        assert row["offered"] > 0 and 0 <= row["slo_attainment"] <= row["ttft_attainment"] <= 1
        assert row["best_effort_arrived"] == 13 and row["best_effort_tokens_per_s"] > 0
    assert rows[0]["best_effort_over_baseline"] == 1.0
    assert "SIMULATED" in capsys.readouterr().out
    folder = config.parent / "omniserve-a10" / "latest"
    first = {path.name: path.read_bytes() for path in folder.glob("*.*") if path.name in ("summary.json", "figure.png")}
    assert len(first) == 2
    shutil.rmtree(folder.resolve())
    assert run(config, "a10") == 0
    again = config.parent / "omniserve-a10" / "latest"
    assert {name: (again / name).read_bytes() for name in first} == first


def test_two_figures_of_one_run_are_run_once_and_can_be_drawn_again(config: Path, capsys) -> None:
    assert run(config, "11", "16", only=("system=sarathi",)) == 0
    assert capsys.readouterr().out.count("figure:") == 1
    folder = config.parent / "elsewhere"
    shutil.copytree(config.parent / "omniserve-fig11" / "latest", folder)
    drawn = (folder / "figure.png").read_bytes()
    (folder / "figure.png").unlink()
    assert main(Options(from_folder=folder)) == 0
    assert (folder / "figure.png").read_bytes() == drawn


def test_swept_hosts_admission_and_bursts_are_drawn(config: Path, capsys) -> None:
    assert run(config, "18", "19", "14", only=("system=omniserve",)) == 0
    for figure in ("14", "18", "19"):
        assert (config.parent / f"omniserve-fig{figure}" / "latest" / "figure.png").is_file()
    rows = rows_of(config.parent, "omniserve-fig19")
    assert {row["admission_control"] for row in rows} == {True, False}
    assert {row["cpu_hosts"] for row in rows_of(config.parent, "omniserve-fig18")} == {1, 2}
    assert "admission control" in capsys.readouterr().out


def test_wrong_options_end_with_their_reason(config: Path, capsys) -> None:
    assert run(config, "10", only=("system=nothing",)) == 2
    assert "nothing" in capsys.readouterr().out
    assert run(config, "10", set=("duration_s=0",)) == 2
    assert "duration_s=0 must be more than 0" in capsys.readouterr().out
