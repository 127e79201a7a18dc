"""What the launching thread is spared: copies of earlier chunks, and waiting for swaps of layers that come later."""

from __future__ import annotations

import random
import threading
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest

import swiftllm.runtime.kv_transfers
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.runtime.cpu_tier import BlocksRead, BlocksWrite, CpuTask, CpuWorker, InlineWorker, TaskRunner
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeFuture, FakeWorker
from tests.reference.host_copies import counted_host_copies

LAYERS = 3


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir) -> Path:
    return tiny_model_dir(num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiftllm.runtime.kv_transfers, "CHUNK_BYTES", 1)


def make_driver(model_dir: Path, make_worker=InlineWorker) -> BackendDriver:
    config = EngineConfig(
        str(model_dir), dtype="float32", num_gpu_blocks=12, num_cpu_blocks=12, max_num_batched_tokens=64,
        max_num_seqs=4, max_model_len=64,
    )  # fmt: skip
    return BackendDriver(open_torch_backend(config, make_worker))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(length)]


def tokens_of_chunks(driver: BackendDriver) -> dict[str, int]:
    """The first tokens of prompts for the CPU tier in chunks."""
    requests = [
        driver.admit(f"r{i}", prompt(length, i), Tier.CPU, SamplingParams(max_tokens=2))
        for i, length in enumerate((40, 23))
    ]
    return driver.prefill(requests, 11)


@pytest.mark.parametrize("seed", range(3))
def test_the_launching_thread_copies_nothing_of_earlier_chunks(model_dir, seed):
    expected = tokens_of_chunks(make_driver(model_dir))
    with fake_gpu(seed, can_capture=False) as cuda:
        driver = make_driver(model_dir, partial(FakeWorker, cuda))
        backend, attend, copied = driver.backend, driver.backend.gpu_attention, []

        def counted_attention(*arguments) -> None:
            with counted_host_copies() as copies:
                attend(*arguments)
            copied.append(copies.num_bytes)

        backend.gpu_attention = counted_attention
        assert tokens_of_chunks(driver) == expected
    assert len(copied) == 4 * LAYERS
    assert copied == [0] * len(copied)


class GatedRunner:
    """Keeps blocks of all layers but the first back until the gate opens."""

    def __init__(self, runner: TaskRunner, gate: threading.Event) -> None:
        self.runner, self.gate, self.has_waited_in_vain = runner, gate, False

    def run_task(self, task: CpuTask) -> None:
        if isinstance(task, BlocksRead) and task.layers.start > 0 and not self.gate.wait(10.0):
            self.has_waited_in_vain = True
        self.runner.run_task(task)


def test_a_layer_waits_for_its_own_part_of_a_swap_alone(model_dir):
    """The first layer does not wait for the others. These do wait: their blocks come late, and are NaN before."""
    gate, runners = threading.Event(), []

    def make_worker(runner: TaskRunner) -> CpuWorker:
        runners.append(GatedRunner(runner, gate))
        return CpuWorker(runners[-1])

    def decoded(driver: BackendDriver, after_first_layer=lambda: None) -> int:
        request = driver.admit("r", prompt(40, 0), Tier.CPU, SamplingParams(max_tokens=4, ignore_eos=True))
        driver.prefill([request], 11)
        driver.move([request])
        backend = driver.backend
        gpu_batch = backend.open_gpu_batch([GpuBatchItem(request, request.num_tokens - 1, 1, Tier.GPU, False)])
        backend.run_stage(-1, [gpu_batch])
        backend.gpu_attention(0, gpu_batch)
        after_first_layer()
        for layer in range(LAYERS - 1):
            backend.run_stage(layer, [gpu_batch])
            backend.gpu_attention(layer + 1, gpu_batch)
        token = backend.run_stage(LAYERS - 1, [gpu_batch])["r"]
        backend.close()
        return token

    expected = decoded(make_driver(model_dir))
    assert decoded(make_driver(model_dir, make_worker), threading.Timer(0.1, gate.set).start) == expected
    assert runners and not any(runner.has_waited_in_vain for runner in runners)


@pytest.mark.parametrize("make_worker", [InlineWorker, CpuWorker])
def test_a_swap_that_fails_is_told_to_the_gpu_batch_and_nothing_is_under_way_after_recovery(model_dir, make_worker):
    class FailingRunner:
        def __init__(self, runner: TaskRunner) -> None:
            self.runner = runner

        def run_task(self, task: CpuTask) -> None:
            if isinstance(task, BlocksRead) and task.layers.start == 1:
                raise ValueError("no such block")
            self.runner.run_task(task)

    driver = make_driver(model_dir, lambda runner: make_worker(FailingRunner(runner)))
    request = driver.admit("r", prompt(20, 0), Tier.CPU, SamplingParams(max_tokens=4, ignore_eos=True))
    driver.prefill([request])
    with pytest.raises(ValueError, match="no such block"):
        driver.move([request])
        driver.run([GpuBatchItem(request, request.num_tokens - 1, 1, Tier.GPU, False)])
    driver.backend.recover()
    driver.backend.await_swaps()
    fresh = driver.admit("again", prompt(20, 0), Tier.CPU, SamplingParams(max_tokens=4))
    assert driver.prefill([fresh], 7) == {"again": request.output_token_ids[0]}
    driver.backend.close()


def noted_copies(driver: BackendDriver, log: list[str]) -> None:
    """Note the calls that move whole blocks to and from the CPU tier by their layer, and those of the GPU batch."""
    backend, tier = driver.backend, driver.backend.cpu_tier

    def noted(name: str, call):
        def noting(first, *rest):
            log.append(f"{name} {first}")
            return call(first, *rest)

        return noting

    def noted_task(call):
        def noting(task, *rest):
            if isinstance(task, (BlocksRead, BlocksWrite)):
                log.append(f"copy {task.layers.start}")
            return call(task, *rest)

        return noting

    backend.run_stage, backend.gpu_attention = (
        noted("run_stage", backend.run_stage),
        noted("enter", backend.gpu_attention),
    )
    tier.read, tier.write = noted_task(tier.read), noted_task(tier.write)


def decode_item(request: Request) -> GpuBatchItem:
    return GpuBatchItem(request, request.num_tokens - 1, 1, Tier.GPU, False)


GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("source", Tier)
def test_parts_of_a_swap_begin_between_the_launches_of_the_gpu_batch(model_dir, monkeypatch, source):
    """Only the first one before the GPU batch, which no part but its layer's holds up, however little may be staged."""
    log, waits, wait = [], [], FakeFuture.wait

    def noted_wait(future: FakeFuture) -> float:
        if not future.is_over():
            waits.append(future)
        return wait(future)

    with fake_gpu(0, can_capture=False) as cuda:
        driver = make_driver(model_dir, partial(FakeWorker, cuda))
        moving = driver.admit("r", prompt(40, 0), source, GREEDY)
        staying = driver.admit("s", prompt(9, 1), Tier.GPU, GREEDY)
        driver.prefill([moving, staying])
        tier, blocks = driver.backend.kv_pools.tensors[Tier.GPU], driver.tables["r"]
        of_layer = tier[0, 0].nbytes * len(blocks)
        monkeypatch.setattr("swiftllm.runtime.cpu_tier.MAX_STAGED_BYTES", of_layer)
        noted_copies(driver, log)
        monkeypatch.setattr(FakeFuture, "wait", noted_wait)
        swap = Swap(moving, source, tuple(blocks), tuple(driver.free[source.other][: len(blocks)]))
        driver.backend.swap([swap])
        assert not waits and set(log) == {"copy 0"}
        driver.run([decode_item(staying)])
    calls = [name for name, _ in groupby(log)]
    assert calls == [
        "copy 0", "run_stage -1", "enter 0", "copy 1", "run_stage 0", "enter 1", "copy 2", "run_stage 1", "enter 2",
        "run_stage 2",
    ]  # fmt: skip
    assert log.count("copy 1") == len(blocks)


@pytest.mark.parametrize("seed", range(3))
def test_a_cpu_batch_ahead_of_the_gpu_batch_finds_what_was_swapped(model_dir, seed):
    def token(driver: BackendDriver) -> int:
        request = driver.admit("r", prompt(40, 0), Tier.GPU, GREEDY)
        driver.prefill([request])
        driver.move([request])
        backend = driver.backend
        cpu_batch = backend.open_cpu_batch([request])
        for layer in range(LAYERS):
            backend.run_stage(layer - 1, [cpu_batch])
            backend.submit_cpu_attention(layer, cpu_batch).wait()
        return backend.run_stage(LAYERS - 1, [cpu_batch])["r"]

    expected = token(make_driver(model_dir))
    with fake_gpu(seed, can_capture=False) as cuda:
        assert token(make_driver(model_dir, partial(FakeWorker, cuda))) == expected


def test_parts_that_have_not_begun_are_given_up_after_a_failure(model_dir):
    log = []
    with fake_gpu(0, can_capture=False) as cuda:
        driver = make_driver(model_dir, partial(FakeWorker, cuda))
        request = driver.admit("r", prompt(20, 0), Tier.GPU, GREEDY)
        noted_copies(driver, log)
        driver.backend.swap([Swap(request, Tier.GPU, (0, 1), (2, 3))])
        driver.backend.recover()
        driver.backend.await_swaps()
    assert log == ["copy 0", "copy 0"]


def test_what_another_host_may_lose_moves_at_once(model_dir):
    """So that its death leaves nothing of an earlier plan's swaps unknown."""
    log = []
    with fake_gpu(0, can_capture=False) as cuda:
        driver = make_driver(model_dir, partial(FakeWorker, cuda))
        driver.backend.cpu_tier.may_die = True
        request = driver.admit("r", prompt(20, 0), Tier.GPU, GREEDY)
        noted_copies(driver, log)
        driver.backend.swap([Swap(request, Tier.GPU, (0,), (2,))])
    assert log == [f"copy {layer}" for layer in range(LAYERS)]
