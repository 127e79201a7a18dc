"""Each thread of a process works on the process's GPU: CUDA gives a new thread the first one."""

from __future__ import annotations

import ctypes
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import swiftllm
from swiftllm.device import CudaDevice
from swiftllm.parallel.team import Peer
from swiftllm.processes import DeviceThread
from swiftllm.remote.protocol import HEADER, FrameKind, Header
from swiftllm.remote.tier import Channel
from swiftllm.runtime.cpu_tier import CpuWorker, RowsWrite
from swiftllm.server.engine_process import EngineService
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.server.serving import LocalClient, make_requests, read_all, run_client

PATIENCE_S = 30.0
NOTHING = torch.zeros(1)


def attend(device: CudaDevice) -> None:
    """The worker waits for its inputs and sends its result back."""
    worker = CpuWorker(SimpleNamespace(run_task=lambda task: None))
    task = RowsWrite(0, NOTHING, NOTHING, NOTHING)
    worker.submit(task, device.to_host.mark(), lambda: device.to_device.mark()).wait()
    worker.close()


def attend_elsewhere(device: CudaDevice) -> None:
    """A thread sends to another host what has arrived from the GPU."""
    own, other = socket.socketpair()
    with own, other:
        channel = Channel(own, "other")
        channel.post(Header(FrameKind.DROP), arrived=device.to_host.mark())
        assert len(other.recv(HEADER.size)) == HEADER.size
        own.shutdown(socket.SHUT_RDWR)
        assert channel.wait_dead(PATIENCE_S)


def serve(device: CudaDevice) -> None:
    """The engine's thread launches work."""
    service = EngineService(fake_engine("swiftllm", num_gpu_blocks=16, num_cpu_blocks=16))
    launch = SimpleNamespace(on_step=lambda *_: device.compute.mark(), on_finish=lambda *_: None)
    service.add_observer(launch)

    async def client(local: LocalClient) -> None:
        await read_all(local.submit(make_requests(1)))

    run_client(service, client)


def lose_a_rank(device: CudaDevice) -> None:
    """Whoever notices that another rank has died gives up the collectives with it."""
    noticed = threading.Event()
    process = SimpleNamespace(wait=lambda: 1, pid=0)
    launcher = SimpleNamespace(start=lambda *_: (process, None))
    Peer(1, launcher, 1, (), lambda: (device.compute.mark(), noticed.set()))
    assert noticed.wait(PATIENCE_S)


@pytest.mark.parametrize("work", [attend, attend_elsewhere, serve, lose_a_rank])
def test_a_second_gpu_s_process_takes_no_memory_of_the_first(work: Callable[[CudaDevice], None]) -> None:
    with FakeCuda(0) as cuda:
        torch.cuda.set_device(1)
        work(CudaDevice())
        assert cuda.cards.contexts == {1}


# Processes that attend on a CPU, and the front end, which has no torch.
WITHOUT_GPU = {"remote/host.py", "remote/ray_hosts.py", "server/client.py"}


def test_all_threads_begin_on_the_gpu_of_the_one_that_starts_them() -> None:
    """Those that reach no GPU too, which may reach one tomorrow."""
    (package,) = swiftllm.__path__
    others = {
        str(path.relative_to(package))
        for path in Path(package).rglob("*.py")
        if "threading.Thread(" in path.read_text() and path.name != "threads.py"
    }
    assert others == WITHOUT_GPU


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_threads_that_wait_for_a_gpu_wake_on_time() -> None:
    """The slack in nanoseconds of the thread that opens the GPU, and of one that works on it; 50,000 by default."""

    def slack_ns() -> int:
        return ctypes.CDLL(None).prctl(30, 0, 0, 0, 0)  # PR_GET_TIMERSLACK

    def open_and_start() -> None:
        CudaDevice(1)
        found.append(slack_ns())
        inner = DeviceThread(lambda: found.append(slack_ns()), name="inner")
        inner.start()
        inner.join()

    found: list[int] = []
    with FakeCuda(0):
        opener = threading.Thread(target=open_and_start)
        opener.start()
        opener.join()
    assert found == [1000, 1000]
