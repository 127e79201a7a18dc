"""CPU attention workers: order, errors, a thread that dies, and tasks that leave the process."""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.engine.backend import AttentionFuture, WorkerDied
from swiftllm.runtime.cpu_tier import (
    AttentionTask,
    BlocksWrite,
    CpuTask,
    CpuWorker,
    InlineWorker,
    RowsWrite,
    TaskRunner,
    Worker,
)
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker

ROOT = Path(__file__).parents[3]
TASK = RowsWrite(0, torch.zeros(1, 2, 8), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))


@dataclass
class Arrival:
    """An event on whose ``synchronize`` something happens: what a task meets on the worker's thread."""

    on_wait: Callable[[], object] = int
    is_done: bool = False

    def done(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.on_wait()


@dataclass
class FakeRunner:
    """Notes tasks, and on which thread."""

    tasks: list[tuple[CpuTask, int]] = field(default_factory=list)

    def run_task(self, task: CpuTask) -> None:
        self.tasks.append((task, threading.get_ident()))


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def worker(runner: FakeRunner):
    worker = CpuWorker(runner)
    yield worker
    worker.close()


def submit(worker: Worker, on_wait: Callable[[], object] = int) -> AttentionFuture:
    return worker.submit(TASK, Arrival(on_wait))


def raising(error: BaseException) -> Callable[[], None]:
    def raise_it() -> None:
        raise error

    return raise_it


def died(future: AttentionFuture) -> bool:
    with pytest.raises(WorkerDied):
        future.wait()
    return future.ready()


def wait_for_death(worker: CpuWorker) -> None:
    """Until it takes no more tasks."""
    with pytest.raises(WorkerDied):
        while True:
            submit(worker).ready()


def test_tasks_run_in_order_on_one_other_thread(worker: CpuWorker, runner: FakeRunner) -> None:
    tasks = [RowsWrite(i, TASK.content, TASK.blocks, TASK.offsets) for i in range(100)]
    futures = [worker.submit(task, Arrival()) for task in tasks]
    assert all(future.wait() >= 0.0 for future in reversed(futures))
    assert [task for task, _ in runner.tasks] == tasks
    (thread,) = {thread for _, thread in runner.tasks}
    assert thread != threading.get_ident()


@pytest.mark.parametrize("make_worker", [InlineWorker, CpuWorker])
def test_waiting_for_the_device_is_no_computing(make_worker, runner: FakeRunner) -> None:
    worker, gate, sent = make_worker(runner), threading.Event(), []
    threading.Timer(0.5, gate.set).start()
    future = worker.submit(TASK, Arrival(gate.wait), lambda: sent.append(len(runner.tasks)))
    assert 0.0 <= future.wait() < 0.4 and future.ready()
    assert sent == [1], "the result is sent back once, after it is computed"
    times = future.times()
    assert times.to_host[1] - times.to_host[0] > 0.05
    assert times.to_host[1] == times.start_s <= times.done_s == times.ready_s
    there = worker.submit(TASK, Arrival(is_done=True))
    there.wait()
    assert there.times().to_host is None
    worker.close()


@pytest.mark.parametrize("make_worker", [InlineWorker, CpuWorker])
def test_a_task_that_raises_fails_its_own_attention_task(make_worker, runner: FakeRunner) -> None:
    worker = make_worker(runner)
    futures = [submit(worker, on_wait) for on_wait in (int, raising(ValueError("no")), int)]
    futures[0].wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            futures[1].wait()
    futures[2].wait()
    with pytest.raises(ValueError, match="back"):
        worker.submit(TASK, Arrival(), raising(ValueError("back"))).wait()
    worker.close()


def test_nothing_goes_on_after_a_death_until_it_is_started_again(worker: CpuWorker, runner: FakeRunner) -> None:
    gate = threading.Event()
    before = submit(worker, lambda: gate.wait(60.0))
    futures = [submit(worker, on_wait) for on_wait in (raising(SystemExit(1)), int, int)]
    gate.set()
    before.wait()
    assert all(map(died, futures))
    wait_for_death(worker)
    assert len(runner.tasks) == 1 and worker.restarts == 0
    worker.start_again()
    worker.start_again()
    assert worker.restarts == 1
    submit(worker).wait()


def test_killing_it(worker: CpuWorker) -> None:
    last = submit(worker)
    worker.kill()
    last.wait()
    wait_for_death(worker)
    worker.start_again()
    submit(worker).wait()
    assert worker.restarts == 1


def test_a_thread_killed_from_outside_leaves_no_attention_task_waiting(worker: CpuWorker, runner: FakeRunner) -> None:
    """Between two tasks, where it can fail no attention task any more."""
    submit(worker).wait()
    thread = ctypes.c_ulong(runner.tasks[0][1])
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(SystemExit))
    assert died(submit(worker))


def test_a_worker_that_died_can_be_closed(runner: FakeRunner) -> None:
    threads = threading.active_count()
    worker = CpuWorker(runner)
    worker.kill()
    worker.close()
    assert threading.active_count() == threads


# -- tasks in another process -----------------------------------------------------------------------------------------

OTHER_PROCESS = """
import pickle, sys
from swiftllm.runtime.cpu_tier import AttentionTask, TaskRunner

results = []
for pool, task in pickle.load(sys.stdin.buffer):
    TaskRunner(pool, kernel=sys.argv[1], num_threads=1).run_task(task)
    results.append((pool, task.out if isinstance(task, AttentionTask) else None))
pickle.dump(results, sys.stdout.buffer)
"""


class CopyingWorker:
    """Around a worker: copies each task and the CPU tier before it, and what they are after it."""

    def __init__(self, make_worker, runner: TaskRunner) -> None:
        self.before: list[bytes] = []
        self.after: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.pool: torch.Tensor | None = None
        self._runner = runner
        self.inner = make_worker(self)

    def run_task(self, task: CpuTask) -> None:
        self.before.append(pickle.dumps((self.pool, task)))
        self._runner.run_task(task)
        out = task.out.clone() if isinstance(task, AttentionTask) else None
        self.after.append((self.pool.clone(), out))

    def __getattr__(self, name: str):
        return getattr(self.inner, name)


def check_in_another_process(worker: CopyingWorker, kernel: str) -> None:
    sent = pickle.dumps([pickle.loads(pair) for pair in worker.before])
    command = [sys.executable, "-c", OTHER_PROCESS, kernel]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=sent, capture_output=True, env=environment, timeout=300, check=True)
    results = pickle.loads(done.stdout)
    for (pool, out), (expected_pool, expected_out) in zip(results, worker.after, strict=True):
        torch.testing.assert_close(pool, expected_pool, rtol=0, atol=0, equal_nan=True)
        if out is not None:
            assert out.isfinite().all()
            torch.testing.assert_close(out, expected_out, rtol=0, atol=0)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_tasks_of_a_backend_give_the_same_in_another_process(tiny_model_dir, on_gpu: bool) -> None:
    """Decodes of a CPU batch; beside a GPU also prompts' K and V, and blocks that are swapped."""
    sizes = {"num_gpu_blocks": 12, "num_cpu_blocks": 12, "max_num_seqs": 4, "max_model_len": 64, "cpu_threads": 1}
    config = EngineConfig(str(tiny_model_dir()), dtype="float32", device="auto" if on_gpu else "cpu", **sizes)
    workers: list[CopyingWorker] = []

    def make_worker(inner, runner: TaskRunner) -> CopyingWorker:
        workers.append(CopyingWorker(inner, runner))
        return workers[0]

    def drive(inner) -> BackendDriver:
        driver = BackendDriver(open_torch_backend(config, partial(make_worker, inner)))
        workers[0].pool = driver.backend.kv_pools.tensors[Tier.CPU]
        rng, tiers = random.Random(0), (Tier.CPU, Tier.CPU, Tier.GPU)
        requests = [
            driver.admit(f"r{i}", [rng.randrange(3, 128) for _ in range(n)], tier, SamplingParams(max_tokens=8))
            for i, (n, tier) in enumerate(zip((5, 17, 20), tiers, strict=True))
        ]
        driver.prefill(requests)
        driver.decode(requests)
        driver.move(requests[2:])
        driver.decode(requests)
        return driver

    if on_gpu:
        with fake_gpu(3) as cuda:
            driver = drive(partial(FakeWorker, cuda))
    else:
        driver = drive(InlineWorker)
    kinds = {type(pickle.loads(pair)[1]) for pair in workers[0].before}
    assert kinds == ({AttentionTask, RowsWrite, BlocksWrite} if on_gpu else {AttentionTask})
    check_in_another_process(workers[0], driver.backend.cpu_kernel)
