"""The check of a GPU machine, rehearsed on the CPU: every part runs and the report has all of them."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
import tarfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import bench_gpu, gpu_parts
from evaluation.gpu import check as gpu_check
from evaluation.gpu import report as gpu_report
from evaluation.gpu.check import CASES
from swiftllm.config import EngineConfig
from swiftllm.device import FIRST_PAUSE_S
from swiftllm.machine import InsufficientMemory
from swiftllm.runtime import execution_context, torch_backend
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import DEVICE

REPO = Path(__file__).resolve().parents[2]
ABSENT = (
    *("fastapi", "gguf", "httpx", "httpx_sse", "huggingface_hub", "hypothesis", "jinja2", "prometheus_client"),
    *("pydantic", "pytest", "ray", "rich", "tokenizers", "transformers", "tyro", "uvicorn", "uvloop", "yaml"),
)
"""What a machine with torch and a compiler may lack."""
PARTS = (
    *("build", "machine", "operations", "decode-attention", "quantised", "experts"),
    *("tokens", "tokens-models", "tokens-tiers", "random-load", "gpu_batches", "speeds"),
    *(f"{system}-rehearsal" for system in ("apex", "swiftllm", "neo", "adaptive")),
    "report",
)


@pytest.mark.thorough
def test_rehearsal_writes_a_report(tmp_path: Path) -> None:
    """With little more than torch, as on a GPU machine without a network; in two calls that share a folder."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    run = tmp_path / "run"

    def rehearse(*options: str) -> str:
        command = [str(REPO / "scripts/gpu_check.sh"), "--rehearse", *options, str(run)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    told = rehearse("--stages", "build,machine")
    assert "not done yet: kernels, tokens, gpu_batches, apex-rehearsal, " in told and "to go on: " in told
    figures = json.loads((run / "kernels.json").read_text())
    assert figures["gemm"]["tflops"] > 0 and "iterations" not in figures
    assert "not done yet" not in rehearse()

    summary = json.loads((run / "summary.json").read_text())
    assert {name: result for name, result, _ in summary["parts"]} == dict.fromkeys(PARTS, "ok")
    parts = [name for name, _, _ in summary["parts"]]
    assert parts.index("apex-rehearsal") < parts.index("swiftllm-rehearsal"), "who has no CPU worker profiles none"
    assert [one["system"] for one in summary["runs"]] == ["swiftllm", "neo", "apex", "adaptive"]
    assert all(one["measured"]["completed"] and one["simulated"]["completed"] for one in summary["runs"])
    assert summary["kernels"]["gemm"] == figures["gemm"], "the second call measures nothing twice"
    assert {row["graphs"] for row in summary["kernels"]["iterations_eager"]} == {False}
    assert {"tyro", "rich", "fastapi", "tokenizers", "transformers"} <= set(summary["missing_packages"])
    assert len(list((run / "measured/profiles").glob("*.json"))) == 1, "the profile of this machine"
    page = (run / "README.md").read_text()
    for words in (
        "A rehearsal on a CPU",
        "weight-reading floor",
        "without graphs",
        "cpu attention beside",
        "rich, tyro",
    ):
        assert words in page
    for picture in ("end_to_end.png", "end_to_end/apex-rehearsal-timeline.png"):
        assert (run / picture).stat().st_size > 5000 and picture in page
    assert sum(file.stat().st_size for file in run.rglob("*")) < 2 << 20, "too large to commit"


def test_a_rehearsal_is_one_file_that_says_what_needs_a_card(tmp_path: Path) -> None:
    """What tells the machine, the quickest stage, with the summary of it."""
    command = [str(REPO / "scripts/gpu_check.sh"), "--rehearse", "--stages", "machine", "--archive"]
    environment = {**os.environ, "PYTHON": sys.executable}
    command += [str(tmp_path / "one.tar.gz"), str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "one.tar.gz") as tar:
        assert "run/README.md" in tar.getnames()
        summary = json.load(tar.extractfile("run/summary.json"))
    needs = "both_ways: needs a GPU; pinned_allocation: needs a GPU; polling: needs a GPU; wake_up: needs a GPU"
    assert {f"Lacking here: {needs}.", "Failed: nothing."} <= set(summary["verdict"])


def test_gpu_batches_of_every_kind_are_timed_and_profiled() -> None:
    figures = next(run := bench_gpu.measure(CASES["rehearsal"], True, ["gpu_batch_times"]))
    names = [row["gpu_batch"] for row in figures["gpu_batch_times"]]
    run.close()
    *_, figures = bench_gpu.measure(CASES["rehearsal"], True, ["gpu_batch_profiles", "captures"])
    assert [table["gpu_batch"] for table in figures["gpu_batch_profiles"]] == names and len(names) == 6
    assert all(table["kernels"] and table["idle_us"] is None for table in figures["gpu_batch_profiles"])
    assert figures["needs_gpu"] == ["captures"] and not figures["failed"]


def test_what_tells_the_machine_is_measured_on_a_gpu_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the parts that a rehearsal without a GPU leaves out, and what the report says of them."""
    monkeypatch.setattr(gpu_parts, "open_device", lambda name: torch_backend.open_device(name))
    monkeypatch.setattr(gpu_parts, "GIB", 1 << 20)
    with fake_gpu(0):
        spinning = SimpleNamespace(synchronize=torch.cuda.synchronize)  # which the engine itself must not
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: spinning)
        torch.cuda.set_device(1)
        timer = gpu_parts.Timer(DEVICE)
        copied = gpu_parts.both_ways(timer, 1 << 20)
        assert copied["bytes"] == 1 << 20 and copied["each_gb_s"] > 0
        rates = gpu_parts.memory_bandwidth(timer, 1 << 20)
        assert rates.keys() == {"copy", "read", "to_device", "to_host"} and min(rates.values()) > 0
        pinned = gpu_parts.pinned_allocation([4096, 1 << 20])
        assert [row["MB"] for row in pinned] == [4096 / 1e6, 2**20 / 1e6]
        assert all(row["ms_per_MB"] == pytest.approx(row["ms"] / row["MB"]) for row in pinned)
        polling = gpu_parts.polling(timer)
        assert polling.keys() == {"query_us", "sleep_us"} and polling["sleep_us"] >= 1e6 * FIRST_PAUSE_S
        assert gpu_parts.measure_wake_up(timer).keys() == {"us"}
        about = gpu_parts.versions(torch.device("cuda", 1))
        assert (about["capability"], about["multiprocessors"]) == ("8.6", 40)
        for part, figures in (("both_ways", copied), ("pinned_allocation", pinned), ("polling", polling)):
            number = len(figures) if isinstance(figures, list) else 1
            _, title, _, *table = gpu_report.part_lines(part, figures)
            assert title == f"{part.replace('_', ' ')}:" and len(table) == 2 + number


def test_gpu_batches_run_and_captures_add_up_on_a_gpu_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftllm.runtime.graphs.ROW_BUCKETS", (1, 4, 16))
    with fake_gpu(0) as cuda, gpu_check.model_folder(CASES["rehearsal"]) as model:
        options = {"num_gpu_blocks": 64, "num_cpu_blocks": 8, "max_num_seqs": 16, "max_model_len": 128}
        backend = open_torch_backend(EngineConfig(str(model), dtype="float32", load_format="dummy", **options))
        buckets = gpu_parts.captures(backend)
        assert [bucket["rows"] for bucket in buckets] == [16, 1, 4]
        assert sum(bucket["graphs"] for bucket in buckets) == len(backend.graphs)
        assert sum(bucket["MiB"] for bucket in buckets) * 2**20 == backend.graphs.num_bytes
        with torch.inference_mode():
            for name, work in gpu_parts.GpuBatches(backend, gpu_parts.SMALL).kinds.items():
                before = cuda.replays
                work()
                assert name != "decodes" or cuda.replays == before + 1
        backend.close()


def test_a_table_of_kernels_counts_launches_and_the_time_without_any() -> None:
    def event(name: str, start: float, end: float, kind: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        times = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(name=name, device_type=kind, time_range=times, is_user_annotation=False)

    launches = [event("cudaLaunchKernel", 0, 1, DeviceType.CPU), event("cudaGraphLaunch", 1, 2, DeviceType.CPU)]
    events = [event("short", 10, 12), event("long", 11, 20), event("short", 30, 33), *launches]
    table = gpu_parts.kernel_table([*events, event("aten::mm", 0, 99, DeviceType.CPU)], on_gpu=True)
    kernels = [{"name": "long", "calls": 1, "us": 9}, {"name": "short", "calls": 2, "us": 5}]
    assert table == {"kernels": kernels, "launches": 2, "span_us": 23, "idle_us": 10}


def test_a_python_without_torch_is_no_missing_gpu(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -E -s -S "$@"\n')
    bare.chmod(0o755)
    command = [str(REPO / "scripts/gpu_check.sh"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHON": str(bare), "VENV": str(tmp_path / "none")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "has no numpy, pybind11, setuptools, torch" in done.stderr and "`make setup`" in done.stderr
    assert not (tmp_path / "run").exists()
    told = subprocess.run([command[0], "--help"], capture_output=True, text=True, timeout=300, check=True).stdout
    assert told.startswith("Checks and measures the GPU path") and "usage: scripts/gpu_check.sh" in told


def test_a_system_without_a_cpu_worker_profiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would take what it measured for their own, hand-overs as long as the attention itself among it."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    *_, record = gpu_check.run_case("swiftllm", CASES["rehearsal"], tmp_path, limit_s=20.0)
    assert record["measured"]["completed"] and record["profile"] is None and record["simulated"] is None
    assert not list((tmp_path / "cache/profiles").glob("*.json"))


def test_a_start_that_took_all_the_time_leaves_a_record(tmp_path: Path) -> None:
    (tmp_path / "parts.txt").write_text("swiftllm-rehearsal\tok\t9\n")
    *_, record = gpu_check.run_case("swiftllm", CASES["rehearsal"], tmp_path, limit_s=0.0)
    assert not record["measured"]["completed"] and record["measured"]["output_tokens"] == 0
    (tmp_path / "end_to_end").mkdir()
    (tmp_path / "end_to_end/swiftllm-rehearsal.json").write_text(json.dumps(record))
    gpu_report.write_page(tmp_path)
    assert "| rehearsal | swiftllm | 0 |  |" in (page := (tmp_path / "README.md").read_text())
    assert "cut short by the time limit" in page


def test_a_replay_ends_with_its_time_on_a_virtual_clock_too() -> None:
    case = CASES["rehearsal"]

    def rehearse(limit_s: float) -> dict:
        config = EngineConfig("", max_num_batched_tokens=64)
        return gpu_check.simulate("apex", case, flat_table(cpu_token_s=2e-6), 3, config, limit_s)

    whole = rehearse(math.inf)
    assert whole["completed"] and whole["output_tokens"] == case.num_requests * case.output_len
    part = rehearse(whole["seconds"] / 2)
    assert not part["completed"] and 0 < part["output_tokens"] < whole["output_tokens"]
    assert whole["seconds"] / 2 <= part["seconds"] < whole["seconds"]


def test_a_system_is_measured_on_a_gpu_that_is_late_and_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("apex.build.load_or_measure", lambda *_: flat_table(cpu_token_s=2e-6))
    monkeypatch.setattr("swiftllm.runtime.graphs.ROW_BUCKETS", (1, 4, 16))
    sizes = {"num_requests": 5, "input_len": 12, "output_len": 4, "num_gpu_blocks": 4, "num_cpu_blocks": 24}
    case = replace(CASES["rehearsal"], max_model_len=48, **sizes)
    with fake_gpu(1) as cuda:
        *_, record = gpu_check.run_case("neo", case, tmp_path, limit_s=90.0)
    measured = record["measured"]
    assert cuda.captures and measured["completed"] and measured["output_tokens"] == 20 and not record["failed"]
    assert measured["strategy_iterations"]["asymmetric-pipelining"] and (tmp_path / record["timeline"]).is_file()


def test_what_was_measured_is_there_before_what_comes_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    record = next(run := gpu_check.run_case("apex", CASES["rehearsal"], tmp_path, limit_s=20.0))
    assert record["measured"]["completed"] and record["simulated"] is None and record["timeline"] is None
    run.close()


def test_the_benchmark_captures_beside_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(0) as cuda, gpu_check.model_folder(CASES["rehearsal"]) as model:
        options = {"num_gpu_blocks": 4, "num_cpu_blocks": 4, "max_num_seqs": 1, "max_model_len": 64}
        backend = open_torch_backend(EngineConfig(str(model), dtype="float32", load_format="dummy", **options))
        captured = cuda.captures
        monkeypatch.setattr(gpu_parts, "open_device", torch_backend.open_device)
        monkeypatch.setattr(gpu_parts, "select_ops", execution_context.select_ops)
        monkeypatch.setattr(gpu_parts, "ATTENTION_SHAPES", ((4, 64),))
        monkeypatch.setattr(gpu_parts, "GIB", 1 << 20)
        gc.disable()
        try:
            (row,) = gpu_parts.decode_attention(
                gpu_parts.Timer(backend.device), backend.model_config, backend.dtype, copy_gb_s=1.0, quick=False
            )
        finally:
            gc.enable()
        assert cuda.captures == captured + 1 and row["us"] > 0
        backend.close()


def test_what_a_backend_warns_of_is_in_the_figures_and_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_and_warn(case: gpu_check.Case) -> TorchBackend:
        warnings.warn("kernels are launched one by one", stacklevel=1)
        return open_backend(case)

    open_backend = bench_gpu.open_backend
    monkeypatch.setattr(bench_gpu, "open_backend", open_and_warn)
    figures = next(run := bench_gpu.measure(CASES["rehearsal"], True, ["sampling"]))
    run.close()
    (tmp_path / "kernels.json").write_text(json.dumps(figures))
    (tmp_path / "parts.txt").touch()
    gpu_report.write_page(tmp_path)
    assert "Warning: kernels are launched one by one." in (tmp_path / "README.md").read_text()


def test_the_benchmark_takes_as_many_layers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fits_one_layer(config: EngineConfig) -> str:
        tried.append(json.loads((Path(config.model) / "config.json").read_text())["num_hidden_layers"])
        if tried[-1] > 1:
            raise InsufficientMemory("0.01 GiB are missing")
        return "a backend"

    monkeypatch.setattr(bench_gpu, "open_torch_backend", fits_one_layer)
    assert bench_gpu.open_backend(CASES["rehearsal"]) == "a backend" and tried == [3, 1]
