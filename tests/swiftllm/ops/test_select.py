"""Which operations a device gets, and what happens to caches in host memory beside a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.runtime import execution_context
from swiftllm.runtime.execution_context import select_ops, why_no_triton

GPU = torch.device("cuda")


@pytest.fixture
def pretend_gpu(monkeypatch):
    def pretend(name: str, major: int, minor: int, triton_is_there: bool = True) -> None:
        gpu = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=40)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        monkeypatch.setattr(execution_context, "find_spec", lambda name: triton_is_there or None)

    return pretend


def test_a_cpu_gets_operations_for_the_cpu():
    assert type(select_ops(torch.device("cpu"), torch.float32)) is CpuOps


@pytest.mark.parametrize("name, capability", [("Tesla T4", (7, 5)), ("NVIDIA A10", (8, 6)), ("NVIDIA H200", (9, 0))])
def test_a_gpu_gets_triton(pretend_gpu, name, capability):
    triton_ops = pytest.importorskip("swiftllm.ops.triton.ops", reason="Triton is not installed")
    pretend_gpu(name, *capability)
    assert type(select_ops(GPU, torch.float16)) is triton_ops.TritonOps


def test_prompts_of_new_lengths_need_no_plan_of_cudnn():
    triton_ops = pytest.importorskip("swiftllm.ops.triton.ops", reason="Triton is not installed")
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        triton_ops.TritonOps(GPU, 90, num_multiprocessors=132)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)


@pytest.mark.parametrize(
    "gpu, reason", [(("Tesla V100", 7, 0), "sm_75"), (("NVIDIA A10", 8, 6, False), "pip install triton")]
)
def test_what_keeps_triton_away_is_said(pretend_gpu, gpu, reason):
    pretend_gpu(*gpu)
    with pytest.warns(UserWarning, match=reason):
        assert type(select_ops(GPU, torch.float16)) is Ops
    assert reason in why_no_triton(10 * gpu[1] + gpu[2])


def test_what_triton_compiles_its_launchers_with_is_looked_for(pretend_gpu, monkeypatch, tmp_path):
    pretend_gpu("NVIDIA A10", 8, 6)
    assert why_no_triton(86) is None
    monkeypatch.setattr(execution_context.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"no {tmp_path}/Python.h: install python3-dev" in why_no_triton(86)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in why_no_triton(86)
    monkeypatch.setenv("CC", "cc-of-my-own")
    assert "Python.h" in why_no_triton(86)


def test_a_gpu_without_bfloat16_says_what_to_use(pretend_gpu):
    pretend_gpu("Tesla T4", 7, 5)
    with pytest.raises(ValueError, match="float16"):
        select_ops(GPU, torch.bfloat16)


def test_caches_in_host_memory_beside_a_gpu_are_left_to_the_host():
    triton_ops = pytest.importorskip("swiftllm.ops.triton.ops", reason="Triton is not installed")
    ops = triton_ops.TritonOps(GPU, 90, num_multiprocessors=132)
    pool = torch.randn(2, 5, 3, 2, 16, 8)
    k, v = torch.randn(2, 4, 3, 8)
    blocks, offsets = torch.tensor([4, 0, 4, 2]), torch.tensor([0, 15, 3, 3])
    ops.store_kv(k, v, pool[1], blocks, offsets)
    assert torch.equal(pool[1][blocks, :, 0, offsets], k) and torch.equal(pool[1][blocks, :, 1, offsets], v)
    staging, target = torch.empty(2, 3, 3, 2, 16, 8), torch.zeros_like(pool)
    ops.gather_blocks(pool, torch.tensor([4, 0, 2]), staging)
    ops.scatter_blocks(staging, target, torch.tensor([1, 3, 0]))
    assert torch.equal(target[:, [1, 3, 0]], pool[:, [4, 0, 2]]) and not target[:, [2, 4]].any()
