"""Engines of several ranks: the tokens of one rank, whatever is slow, and whoever dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from apex.build import build_system
from swiftllm.core.request import FinishReason, SamplingParams
from swiftllm.engine.backend import RankFailed
from swiftllm.machine import allowed_cores, describe_cores
from swiftllm.model.llama import LlamaModel
from swiftllm.parallel.backend import ShardedFuture, open_sharded_backend
from swiftllm.parallel.communication import Group as RankGroup
from swiftllm.parallel.team import SpawnedRanks
from swiftllm.runtime.cpu_tier import CpuWorker
from swiftllm.runtime.model_input import CpuBatchTensors
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest
from tests.apex.rank_group import TOKENS, Group, run, run_on
from tests.apex.test_end_to_end import (
    FOR_BEST_EFFORT,
    GPU_ONLY,
    VARIANTS,
    offloading_iterations,
)
from tests.reference.ranks import LAUNCHER, delay_attention, tell_ranks
from tests.reference.tiny_model import TINY, make_tiny_llama
from tests.swiftllm.server.serving import serve

SLOW = bool(os.environ.get("APEX_SLOW_TESTS"))
HUNG_S = 10.0  # after which ranks count as waiting for each other
LONG_S = 120.0  # for what comes at once, on a busy machine too
SYSTEMS = [name for name in VARIANTS if not name.endswith("-synchronous")]  # a group of its own each: slow
FEW_SYSTEMS = ["apex-overlap", "neo", "swiftllm"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    group = Group(make_tiny_llama(tmp_path_factory.mktemp("llama"), vocab_size=129), 2)  # 129 tokens: one is padding
    yield group
    group.close()


@pytest.mark.parametrize("variant", SYSTEMS)
def test_two_ranks_give_the_tokens_of_transformers(llama: Group, variant: str) -> None:
    engine = llama.engine(variant)
    requests = llama.add(engine)
    run(engine)
    llama.check(requests)
    if VARIANTS[variant][0] not in (*GPU_ONLY, *FOR_BEST_EFFORT):
        assert offloading_iterations(engine.stats())


def test_aborted_requests_leave_their_cpu_batches_on_all_ranks(llama: Group, monkeypatch) -> None:
    kept: list[int] = []
    keep_rows = TorchBackend.keep_rows

    def spy(backend: TorchBackend, cpu_batch: CpuBatchTensors, rows: list[int]) -> CpuBatchTensors:
        kept.append(len(rows))
        return keep_rows(backend, cpu_batch, rows)

    monkeypatch.setattr(TorchBackend, "keep_rows", spy)
    engine, draw = llama.engine("adaptive-free-running"), random.Random(0)
    for _ in range(20):  # most often one round is enough
        requests = llama.add(engine)
        for request in draw.sample(requests, 3):
            for _ in range(draw.randrange(1, 5)):
                engine.step()
            engine.abort(request.request_id)
        run(engine)
        for request, expected in zip(requests, llama.expected, strict=True):
            tokens = tuple(request.output_token_ids)
            assert tokens == expected[: len(tokens)]
            assert tokens == expected or request.finish_reason is FinishReason.ABORT
        if kept:
            break
    assert kept, "no CPU batch had to go on with fewer rows"


def test_a_rank_holds_its_share_of_the_kv_cache(llama: Group) -> None:
    alone = open_torch_backend(replace(llama.config, tensor_parallel=1))
    for tier, pool in alone.kv_pools.tensors.items():
        assert llama.backend.kv_pools.tensors[tier].nbytes * 2 == pool.nbytes
    alone.close()


def test_each_rank_keeps_to_its_cores(llama: Group) -> None:
    cores = llama.backend.team.rank_cores
    if not cores:
        pytest.skip("one core cannot be divided among two ranks")
    for pid, own in zip((os.getpid(), llama.peers()[0].process.pid), cores, strict=True):
        threads = {path: os.sched_getaffinity(int(path.name)) for path in Path(f"/proc/{pid}/task").iterdir()}
        strays = {path.joinpath("comm").read_text(): cores for path, cores in threads.items() if cores != set(own)}
        assert len(threads) > 1 and not strays
    assert not set(cores[0]) & set(cores[1]) and allowed_cores() == set(cores[0]) | set(cores[1])
    (line,) = (line for line in llama.engine("swiftllm").describe()["kv_cache"] if line.startswith("Cores "))
    assert line == f"Cores of the ranks: rank 0: {describe_cores(cores[0])}, rank 1: {describe_cores(cores[1])}"


def test_log_probabilities_are_those_of_one_rank(llama: Group) -> None:
    found = []
    sampling = SamplingParams(4, temperature=0.8, seed=3, logprobs=2, prompt_logprobs=1)
    alone = replace(llama.config, tensor_parallel=1)
    for engine in (llama.engine("swiftllm"), build_system("swiftllm", alone)):
        requests = [
            engine.add(engine.make_request(str(i), prompt, sampling)) for i, prompt in enumerate(llama.prompts[1:4])
        ]
        run(engine)
        found.append(requests)
    for two, one in zip(*found, strict=True):
        assert two.output_token_ids == one.output_token_ids
        for name in ("prompt_logprobs", "logprobs"):
            logprobs = [[entry.logprob for entry in getattr(request, name)] for request in (two, one)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4) and logprobs[0]


def test_an_iteration_has_two_all_reduces_a_layer_and_one_of_the_embedding(llama: Group, monkeypatch) -> None:
    count, all_reduce = 0, RankGroup.all_reduce

    def counted(group: RankGroup, tensor):
        nonlocal count
        count += 1
        return all_reduce(group, tensor)

    monkeypatch.setattr(RankGroup, "all_reduce", counted)
    engine = llama.engine("swiftllm")
    engine.add(engine.make_request("a", [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)))
    run(engine)
    assert count == 4 * (2 * TINY["num_hidden_layers"] + 1)


@pytest.mark.parametrize("variant", ["apex-overlap", "adaptive-free-running"])
def test_attention_tasks_that_are_late_on_either_rank_change_no_token(llama: Group, variant: str) -> None:
    """Each attention task is delayed at random on each rank, so the ranks finish them in different iterations."""
    engine, iterations = llama.engine(variant), 0
    delay_attention(llama.backend, 0.05, 1)
    tell_ranks(llama.backend, "delay_attention", 0.05, 2)
    try:
        while iterations < (300 if SLOW else 40):
            requests = llama.add(engine)
            before = engine.stats().iterations
            run(engine)
            llama.check(requests)
            iterations += engine.stats().iterations - before
    finally:
        delay_attention(llama.backend, 0.0, 1)
        tell_ranks(llama.backend, "delay_attention", 0.0, 2)


def test_ranks_that_decide_for_themselves_are_found_out(llama: Group, monkeypatch) -> None:
    """The fault against which the driver decides for all: each rank looks at its own attention tasks, and they run a
    stage with unequal rows."""
    engine = llama.engine("apex-overlap")
    requests = llama.add(engine)
    monkeypatch.setattr(ShardedFuture, "ready", lambda future: future.own.ready())
    monkeypatch.setattr(ShardedFuture, "wait", lambda future: future.own.wait())
    tell_ranks(llama.backend, "delay_attention", 0.5, 2)
    tell_ranks(llama.backend, "decide_alone", True)
    outcome: list[Exception] = []

    def run_and_check() -> None:
        try:
            run(engine)
            llama.check(requests)
        except (Exception, AssertionError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run_and_check)
    thread.start()
    thread.join(HUNG_S)
    assert thread.is_alive() or outcome, "the fault went unnoticed"
    for peer in llama.peers():
        peer.process.kill()  # which releases the driver
    thread.join(LONG_S)
    assert not thread.is_alive() and outcome
    monkeypatch.undo()
    engine.recover()
    requests = llama.add(engine)
    run(engine)
    llama.check(requests)


@pytest.mark.parametrize("number", range(20 if SLOW else 3))
def test_a_rank_that_is_killed_is_replaced(llama: Group, number: int) -> None:
    variant = FEW_SYSTEMS[number % 3]
    engine, draw = llama.engine(variant), random.Random(number)
    requests = llama.add(engine)
    (peer,) = llama.peers()

    steps = draw.randrange(2, 8)
    for _ in range(steps):
        engine.step()
    killer = threading.Timer(draw.uniform(0.0, 0.02), os.kill, (peer.process.pid, signal.SIGKILL))
    killer.start()
    error = run_on(engine)
    killer.join()
    assert isinstance(error, RankFailed) and "rank 1 has died" in str(error)
    assert peer.is_dead.is_set()
    run(engine)
    llama.check(requests)
    assert not Path(f"/proc/{peer.process.pid}").exists()


def test_a_rank_that_dies_while_nothing_runs_is_noticed_and_replaced(llama: Group) -> None:
    (peer,) = llama.peers()
    engine = llama.engine("swiftllm")
    restarts = engine.stats().worker_restarts
    os.kill(peer.process.pid, signal.SIGKILL)
    assert peer.is_dead.wait(LONG_S)
    requests = llama.add(engine)
    error = run_on(engine)
    assert isinstance(error, RankFailed)
    run(engine)
    llama.check(requests)
    assert engine.stats().worker_restarts == restarts + 1


@pytest.mark.parametrize("num_deaths", [1, 3])
def test_a_rank_whose_replacement_dies_while_it_loads(llama: Group, monkeypatch, num_deaths: int) -> None:
    """Another one takes its place, at the third try at last; and later the engine may be recovered anew."""
    engine, start, started = llama.engine("neo"), LAUNCHER.start, []
    requests = llama.add(engine)
    engine.step()

    def start_mortal(*where):
        process, channel = start(*where)
        started.append(process)
        if len(started) <= num_deaths:
            process.kill()
        return process, channel

    monkeypatch.setattr(LAUNCHER, "start", start_mortal)
    os.kill(llama.peers()[0].process.pid, signal.SIGKILL)
    with pytest.raises(RankFailed):
        run(engine)
    if num_deaths == 3:
        unfinished = [request for request in requests if not request.is_finished]
        with pytest.raises(RankFailed, match="rank 1 has died"):
            engine.recover()
        assert len(started) == 3 and unfinished
    for request in engine.recover():
        engine.add(request, check_targets=False)
    run(engine)
    llama.check(requests)
    assert len(started) == num_deaths + 1 and all(process.poll() is not None for process in started[:-1])


def test_a_server_goes_on_when_a_rank_is_killed(llama: Group, monkeypatch) -> None:
    engine = llama.engine("neo")
    monkeypatch.setattr(engine, "close", lambda: None)  # the group serves other tests
    sampling = SamplingParams(TOKENS)
    requests = [NewRequest(str(i), prompt, sampling) for i, prompt in enumerate(llama.prompts)]
    killer = threading.Timer(0.3, llama.peers()[0].process.kill)
    monkeypatch.setattr(
        EngineService, "start", lambda self, link, start=EngineService.start: (killer.start(), start(self, link))
    )
    delay_attention(llama.backend, 0.05, 1)
    outcomes, service = serve(engine, requests)
    delay_attention(llama.backend, 0.0, 1)
    assert [tuple(outcomes[new.request_id].token_ids) for new in requests] == llama.expected
    assert service.snapshot().step_failures >= 1 and service.snapshot().worker_restarts >= 1


def test_a_rank_that_fails_says_why_and_goes_on(llama: Group) -> None:
    """It leaves the group, which releases the driver, and keeps its weights."""
    engine = llama.engine("apex-overlap")
    requests = llama.add(engine)
    before = llama.peers()[0].process.pid
    engine.step()
    tell_ranks(llama.backend, "fail_after", 9)
    error = run_on(engine)
    assert isinstance(error, RankFailed)
    assert str(error) == "rank 1 failed: ValueError: cannot digest this stage"
    run(engine)
    llama.check(requests)
    assert llama.peers()[0].process.pid == before


def test_a_rank_whose_gpu_has_failed_says_why_and_is_replaced(llama: Group, monkeypatch) -> None:
    """Its process lives, and answers with the same error whatever it is told: only a new one has a GPU that works."""
    monkeypatch.setattr("swiftllm.parallel.team.RESET_S", 0.3)
    engine = llama.engine("apex-overlap")
    requests = llama.add(engine)
    lost = llama.peers()[0].process
    engine.step()
    tell_ranks(llama.backend, "lose_gpu")
    error = run_on(engine)
    assert isinstance(error, RankFailed)
    assert str(error) == "rank 1 failed: RuntimeError: CUDA error: an illegal memory access was encountered"
    run(engine)
    llama.check(requests)
    assert lost.poll() is not None and llama.peers()[0].process is not lost


@pytest.mark.skipif(not SLOW, reason="set APEX_SLOW_TESTS=1")
def test_a_rank_that_freezes_is_replaced(llama: Group, monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.parallel.communication.TIMEOUT", timedelta(seconds=2))
    llama.backend.regroup()  # with this timeout
    engine = llama.engine("apex-overlap")
    requests = llama.add(engine)
    engine.step()
    frozen = llama.peers()[0].process
    os.kill(frozen.pid, signal.SIGSTOP)
    run_on(engine)
    run(engine)
    llama.check(requests)
    assert frozen.poll() is not None and llama.peers()[0].process is not frozen


def test_a_driver_that_fails_releases_the_ranks_that_wait_for_it(llama: Group, monkeypatch) -> None:
    engine = llama.engine("apex-overlap")
    requests = llama.add(engine)
    before = llama.peers()[0].process.pid
    engine.step()

    def fail(self, *arguments, **how) -> None:
        raise OSError("failed for once")

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "stage", fail)  # after its command has been sent
        with pytest.raises(OSError, match="failed for once"):
            run(engine)
    assert not llama.backend.team.is_whole
    for request in engine.recover():
        engine.add(request, check_targets=False)
    run(engine)
    llama.check(requests)
    assert llama.peers()[0].process.pid == before


def test_recovering_without_need_keeps_the_group(llama: Group) -> None:
    engine = llama.engine("adaptive-free-running")
    requests = llama.add(engine)
    before = llama.backend.team.group.epoch
    for _ in range(6):
        engine.step()
    for request in engine.recover():
        engine.add(request, check_targets=False)
    run(engine)
    llama.check(requests)
    assert llama.backend.team.group.epoch == before is not None


def test_idle_ranks_take_no_core(llama: Group) -> None:
    """While this process spins, as a rank that polls would."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{llama.peers()[0].process.pid}/stat").read_text().rpartition(") ")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    before, end_s = cpu_s(), time.thread_time() + 1.0
    while time.thread_time() < end_s:
        pass
    assert cpu_s() - before < 0.1


def test_a_rank_that_cannot_start_says_why(llama: Group, capfd) -> None:
    launcher = SpawnedRanks("tests.reference.ranks:rank_without_memory")
    started: list[subprocess.Popen] = []
    cores, start = os.sched_getaffinity(0), launcher.start
    launcher.start = lambda *where: (pair := start(*where), started.append(pair[0]))[0]
    with pytest.raises(RankFailed, match="rank 1 failed: InsufficientMemory: no room for me"):
        open_sharded_backend(llama.config, CpuWorker, launcher)
    assert all(process.poll() is not None for process in started) and len(started) == 1
    assert "Traceback" not in capfd.readouterr().err
    assert os.sched_getaffinity(0) == cores
