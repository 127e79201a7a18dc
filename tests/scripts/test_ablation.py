"""The ablation from its command to its files: one real run of a tiny model, and one of a simulated machine."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from ablation import main, results_table
from rich.console import Console

from evaluation.plots.ablation import draw_ablation
from evaluation.plots.style import FigureText
from evaluation.run import PointResult
from evaluation.studies.ablation import BASELINE, Options, machine_of, measured_points, with_ratios
from tests.reference.tiny_model import make_tiny_llama

RATES = {"swiftllm": 40.0, "apex": 100.0, "no-overlap": 80.0, "neo": 90.0}


@pytest.fixture
def options(tmp_path, monkeypatch) -> Options:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    return Options(
        model=make_tiny_llama(tmp_path / "tiny"),
        rows=("swiftllm", "apex"),
        num_requests=6,
        input_len=20,
        output_len=13,
        gpu_requests=2,
        dtype="float32",
        results_dir=tmp_path / "results",
    )


def record(row: str, **values) -> dict:
    base = {"row": row, "system": row, "backend": "torch-cpu", "gpu": None, "num_requests": 64, "input_len": 96.0,
            "output_len": 64.0, "output_tokens_per_s": RATES[row], "gpu_batch_busy_fraction": 0.97,
        "cpu_busy_fraction": 0.1,
            "preemptions": 0, "predicted_over_actual": None, "failed": 0, "strategy_mix": "-"}  # fmt: skip
    return base | values


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rows": ("apex", "nothing")}, "no rows nothing; there are swiftllm, simple-offloading"),
        ({"gpu_requests": 0}, "gpu_requests=0 must be at least 1"),
        ({"model": "MISSING"}, "point --model at"),
        ({"setting": ("apex-a10",), "jobs": 2}, "--setting, --jobs: only --backend simulated takes that"),
        ({"backend": "simulated"}, "--model, --gpu-requests, --dtype: only --backend torch takes that"),
    ],
)
def test_bad_options_end_as_one_line(options, capsys, tmp_path, changes, part):
    if "model" in changes:
        changes = {"model": tmp_path / "missing"}
    assert main(replace(options, **changes)) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1


def test_ratios_are_to_the_gpu_only_row():
    table = results_table(with_ratios([record("apex"), record("swiftllm")]))
    assert list(table.columns[2].cells) == ["2.50", "1.00"]


def test_a_failed_row_is_told_and_the_others_are_kept(options, capsys):
    def run_point(point, label, console):
        if point.key == "apex":
            raise RuntimeError("out of luck")
        return PointResult(record("swiftllm", model="tiny", dtype="float32"), ())

    console = Console(width=200)
    assert main(options, run_point, console) == 1
    out = capsys.readouterr().out
    assert "FAILED: RuntimeError: out of luck" in out and "failed: apex" in out and "40.0" in out


def test_a_real_run_leaves_a_summary(options, capsys):
    assert main(options, console=Console(width=200)) == 0
    out = capsys.readouterr().out
    assert "Bound: GPU-only" in out and "6 requests of 20 in / 13 out, 2 of them fit the GPU tier" in out
    summary = json.loads((options.results_dir / "ablation/latest/summary.json").read_text())
    assert [r["row"] for r in summary] == ["swiftllm", "apex"]
    assert all(r["completed"] == 6 and r["failed"] == 0 and r["output_tokens_per_s"] > 0 for r in summary)
    assert summary[1]["cpu_bytes_per_s"] > 0 and summary[1]["gpu_batch_limit_tokens_per_s"] > 0
    # What apex chooses hangs on the profile measured a moment ago: on a busy machine the CPU may not pay.
    assert summary[0]["strategy_mix"] == "gpu-only 100%" and summary[1]["strategy_mix"]
    assert BASELINE in out
    assert main(options, console=Console(width=200)) == 0  # nothing left to run
    assert "finished before" in capsys.readouterr().out


def test_each_row_runs_with_its_own_strategy(options, capsys):
    rows = ("force-overlap", "no-threshold", "synchronous")
    assert main(replace(options, rows=rows), console=Console(width=200)) == 0
    folder = options.results_dir / "ablation/latest"
    engines = [json.loads((folder / f"points/{row}.json").read_text())["details"]["engine"] for row in rows]
    assert [engine["strategy"]["strategy"] for engine in engines] == ["asynchronous-overlap", "auto", "auto"]
    assert [engine["strategy"]["min_cpu_request_ratio"] for engine in engines] == [8.0, 0, 8.0]
    summary = json.loads((folder / "summary.json").read_text())
    assert "asynchronous-overlap" in summary[0]["strategy_mix"] and "pipelining" not in summary[0]["strategy_mix"]
    assert [point.task.task.engine.synchronous for point in measured_points(replace(options, rows=rows))] == [0, 0, 1]


def test_a_simulated_run_takes_no_model_and_names_each_row_in_every_file(tmp_path, capsys):
    chosen = Options(
        backend="simulated", setting=("apex-t4-as-measured", "apex-t4"),
        rows=("swiftllm", "apex", "no-overlap", "adaptive", "adaptive-no-lockstep"),
        num_requests=40, output_len=60, jobs=1, results_dir=tmp_path,
    )  # fmt: skip
    assert main(chosen, console=Console(width=160)) == 0
    out = capsys.readouterr().out
    assert "SIMULATED: T4 + Llama-2-7B, as APEX measured (float16), 40 requests of" in out and "54 GPU blocks" in out
    assert out.count("Bound of any schedule") == 2 and "Measured once" not in out and "llamafile" in out
    folder = (tmp_path / "ablation/latest").resolve()
    summary = json.loads((folder / "summary.json").read_text())
    assert {r["backend"] for r in summary} == {"simulated"}
    assert [(r["case"], r["row"]) for r in summary] == [(name, row) for name in chosen.setting for row in chosen.rows]
    assert all(r["completed"] == 40 and 0 < r["output_tokens_per_s"] < r["bound_tokens_per_s"] for r in summary)
    rates = {r["row"]: r["output_tokens_per_s"] for r in summary if r["case"] == "apex-t4"}
    assert rates["adaptive"] > rates["swiftllm"] and rates["adaptive"] != rates["adaptive-no-lockstep"]
    assert "asymmetric-pipelining" not in summary[-1]["strategy_mix"]
    assert len(list((folder / "points").iterdir())) == len(list((folder / "records").iterdir())) == len(summary)
    lines = (folder / "summary.md").read_text().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines if " simulated " in line] == [r["row"] for r in summary]
    table = (folder / "ablation.csv").read_text().splitlines()
    assert [line[:2] for line in csv.reader(table[1:])] == [
        [f"{r['setting_title']}, {r['reading']}", r["row"]] for r in summary
    ]
    tex = (folder / "ablation.tex").read_text()
    assert tex.count(r" \\") == len(summary) + 1 and r"\toprule" in tex and "SIMULATED" in tex and "100\\%" in tex
    assert (folder / "figure.png").stat().st_size > 20_000
    assert main(chosen, console=Console(width=160)) == 0
    assert "finished before" in capsys.readouterr().out


def test_machines_of_one_reading_have_names_of_their_own():
    rows = [
        record("apex", case=title, setting_title=title, reading="as APEX measured", backend="simulated")
        for title in ("T4 + Llama-2-7B", "A10 + Llama-3.1-8B")
    ]
    names = ["T4 + Llama-2-7B, as APEX measured", "A10 + Llama-3.1-8B, as APEX measured"]
    assert [machine_of(row) for row in rows] == names
    figure = draw_ablation(rows, FigureText("SIMULATED", "", ""))
    assert [axes.get_title(loc="left") for axes in figure.axes] == names


def test_the_figure_names_every_bar_in_words():
    rows = [
        record(name, output_tokens_per_s=rate, case="x", reading="as drawn", backend="simulated")
        for name, rate in (("swiftllm", 40.0), ("apex", 100.0), ("no-overlap", 80.0), ("neo", None))
    ]
    figure = draw_ablation(rows, FigureText("SIMULATED", "", ""))
    (axes,) = figure.axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [
        "swiftllm: GPU only", "apex: a part on the CPU, pipelined or overlapped", "neo: a part on the CPU, pipelined",
        "without overlap",
    ]  # fmt: skip
    words = [text.get_text().strip() for text in axes.texts]
    assert {"systems", "apex with one change", "0.40\u00d7", "100", "0.80\u00d7", "no result"} <= set(words)
    assert "SIMULATED" in axes.get_xlabel() and axes.get_title(loc="left") == "as drawn"
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_ablation([rows[-1]], FigureText("", "", ""))
