"""`validate.py --run`: a real run printed, drawn and judged; its errors say what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.validate import Options, command, main
from tests.evaluation.validation.folders import write_run


def test_a_run_in_a_folder_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "elsewhere", num_gpu_blocks=None)
    assert main(Options(run=(str(folder),), results_dir=tmp_path / "results")) == 0
    printed = capsys.readouterr().out
    for words in ("TTFT p99, s", "TPOT mean, ms", "running requests, mean", "there are enough for all requests"):
        assert words in printed
    results = tmp_path / "results" / "real-runs" / "latest"
    assert (results / "elsewhere.png").stat().st_size > 10_000
    assert json.loads((results / "summary.json").read_text())[0]["run"] == "elsewhere"


def test_a_missing_file_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "elsewhere")
    (folder / "attention.csv").unlink()
    assert command(["--run", str(folder), "--results-dir", str(tmp_path / "results")]) == 2
    printed = capsys.readouterr().out
    assert "attention.csv is missing" in "".join(printed.split("\n"))
    assert not (tmp_path / "results").exists()


def test_terms_need_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--terms"]) == 2
    assert "nothing without --run" in capsys.readouterr().out


def test_an_error_that_grew_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "elsewhere")
    monkeypatch.setattr("evaluation.validation.judge.recorded_errors", lambda: {"elsewhere": {"ttft_mean_s": 0.0}})
    monkeypatch.setattr("evaluation.validation.judge.recorded_errors", lambda: {"elsewhere": {"ttft_mean_s": 0.0}})
    assert main(Options(run=(str(folder),), results_dir=tmp_path / "results")) == 1
    assert "worse than recorded: ttft_mean_s" in capsys.readouterr().out
