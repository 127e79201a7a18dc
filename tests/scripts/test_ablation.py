"""The ablation: its rows, its arithmetic on made-up figures, and one real run of a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import ablation
import pytest
from ablation import ROWS, Options, bound_text, main, make_points, results_table
from rich.console import Console

from evaluation.experiments.runner import PointResult
from tests.reference.tiny_model import make_tiny_llama

RATES = {"swiftllm": 40.0, "apex": 100.0}


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
            "output_len": 64.0, "output_tokens_per_s": RATES[row], "lane_busy_fraction": 0.97, "cpu_busy_fraction": 0.1,
            "preemptions": 0, "predicted_over_actual": None, "failed": 0, "strategy_mix": "-"}  # fmt: skip
    return base | values


PROFILED = {"cpu_bytes_per_s": 8e9, "kv_bytes_per_token": 25_000.0, "lane_limit_tokens_per_s": 300.0}


def test_points_cap_the_gpu_tier_and_leave_room_for_all_on_the_cpu(options):
    points = make_points(options)
    assert [point.key for point in points] == ["swiftllm", "apex"]
    engine = points[0].task.task.engine
    assert engine.num_gpu_blocks == 2 * 3 and engine.num_cpu_blocks >= 6 * 3


def test_every_row_differs_from_every_other():
    assert len({(row.system, str(row.strategy), row.synchronous) for row in ROWS.values()}) == len(ROWS)
    assert {row.system for row in ROWS.values()} == {"swiftllm", "neo", "fastdecode", "apex"}


def test_repeats_take_turns_at_going_first(options):
    keys = [point.key for point in make_points(replace(options, repeats=2))]
    assert keys == ["swiftllm-0", "apex-0", "apex-1", "swiftllm-1"]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"rows": ("apex", "nothing")}, "no rows nothing; there are swiftllm, neo"),
        ({"gpu_requests": 0}, "gpu_requests=0 must be at least 1"),
        ({"model": "MISSING"}, "point --model at"),
    ],
)
def test_bad_options_end_as_one_line(options, capsys, tmp_path, changes, part):
    if "model" in changes:
        changes = {"model": tmp_path / "missing"}
    assert main(replace(options, **changes)) == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1


def test_ratios_are_to_the_gpu_only_row():
    table = results_table([record("apex"), record("swiftllm")])
    assert list(table.columns[2].cells) == ["2.50", "1.00"]


def test_bound_is_the_formula_and_names_the_lane_as_its_limit():
    text = bound_text([record("swiftllm"), record("apex", **PROFILED)])
    assert "= 2540 tokens/s" in text  # 40 + 8e9 / (25000 * 128)
    assert "apex, 100.0 tokens/s, 4% of it" in text
    assert "at most 300 tokens/s with up to 64 requests" in text and "busy 97% of the time, its CPU worker 10%" in text


def test_bound_says_nothing_of_the_lane_where_it_is_not_the_limit():
    text = bound_text([record("swiftllm"), record("apex", **PROFILED | {"lane_limit_tokens_per_s": 1e6})])
    assert "linear layers" not in text


def test_no_bound_without_both_kinds_of_row():
    assert bound_text([record("apex", **PROFILED)]).startswith("No bound")
    assert bound_text([record("swiftllm")]).startswith("No bound")


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
    assert summary[1]["cpu_bytes_per_s"] > 0 and summary[1]["lane_limit_tokens_per_s"] > 0
    # What apex chooses hangs on the profile measured a moment ago: on a busy machine the CPU may not pay.
    assert summary[0]["strategy_mix"] == "gpu-only 100%" and summary[1]["strategy_mix"]
    assert ablation.BASELINE in out
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
    assert [point.task.task.engine.synchronous for point in make_points(replace(options, rows=rows))] == [0, 0, 1]
