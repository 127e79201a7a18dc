"""The comparison of servers: its systems, its arithmetic on invented figures, and a whole run with fake servers."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from evaluation import compare_vllm
from evaluation.compare_vllm import Options, key_of, main, make_points, make_systems, median_rows, with_ratios
from evaluation.measure.server import ServerCommand
from evaluation.results.folder import read_records, records_file
from evaluation.results.paths import REPO_ROOT


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def vllm(tmp_path):
    path = tmp_path / "vllm"
    path.write_text("")
    return path


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})


def options(tmp_path, model, **changes) -> Options:
    base = {"model": model, "results_dir": tmp_path / "results", "vllm": tmp_path / "vllm", "num_requests": 4,
            "input_len": 9, "output_len": 6, "rounds": 2}  # fmt: skip
    return Options(**{**base, **changes})


def test_systems_are_compared_on_the_same_cores(tmp_path, model, vllm, two_cores):
    systems = make_systems(options(tmp_path, model), model)
    assert [(system.name, system.cores) for system in systems] == [
        ("swiftllm", (2,)),
        ("vllm", (2,)),
        ("apex", (2, 5)),
        ("vllm", (2, 5)),
        ("vllm-all-cores", (2, 5)),
    ]
    threads = [system.environment.get("VLLM_CPU_OMP_THREADS_BIND") for system in systems]
    assert threads == [None, "2", None, "auto", "2,5"]
    for system in systems:
        assert "bfloat16" in system.arguments and str(model) in system.arguments
        if system.name.startswith("vllm"):
            assert "--no-enable-prefix-caching" in system.arguments
            assert "--num-gpu-blocks-override" not in system.arguments  # vLLM finds its own number
        else:  # the default number of threads
            assert not any("threads" in argument for argument in system.arguments)


def test_without_vllm_only_ours_are_there(tmp_path, model, two_cores):
    assert [system.name for system in make_systems(options(tmp_path, model), model)] == ["swiftllm", "apex"]


def test_rounds_have_prompts_of_their_own_and_no_system_always_goes_first(tmp_path, model, vllm, two_cores):
    chosen = options(tmp_path, model, systems=("swiftllm", "vllm"))
    points = make_points(chosen, make_systems(chosen, model), model)
    assert [key_of(point.task.command) for point in points] == [
        "swiftllm-1core", "vllm-1core", "vllm-2core", "vllm-1core", "vllm-2core", "swiftllm-1core",
    ]  # fmt: skip
    assert [point.task.lengths.spec.seed for point in points] == [0, 0, 0, 1, 1, 1]
    assert points[0].task.prompt_tokens.kind == "random token ids"


def row(system, cores, number, rate, failed=0):
    others = dict.fromkeys(("ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "tpot_s_p99", "server_cores_busy"), 1.0)
    return {"system": system, "cores": cores, "round": number, "output_tokens_per_s": rate, "failed": failed, **others}


def test_a_ratio_is_to_vllm_on_as_many_cores_in_the_same_round():
    rows = with_ratios([
        row("vllm", 1, 0, 100.0), row("swiftllm", 1, 0, 80.0), row("vllm", 1, 1, 50.0), row("swiftllm", 1, 1, 60.0),
        row("vllm", 2, 0, 200.0), row("apex", 2, 0, 300.0), row("apex", 2, 1, 300.0, failed=2),
    ])  # fmt: skip
    assert [r["ratio"] for r in rows] == [1.0, 0.8, 1.0, 1.2, 1.0, 1.5, None]
    middle = {(r["system"], r["cores"]): r for r in median_rows(rows)}
    assert middle["swiftllm", 1]["ratio"] == 1.0 and middle["swiftllm", 1]["output_tokens_per_s"] == 70.0
    assert middle["apex", 2]["ratio"] == 1.5 and middle["apex", 2]["failed"] == 2
    assert list(middle) == [("swiftllm", 1), ("vllm", 1), ("apex", 2), ("vllm", 2)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds=0 must be at least 1"),
        ({"systems": ("sglang",)}, "no systems sglang here; there are apex, swiftllm"),
        ({"model": Path("missing")}, "point --model at"),
    ],
)
def test_options_that_do_not_fit_end_as_one_line(tmp_path, model, two_cores, capsys, changes, words):
    assert main(replace(options(tmp_path, model), **changes)) == 2
    told = capsys.readouterr().out
    assert words in told and told.count("\n") == 1


def fake_systems(_, model):
    arguments = (sys.executable, "-m", "tests.evaluation.fake_server")
    core = min(os.sched_getaffinity(0))
    return [ServerCommand(name, arguments, {"PYTHONPATH": str(REPO_ROOT)}, (core,)) for name in ("swiftllm", "vllm")]


def test_a_whole_run(tmp_path, model, monkeypatch, capsys):
    monkeypatch.setattr(compare_vllm, "make_systems", fake_systems)
    chosen = options(tmp_path, model)
    console = Console(width=200)
    assert main(chosen, console=console) == 0
    printed = capsys.readouterr().out
    assert "only our servers are measured; scripts/install_vllm.sh --cpu" in printed
    folder = (tmp_path / "results" / "compare_vllm" / "latest").resolve()
    rows = json.loads((folder / "summary.json").read_text())
    assert [(r["system"], r["cores"], r["round"]) for r in rows] == [
        ("swiftllm", 1, 0), ("vllm", 1, 0), ("vllm", 1, 1), ("swiftllm", 1, 1),
    ]  # fmt: skip
    for r in rows:
        assert r["completed"] == 4 and r["failed"] == 0 and r["output_tokens"] == 24 and r["ratio"] > 0
        assert r["ttft_s_p99"] > 0 and 0 <= r["idle_servers_cores_busy"] < 1 and r["server"] == "version 9.9"
    titles, _, *lines = (folder / "summary.md").read_text().splitlines()
    assert titles.startswith("| cores | system | round |") and "cores busy" in titles and len(lines) == 4
    records = read_records(records_file(folder, "vllm-1core-round1"))
    assert [len(record["token_times_s"]) for record in records] == [6] * 4
    found = json.loads((folder / "provenance.json").read_text())["configuration"]["commands"]["vllm-1core"]
    assert found["arguments"][1:] == ["-m", "tests.evaluation.fake_server"] and len(found["cores"]) == 1
    assert (folder / "figure.png").stat().st_size > 20_000 and "swiftllm" in printed
    assert main(chosen, console=console) == 0  # nothing left to run
    assert "starting" not in capsys.readouterr().out
