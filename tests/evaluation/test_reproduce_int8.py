"""A CPU tier in int8 on predicted machines: its capacity, its attention, and rows beside those of an exact tier."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from apex.simulator.prediction.predicted_machine import predict_machine
from evaluation.drivers import run_simulated_point
from evaluation.options import experiment_settings
from evaluation.studies import int8

SECTION = experiment_settings("int8")


def test_int8_holds_twice_as_many_tokens_but_for_the_scales() -> None:
    exact = load_setting("neo-t4")
    eight = replace(exact, cpu_kv_dtype="int8")
    assert eight.num_cpu_blocks == pytest.approx(exact.num_cpu_blocks * 2 * 128 / 132, abs=1)
    machines = [
        predict_machine("a10", "g5-4xlarge", "llama-3.1-8b", "float16", cpu_kv_dtype=it) for it in ("auto", "int8")
    ]
    gpu, cpu = zip(*(machine.num_blocks(None, None, 16) for machine in machines), strict=True)
    assert gpu[0] == gpu[1]
    assert cpu[1] == pytest.approx(cpu[0] * 2 * 128 / 132, abs=1)


def test_attention_over_int8_takes_the_measured_gain_where_cores_do_not_share_bandwidth() -> None:
    """On the hosts of the papers they do: then a byte takes as long, and there are fewer of them."""
    for name, least in (("neo-t4", 1.4), ("apex-a10", 1.4)):
        exact = replace(load_setting(name), cpu_kernels={"neo": "native"})
        eight = replace(exact, cpu_kv_dtype="int8")
        tokens = eight.cpu_attention_gb_s("neo") / exact.cpu_attention_gb_s("neo") * 2 * 128 / 132
        assert least < tokens <= 2.0
    with pytest.raises(ValueError, match="needs the cpu_kernel native, not ispc"):
        replace(load_setting("neo-t4"), cpu_kv_dtype="int8").cpu_attention_gb_s("neo")


def test_a_row_of_the_record_comes_out_again() -> None:
    rows = json.loads((Path(__file__).parents[2] / "docs/records/int8/summary.json").read_text())
    chosen = {"setting": "apex-a10", "workload_title": "osc", "system": "adaptive", "cpu_kv_dtype": "int8"}
    (row,) = (row for row in rows if chosen.items() <= row.items())
    points = int8.STUDY.points_of(int8.Options())
    assert len(points) == len(rows)
    (point,) = (point for point in points if point.key == "apex-a10-osc-int8-adaptive")
    now = run_simulated_point(point, "", Console(file=io.StringIO())).values
    compared = (row.keys() & now.keys()) - {"wall_s"}
    assert len(compared) > 40
    assert {name: now[name] for name in compared} == {name: row[name] for name in compared}


def test_rows_of_both_formats_are_compared(tmp_path, capsys) -> None:
    panel = {"setting": "neo-t4", "workload": "osc", "output_len": 200, "num_requests": 25}
    config = tmp_path / "int8.yaml"
    config.write_text(yaml.safe_dump(SECTION | {"system": ["swiftllm", "neo", "adaptive"], "panels": [panel]}))
    assert int8.main(int8.Options(jobs=1, config=config, results_dir=tmp_path)) == 0
    assert "SIMULATED" in capsys.readouterr().out
    (summary,) = tmp_path.glob("int8/[0-9a-f]*/summary.json")
    rows = {(row["system"], row["cpu_kv_dtype"]): row for row in json.loads(summary.read_text())}
    assert set(rows) == {("swiftllm", None), *((s, f) for s in ("neo", "adaptive") for f in ("auto", "int8"))}
    for system in ("neo", "adaptive"):
        exact, eight = rows[system, "auto"], rows[system, "int8"]
        assert exact["over_exact"] == 1 and eight["failed"] == exact["failed"] == 0
        assert eight["over_exact"] == eight["output_tokens_per_s"] / exact["output_tokens_per_s"] > 1
        assert eight["num_cpu_blocks"] > 1.9 * exact["num_cpu_blocks"]
    assert summary.with_name("figure.png").stat().st_size > 10_000
