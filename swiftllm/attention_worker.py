"""Who computes CPU attention: a worker takes tasks and hands back tickets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from swiftllm.backend import Ticket


class AttentionWorker(Protocol):
    def submit(self, task: Callable[[], None]) -> Ticket:
        """Run the task, after those submitted before it, and fulfil the ticket when it is done."""

    def close(self) -> None:
        """Stop; tasks under way are finished first."""


class FinishedTask:
    """The ticket of a task that has run already."""

    def __init__(self, seconds: float, error: BaseException | None) -> None:
        self._seconds = seconds
        self._error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> float:
        if self._error is not None:
            raise self._error
        return self._seconds


class InlineWorker:
    """Runs each task at once on the calling thread: the synchronous twin of a worker with a thread of its own."""

    def submit(self, task: Callable[[], None]) -> Ticket:
        start_s = time.perf_counter()
        error: BaseException | None = None
        try:
            task()
        except Exception as raised:  # comes out of wait(), as from a thread
            error = raised
        return FinishedTask(time.perf_counter() - start_s, error)

    def close(self) -> None:
        pass
