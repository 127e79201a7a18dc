"""Streams, events, graphs and a worker of a CUDA made of Python, see :mod:`tests.reference.fake_device`."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from swiftllm.device import Event
from swiftllm.runtime.cpu_tier import CpuTask, TaskFuture, TaskRunner

if TYPE_CHECKING:
    from tests.reference.fake_cards import FakeNccl
    from tests.reference.fake_device import FakeCuda

DEVICE = torch.device("meta")


class Hazard(AssertionError):
    """Something that works on a real GPU only by luck."""


class FakeEvent:
    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.passed = False

    def record(self, stream: FakeStream) -> None:
        stream.cuda.raise_failure()
        stream.cuda.cards.touch()
        self.stream = stream
        stream.put(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def query(self) -> bool:
        """The engine waits by asking until it is so, in ``CudaEvent.synchronize``: it is answered when it is so."""
        cuda = self.stream.cuda
        cuda.raise_failure()
        cuda.refuse_while_capturing("asks for an event")
        cuda.advance()
        if sys._getframe(1).f_code.co_name != "synchronize":
            return self.passed
        if cuda.ignores("synchronize"):
            return True
        cuda.force(self)
        return self.passed

    def synchronize(self) -> None:
        raise Hazard("CUDA's own wait has no limit")


class FakeStream:
    device = DEVICE

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.queue: deque[Callable[[], None] | FakeEvent] = deque()
        self.speed = 0.0

    def put(self, work: Callable[[], None] | FakeEvent) -> None:
        self.queue.append(work)

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.raise_failure()
        if not self.cuda.ignores("wait_event"):
            self.put(event)

    def step(self) -> bool:
        """Do the next thing; False if there is none, or it waits."""
        if not self.queue or self.cuda.has_failed:
            return False
        work = self.queue[0]
        if isinstance(work, FakeEvent):
            if not work.passed:
                return False
            self.queue.popleft()
        else:
            self.queue.popleft()
            try:
                work()
            except (IndexError, RuntimeError, ValueError) as error:
                raise Hazard(f"the device read what was not there: {error}") from error
        return True


class FakeGraph:
    """As in torch, a graph that is destroyed takes the cuBLAS workspace of others captured on its stream along."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.work: list[Callable[[], None]] = []
        self.communicators: set[FakeNccl] = set()
        cuda.cards.touch()
        cuda.graphs.add(self)
        weakref.finalize(self, cuda.lose_graph)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.cuda.raise_failure()
        assert capture_error_mode == "thread_local", "other threads may use their streams meanwhile"
        assert self.cuda.current is not self.cuda.compute, "the default stream cannot be captured"
        assert not gc.isenabled(), "a collection in the middle of a capture may destroy a graph, and ends it"
        assert not self.cuda.current.queue
        # As torch's allocator of pinned memory (2.13): an entry of a pool stays when its last graph is destroyed.
        if self.cuda.pool_uses.get(pool) == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        self.cuda.pool_uses[pool] += 1
        weakref.finalize(self, self.cuda.pool_uses.subtract, [pool])
        # As torch, which has a random state for captures on the device: made at the first one, written at each.
        if self.cuda.random_state is None:
            self.cuda.random_state = torch.zeros(1)
        self.cuda.random_state.zero_()
        self.stream, self.cuda.capturing = self.cuda.current, True

    def capture_end(self) -> None:
        self.cuda.capturing = False
        self.cuda.raise_failure()
        self.communicators, self.cuda.captured_in = self.cuda.captured_in, set()
        assert not any(isinstance(work, FakeEvent) for work in self.stream.queue)
        self.work = list(self.stream.queue)
        self.stream.queue.clear()
        self.lost_before = self.cuda.lost_graphs
        self.cuda.captures += 1

    def replay(self) -> None:
        self.cuda.raise_failure()
        assert self.cuda.lost_graphs == self.lost_before, "the graph's workspace is gone"
        self.cuda.replays += 1
        for work in self.work:
            self.cuda.current.put(work)
        self.cuda.advance()


class FakeFuture(TaskFuture):
    def __init__(self, worker: FakeWorker, task: CpuTask, *around: Any) -> None:
        super().__init__(task, *around)
        self.worker = worker
        self.kind = type(task)

    def is_over(self) -> bool:
        """As the host sees it without spending time."""
        return super().ready()

    def ready(self) -> bool:
        self.worker.cuda.advance()
        return self.is_over()

    def wait(self) -> float:
        if not self.is_over():
            if self.worker.cuda.ignores("attention"):
                return 0.0
            self.worker.finish(self)
        return super().wait()


class FakeWorker:
    """Runs tasks in order whenever the fake has time for it, or when they are waited for."""

    restarts = 0

    def __init__(self, cuda: FakeCuda, runner: TaskRunner) -> None:
        self.cuda = cuda
        self.runner = runner
        self.speed = 0.0
        self.futures: deque[FakeFuture] = deque()
        self.at_work = False
        self.card = cuda.cards.current()  # as its thread's, see DeviceThread
        cuda.workers.append(self)

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> FakeFuture:
        future = FakeFuture(self, task, arrived, send_back)
        self.futures.append(future)
        self.cuda.advance()
        return future

    def step(self) -> bool:
        if self.at_work or not self.futures:
            return False
        self.at_work = True
        try:
            with self.cuda.another_thread(self.card):
                self.futures.popleft().run(self.runner)
        finally:
            self.at_work = False
        return True

    def finish(self, future: FakeFuture) -> None:
        while not future.is_over():
            assert self.step(), "a task waits for itself"

    def start_again(self) -> None:
        """It never ends."""

    def close(self) -> None:
        while self.step():
            pass
