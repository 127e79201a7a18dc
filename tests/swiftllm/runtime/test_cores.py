"""How many threads the GPU batch and the CPU attention worker get when nobody says."""

from __future__ import annotations

import sys

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.ops.cpu import CpuOps
from swiftllm.runtime import execution_context
from swiftllm.runtime.cpu_tier import InlineWorker, TaskRunner
from swiftllm.runtime.execution_context import CoreDivision, core_divisions, most_gpu_batch_threads
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.fake_gpu import FakeOps, fake_gpu


@pytest.fixture(autouse=True)
def nothing_is_asked_for(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def threads(
    num_cores: int, monkeypatch, without_gpu: bool = True, physical: int = 64, **asked: int
) -> list[tuple[int, int]]:
    monkeypatch.setattr(execution_context, "usable_cores", lambda: num_cores)
    monkeypatch.setattr(execution_context, "physical_cores", lambda: physical)
    divisions = core_divisions(EngineConfig("folder", **asked), without_gpu=without_gpu)
    return [(division.gpu_batch_threads, division.cpu_threads) for division in divisions]


def test_a_gpu_batch_on_the_cpu_may_have_all_cores_or_leave_some_to_the_worker(monkeypatch):
    assert threads(16, monkeypatch) == [(16, 16), (8, 8), (4, 12)]
    assert threads(2, monkeypatch) == [(2, 2), (1, 1)]
    assert threads(1, monkeypatch) == [(1, 1)]
    assert threads(16, monkeypatch, cpu_threads=3) == [(16, 3), (8, 3), (4, 3)]


@pytest.mark.parametrize(
    ("asked", "expected"), [("1", [(1, 15)]), ("6,2", [(6, 10), (4, 12)]), ("99", None), ("x", None)]
)
def test_openmp_threads_that_are_asked_for_bound_the_gpu_batch(monkeypatch, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads(16, monkeypatch) == (expected or [(16, 16), (8, 8), (4, 12)])


def test_beside_a_gpu_cpu_attention_may_leave_the_second_threads_of_cores_alone(monkeypatch):
    assert threads(16, monkeypatch, without_gpu=False, physical=8) == [(1, 15), (1, 7), (1, 8)]
    assert threads(16, monkeypatch, without_gpu=False, physical=16) == [(1, 15), (1, 8)]
    assert threads(2, monkeypatch, without_gpu=False, physical=1) == [(1, 1)]
    assert threads(16, monkeypatch, without_gpu=False, physical=8, tensor_parallel=2) == [(1, 7), (1, 3), (1, 4)]


def test_a_server_beside_a_gpu_leaves_two_hardware_threads_from_four_on(monkeypatch):
    monkeypatch.setattr(execution_context, "_server", execution_context._Server())
    alone = {n: threads(n, monkeypatch, without_gpu=False, physical=n) for n in range(1, 5)}
    assert [divisions[0] for divisions in alone.values()] == [(1, 1), (1, 1), (1, 2), (1, 3)]
    execution_context.serve_from_here()
    for few in (1, 2, 3):
        assert threads(few, monkeypatch, without_gpu=False, physical=few) == alone[few]
    assert threads(4, monkeypatch, without_gpu=False, physical=2) == [(1, 2), (1, 1)]
    assert threads(4, monkeypatch, without_gpu=False, physical=4) == [(1, 2)]
    assert threads(8, monkeypatch, without_gpu=False, physical=4) == [(1, 6), (1, 3), (1, 4)]
    assert threads(8, monkeypatch, without_gpu=False, physical=8) == [(1, 6), (1, 4)]
    assert threads(16, monkeypatch, without_gpu=False, physical=8, tensor_parallel=2) == [(1, 6), (1, 3), (1, 4)]
    assert threads(8, monkeypatch, without_gpu=False, physical=4, cpu_threads=7) == [(1, 7)]
    assert threads(16, monkeypatch) == [(16, 16), (8, 8), (4, 12)]  # without a GPU as ever


def test_nothing_is_left_to_choose_when_threads_are_given(monkeypatch):
    assert threads(16, monkeypatch, gpu_batch_threads=6) == [(6, 10)]
    assert threads(16, monkeypatch, gpu_batch_threads=16) == [(16, 16)]
    assert threads(16, monkeypatch, gpu_batch_threads=6, cpu_threads=2) == [(6, 2)]
    assert threads(16, monkeypatch, without_gpu=False, gpu_batch_threads=6, cpu_threads=8) == [(1, 8)]
    assert threads(1, monkeypatch, without_gpu=False) == [(1, 1)]


def test_a_backend_computes_with_the_threads_it_is_given(tiny_model_dir, monkeypatch):
    config = EngineConfig(str(tiny_model_dir()), device="cpu", dtype="float32", num_gpu_blocks=1, num_cpu_blocks=1)
    set_threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_threads.append)
    monkeypatch.setattr(execution_context, "usable_cores", lambda: 3)
    ops = CpuOps()
    monkeypatch.setattr("swiftllm.runtime.execution_context.select_ops", lambda *_: ops)
    backend = open_torch_backend(config)
    assert (backend.cores.gpu_batch_threads, backend.cores.cpu_threads) == (3, 3)
    backend.use_cores(CoreDivision(2, 1, "for the test"))
    assert set_threads == [3, 2] and ops.num_threads == 2
    assert backend.cores.gpu_batch_input() == "2 threads (for the test)"


def test_beside_a_gpu_torch_has_no_threads_that_wait_on_the_workers_cores(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(execution_context, "usable_cores", lambda: 4)
    options = {"num_gpu_blocks": 4, "num_cpu_blocks": 4, "max_num_seqs": 1, "max_model_len": 64}
    config = EngineConfig(str(tiny_model_dir()), dtype="float32", **options)
    torch.set_num_threads(2)
    try:
        with fake_gpu(0, can_capture=False) as cuda, monkeypatch.context() as patch:
            ops = FakeOps(cuda)
            patch.setattr("swiftllm.runtime.execution_context.select_ops", lambda *_: ops)
            backend = open_torch_backend(config)
        assert torch.get_num_threads() == backend.cores.gpu_batch_threads == 1 and ops.num_threads == 3
    finally:
        torch.set_num_threads(1)


def test_a_thread_that_wakes_up_gets_the_interpreter_within_a_millisecond_outside_a_server_too(tiny_model_dir):
    """Python's default is 5 ms, more than a layer takes. It is set before the worker's thread exists."""
    config = EngineConfig(str(tiny_model_dir()), device="cpu", dtype="float32", num_gpu_blocks=1, num_cpu_blocks=1)
    seen: list[float] = []

    def make_worker(runner: TaskRunner) -> InlineWorker:
        seen.append(sys.getswitchinterval())
        return InlineWorker(runner)

    sys.setswitchinterval(0.005)
    open_torch_backend(config, make_worker)
    assert seen and all(interval == pytest.approx(0.001) for interval in seen)


def test_no_more_openmp_threads_than_cores(monkeypatch):
    """OMP_NUM_THREADS may be that of a larger machine."""
    for asked, most in (("99", 16), ("16", 16), ("6", 6), ("0", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert most_gpu_batch_threads(16) == most
