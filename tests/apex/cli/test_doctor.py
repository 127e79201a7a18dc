"""The doctor's report: right about this machine, and whole on machines that lack things."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from quantise import write_folder
from rich.console import Console

from apex.cli import doctor, main
from apex.cli.doctor import Finding
from pacpu import HEADS
from tests.gpu.judge import GPT_OSS
from tests.reference.tiny_model import make_tiny_llama

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit_bytes", lambda: 16 << 20)


def found(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


def test_the_engine_that_runs_these_tests_can_run(capsys):
    import torch

    import pacpu

    report = doctor.examine()
    assert doctor.can_run(report)
    assert found(report["Software"])["torch"].found == torch.__version__
    server = [found(report["Software"])[name] for name in ("fastapi", "uvicorn", "prometheus_client")]
    assert all(re.fullmatch(r"\d+\.\d+.*", package.found) for package in server)
    assert found(report["CPU attention"])["kernels"].found == ", ".join(pacpu.kernels())
    assert found(report["CPU attention"])["instructions"].found.startswith(pacpu.isa())
    assert found(report["CPU attention"])["int8"].found.startswith("native by ")
    assert set(pacpu.unavailable()) <= set(found(report["CPU attention"]))
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("The engine can run here.\n")


def test_kernels_not_built_is_a_finding_not_a_crash(tmp_path):
    (tmp_path / "pacpu").mkdir()
    for module in (REPO / "pacpu").glob("*.py"):
        shutil.copy(module, tmp_path / "pacpu")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPO)!r}]\n"
        "from apex.cli import main\n"
        "print('generate:', main(['generate', '/nowhere', 'hi'])); sys.exit(main(['doctor']))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert answer.returncode == 1, answer.stderr
    assert "pacpu: not built: type `make setup`" in answer.stdout and "cannot run here yet" in answer.stdout
    assert "generate: 2" in answer.stdout and "make setup" in answer.stderr and "Traceback" not in answer.stderr


def test_a_bare_machine_gets_a_whole_report(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("ISPC", raising=False)
    monkeypatch.setattr(doctor, "try_import", lambda name: (None, "not installed"))
    report = doctor.examine()
    assert not doctor.can_run(report)
    assert found(report["Software"])["torch"].status == "missing"
    assert "needed for apex serve only" in found(report["Software"])["fastapi"].found
    assert "install g++" in found(report["Compilers"])["C++"].found
    assert found(report["Compilers"])["ISPC"].status == "note"
    assert "make setup" in found(report["Files"])["model"].found
    assert found(report["Files"])["profile tables"].found.startswith("none yet")


def test_models_are_listed_with_their_quantisation(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    source = make_tiny_llama(tmp_path / "models" / "plain")
    write_folder(source, tmp_path / "models" / "awq", "awq", 32)
    shutil.copytree(source, tmp_path / "models" / "fp8")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "models" / "fp8" / "config.json").write_text(json.dumps(config))
    for name, layer_types in (("gpt-oss", None), ("gpt-oss odd", ["sliding_attention"] + 3 * ["full_attention"])):
        (tmp_path / "models" / name).mkdir()
        (tmp_path / "models" / name / "config.json").write_text(json.dumps(GPT_OSS | {"layer_types": layer_types}))
    lines = [finding.found for finding in doctor.files() if finding.what == "model"]
    assert lines[0].endswith("awq (4-bit AWQ, groups of 32)") and lines[4].endswith("plain")
    assert "fp8 (not supported: " in lines[1] and "quant_method='fp8'" in lines[1]
    assert lines[2].endswith("gpt-oss (4-bit MXFP4, groups of 32)")
    assert "gpt-oss odd (not supported: " in lines[3] and "a window in 1 of 4 layers (none, half or all" in lines[3]


def test_a_compiler_that_does_not_run_is_said(monkeypatch, tmp_path):
    broken = tmp_path / "ispc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("ISPC", str(broken))
    assert "does not run" in found(list(doctor.compilers()))["ISPC"].found


def test_a_containers_memory_limit_is_what_can_be_taken(monkeypatch, tmp_path):
    """Of a container's 100 MiB 40 are used, 10 of them by files that can be dropped."""
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{100 << 20}\n")
    (group / "memory.current").write_text(f"{40 << 20}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {10 << 20}\n")
    monkeypatch.setattr("swiftllm.machine.ROOT", tmp_path)
    assert found(list(doctor.machine()))["memory"].found.startswith("0.1 GiB available of ")


def test_short_of_memory_nothing_is_measured():
    (finding,) = doctor.bandwidth(2, available_bytes=1 << 20)
    assert "not measured" in finding.found and finding.status == "note"


def test_without_torch_the_rest_is_told(monkeypatch):
    real = doctor.try_import
    monkeypatch.setattr(doctor, "try_import", lambda name: (None, "gone") if name == "torch" else real(name))
    (finding,) = doctor.bandwidth(2, 1 << 40)
    assert finding.found == "not measured: it needs torch" and finding.status == "note"
    assert "kernels" in found(list(doctor.cpu_kernels()))


def test_bandwidth_is_the_limit_that_is_used_elsewhere(monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit", lambda threads: threads * 7e9)
    told = {finding.what: finding.found for finding in doctor.bandwidth(3, 1 << 40)}
    assert told == {
        "read, 1 thread": "7.0 GB/s (best pass over 16 MiB)",
        "read, 3 threads": "21.0 GB/s (best pass over 16 MiB)",
    }


def test_the_measured_choices_of_cpu_attention_are_told(monkeypatch, tmp_path):
    from swiftllm.runtime import cpu_tuning

    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    unmeasured = found(list(doctor.cpu_kernels()))
    assert unmeasured["prefetch"].found.startswith("into L1")
    for what in ("prefetch", "shared blocks"):
        assert "first start" in unmeasured[what].found and unmeasured[what].status == "note"
    kinds = [f"{dtype} {heads}" for dtype in cpu_tuning.DTYPES for heads in HEADS]
    costs = {kind: 0.25 if kind.endswith("MHA") else 0.95 for kind in kinds}
    rates = {kind: {"none": 3.0, "L2": 21.0, "L1": 20.5} for kind in kinds}
    rates["int8 MHA"] = rates["int8 MHA"] | {"L2 AVX2": 20.0, "L1 AVX2": 25.0}
    path = cpu_tuning.kept_path()
    path.parent.mkdir()
    path.write_text(json.dumps({"rates": rates, "shared_row_costs": costs}))
    measured = found(list(doctor.cpu_kernels()))
    assert measured["prefetch, float16 MHA"].found == "L2: measured 21.0 GB/s of K and V; none 3.0, L1 20.5"
    assert measured["prefetch, int8 MHA"].found.startswith("L1 AVX2: measured 25.0 GB/s")
    told = measured["shared blocks, float16 MHA"].found
    assert told == "read once: a further row costs 0.25 of a row's own block"
    assert measured["shared blocks, float16 GQA"].found.startswith("read by each row: ")


def test_page_for_terminals_and_lines_for_files():
    report = {"One": [Finding("a", "text in [brackets]"), Finding("b", "gone", "missing")], "Two": [Finding("c", "x")]}
    terminal = io.StringIO()
    doctor.print_report(report, Console(file=terminal, force_terminal=True, color_system=None, width=100))
    lines = [line.split() for line in terminal.getvalue().splitlines()]
    assert lines[0] == ["One", "ok", "a", "text", "in", "[brackets]"] and lines[1] == ["NO", "b", "gone"]
    plain = io.StringIO()
    doctor.print_report(report, Console(file=plain))
    assert plain.getvalue().splitlines()[:2] == ["One: a: text in [brackets] [ok]", "One: b: gone [missing]"]
    assert "cannot run here yet" in plain.getvalue()


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str, major: int, minor: int) -> None:
    import torch

    card = SimpleNamespace(name=name, major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (20 << 30, 24 << 30))


def test_a_gpu_is_told_what_multiplies_4_bit_weights_and_experts(monkeypatch, tmp_path):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    source = make_tiny_llama(tmp_path / "models" / "plain")
    grouped = pytest.importorskip("swiftllm.ops.triton.matrices", reason="Triton is not installed")
    pretend_gpus(monkeypatch, 1, "Tesla T4", 7, 5)
    monkeypatch.setattr("swiftllm.ops.library.installed_version", lambda: None)
    finding = found(list(doctor.gpus()))["4-bit weights"]
    assert finding.status == "note" and "`pip install 'humming-kernels[cu" in finding.found
    monkeypatch.setattr("swiftllm.ops.library.installed_version", lambda: "0.1.19")
    assert found(list(doctor.gpus()))["4-bit weights"] == Finding(
        "4-bit weights",
        "multiplied on Tesla T4 in float16 by humming-kernels 0.1.19, where it measures faster at the start",
    )
    finding = found(list(doctor.gpus()))["experts"]
    assert finding.status == "note" and f"{grouped.SUMMED_ROWS} rows of an expert at a time" in finding.found
    pretend_gpus(monkeypatch, 1, "A10", 8, 6)
    findings = found(list(doctor.gpus()))
    assert "experts" not in findings and "on A10 in 16 bits by humming-kernels" in findings["4-bit weights"].found
    monkeypatch.setattr("swiftllm.ops.library.installed_version", lambda: None)
    assert not {"4-bit weights", "experts"} & set(found(list(doctor.gpus())))
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
    write_folder(source, tmp_path / "models" / "packed", "awq", 32)
    finding = found(list(doctor.gpus()))["4-bit weights"]
    assert finding.status == "note" and "on A10 by the own kernels" in finding.found
    assert "`pip install 'humming-kernels[cu" in finding.found


@pytest.mark.parametrize(("has_nccl", "status", "words"), [(True, "ok", "up to 2"), (False, "note", "lacks NCCL")])
def test_several_gpus_may_share_a_model(monkeypatch, has_nccl: bool, status: str, words: str):
    import torch

    pretend_gpus(monkeypatch, 2, "A10", 8, 6)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    finding = found(list(doctor.gpus()))["several GPUs"]
    assert finding.status == status and words in finding.found
