"""A rank on a GPU: its captured graphs hold NCCL's communicator, which can be given up only when they are gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.device import CudaDevice
from swiftllm.engine.backend import RankFailed
from swiftllm.parallel.backend import open_sharded_backend
from swiftllm.parallel.communication import Group, Pipe
from swiftllm.parallel.team import Peer, Team
from swiftllm.runtime.cpu_tier import TaskRunner, Worker
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_cards import FakeNccl
from tests.reference.fake_device import FAULT, FakeCuda
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import DEVICE

SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir(num_hidden_layers=2)


def config_of(model_dir: Path) -> EngineConfig:
    return EngineConfig(
        str(model_dir), dtype="float32", num_gpu_blocks=20, num_cpu_blocks=20, max_num_seqs=4, max_model_len=64
    )


def decoded(driver: BackendDriver, name: str) -> list[list[int]]:
    requests = [driver.admit(f"{name}{tier.value}", (5, 6, 7), tier, SAMPLING) for tier in Tier]
    driver.prefill(requests)
    for _ in range(3):
        driver.decode(requests)
    return [request.output_token_ids for request in requests]


def test_a_server_of_ranks_with_graphs_recovers_and_shuts_down(model_dir: Path) -> None:
    expected = decoded(BackendDriver(open_torch_backend(config_of(model_dir))), "host")
    with fake_gpu(0) as cuda:
        backend = open_sharded_backend(config_of(model_dir))
        driver = BackendDriver(backend)
        assert decoded(driver, "a") == expected and cuda.replays
        with pytest.raises(ZeroDivisionError):  # nobody knows how far the other ranks have come
            backend.write_blocks(1, lambda done, what: 1 // 0)
        backend.recover()
        captures, replays = cuda.captures, cuda.replays
        assert decoded(driver, "b") == expected and cuda.replays > replays
        backend.close()
        assert cuda.lost_graphs == cuda.captures == captures


@pytest.mark.parametrize("tries", [0, 2])
@pytest.mark.parametrize("good_kernels", [0, 7, 30])
def test_a_driver_whose_gpu_has_failed_says_so_and_ends(
    model_dir: Path, good_kernels: int, tries: int, monkeypatch
) -> None:
    """Nothing that it could still call succeeds, its communicator's end included. The other ranks' processes end."""
    ended: list[bool] = []
    end = Team.end
    monkeypatch.setattr(Team, "end", lambda team, at_once=False: (ended.append(True), end(team, at_once=at_once)))
    with fake_gpu(0) as cuda:
        backend = open_sharded_backend(config_of(model_dir))
        cuda.fail_after(good_kernels)
        with pytest.raises(torch.AcceleratorError, match=FAULT):
            decoded(BackendDriver(backend), "a")
            torch.cuda.synchronize()
        for _ in range(tries):
            with pytest.raises(torch.AcceleratorError, match=FAULT):
                backend.recover()
        backend.close()
    assert ended == [True]


def test_a_start_that_fails_after_graphs_were_captured_ends(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[FakeNccl] = []
    abort = FakeNccl.abort
    monkeypatch.setattr(FakeNccl, "abort", lambda group: (abort(group), given_up.append(group)))

    def no_worker(runner: TaskRunner) -> Worker:
        raise OSError("no more threads")

    with fake_gpu(0) as cuda:
        with pytest.raises(OSError, match="no more threads"):
            open_sharded_backend(config_of(model_dir), no_worker)
        assert cuda.captures and len(given_up) == 1


def test_a_group_that_nccl_does_not_give_up_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr("swiftllm.parallel.communication.LEAVE_S", 0.05)
    over = threading.Event()
    with FakeCuda(0):
        monkeypatch.setattr(FakeNccl, "abort", lambda group: over.wait(30.0))
        hardware = CudaDevice()
        hardware.torch_device = DEVICE
        group = Group(0, 1, hardware)
        group.join(0)
        group.leave()
        assert "leaves the group behind" in caplog.text and not over.is_set()
        over.set()
        assert group.all_agree(True)  # alone
        group.join(1)


def test_a_rank_whose_gpu_hangs_ends_the_driver_s_wait_for_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a rank has nothing to report. Later waits end at once."""
    monkeypatch.setattr("swiftllm.device.ANSWER_S", 0.05)
    own, its = socket.socketpair()
    ended = threading.Event()
    process = SimpleNamespace(wait=lambda: ended.wait(30.0), pid=0)
    with own, its:
        peer = Peer(1, SimpleNamespace(start=lambda *_: (process, Pipe(own))), 1, (), lambda: None)
        with pytest.raises(RankFailed, match=r"rank 1 has finished no CPU attention for 0\.05 s"):
            peer.wait_until_finished(1)
        monkeypatch.setattr("swiftllm.device.ANSWER_S", 3600.0)
        with pytest.raises(RankFailed):
            peer.wait_until_finished(1)
        ended.set()
