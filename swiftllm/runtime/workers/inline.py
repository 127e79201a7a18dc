"""Who computes CPU attention: a worker takes tasks and hands back tickets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from swiftllm.engine.backend import Ticket, TicketTimes


class AttentionWorker(Protocol):
    """Runs the CPU attention that a backend hands over, task after task in the order in which they come."""

    restarts: int
    """How often the worker ended by itself and was started again."""

    def submit(self, task: Callable[[], None]) -> Ticket:
        """Run the task, after those submitted before it, and fulfil the ticket when it is done."""

    def start_again(self) -> None:
        """If the worker has ended, start it: the work that was lost with it is not wanted any more."""

    def close(self) -> None:
        """Stop; tasks under way are finished first."""


class FinishedTask:
    """The ticket of a task that has run already."""

    def __init__(self, start_s: float, done_s: float, error: BaseException | None) -> None:
        self._start_s = start_s
        self._done_s = done_s
        self._error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> float:
        if self._error is not None:
            raise self._error
        return self._done_s - self._start_s

    def times(self) -> TicketTimes:
        return TicketTimes(self._start_s, self._done_s, ready_s=self._done_s)


class InlineWorker:
    """Runs each task at once on the calling thread: the synchronous twin of a worker with a thread of its own."""

    restarts = 0

    def submit(self, task: Callable[[], None]) -> Ticket:
        start_s = time.perf_counter()
        error: BaseException | None = None
        try:
            task()
        except Exception as raised:  # comes out of wait(), as from a thread
            error = raised
        return FinishedTask(start_s, time.perf_counter(), error)

    def start_again(self) -> None:
        pass

    def close(self) -> None:
        pass
