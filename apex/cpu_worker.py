"""The dedicated thread that runs CPU attention while the main thread drives the lane (APEX section 4.2)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from swiftllm.backend import TicketTimes


class WorkerTicket:
    """A CPU attention task handed to the worker thread."""

    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> float:
        start_s, done_s = self._future.result()
        return done_s - start_s

    def times(self) -> TicketTimes:
        start_s, done_s = self._future.result()
        return TicketTimes(start_s, done_s, ready_s=done_s)


class CpuWorker:
    """Runs tasks one after the other, in the order of submission, on a thread of its own.

    The tasks are native calls that release the GIL, so the main thread goes on launching lane work meanwhile.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu-attention")

    def submit(self, task: Callable[[], None]) -> WorkerTicket:
        return WorkerTicket(self._pool.submit(_timed, task))

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def _timed(task: Callable[[], None]) -> tuple[float, float]:
    start_s = time.perf_counter()
    task()
    return start_s, time.perf_counter()
