"""The script of models in 16 and 4 bits on small cards, on one small case."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from evaluation import reproduce_weights
from evaluation.options import experiment_settings

SETTINGS = experiment_settings("weights") | {
    "fills": 0,
    "least_requests": 4,
    "lengths": [{"input_len": 40, "output_len": 20}],
    "panels": [{"gpu": "t4", "host": "g4dn-4xlarge", "model": ["llama-2-13b"], "weights": ["auto", "int4"]}],
}


def run(folder: Path, **changes: object) -> int:
    config = folder / "weights.yaml"
    config.write_text(yaml.safe_dump(SETTINGS | changes))
    return reproduce_weights.main(reproduce_weights.Options(jobs=1, config=config, results_dir=folder))


def test_rows_are_compared_with_gpu_only_and_printed_again(tmp_path, capsys) -> None:
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "4-bit products are as fast as assumed" in printed
    (summary,) = (tmp_path / "weights").glob("[0-9a-f]*/summary.json")
    rows = json.loads(summary.read_text())
    assert [row["run"] for row in rows[:4]] == [run["run"] for run in SETTINGS["runs"]]
    assert all(row["ratio_to_gpu_only"] == 1.0 for row in rows if row["run"] == "GPU-only")
    assert all(row["placement"].endswith("/0") for row in rows if row["run"] == "GPU-only")
    assert {row["weights"] for row in rows} == {"16 bits", "4 bits"}
    assert reproduce_weights.main(reproduce_weights.Options(from_folder=summary.parent)) == 0
    assert "GPU-only" in capsys.readouterr().out
    assert (summary.parent / "figure.png").stat().st_size > 10_000


def test_a_model_that_fits_nowhere_is_said(tmp_path, capsys) -> None:
    machine = {"gpu": "t4", "host": "g4dn-4xlarge", "model": ["llama-3.1-70b", "llama-2-13b"], "weights": ["auto"]}
    assert run(tmp_path, panels=[machine]) == 0
    assert "not possible: T4, llama-3.1-70b auto" in capsys.readouterr().out
