"""The dedicated thread that runs CPU attention while the main thread drives the lane (APEX section 4.2)."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from swiftllm.engine.backend import TicketTimes, WorkerDied

logger = logging.getLogger(__name__)

LOOK_AFTER_S = 1.0


class WorkerTicket:
    """A CPU attention task handed to the worker's thread."""

    def __init__(self, task: Callable[[], None], thread: threading.Thread) -> None:
        self._task: Callable[[], None] | None = task
        self._thread = thread
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._start_s = self._done_s = 0.0

    def ready(self) -> bool:
        return self._is_over.is_set() or not self._thread.is_alive()

    def wait(self) -> float:
        # A thread that ends fulfils its tickets first; looking after it covers those it could not.
        while not self._is_over.wait(LOOK_AFTER_S):
            if not self._thread.is_alive():
                self.fail(WorkerDied("the CPU attention worker is gone"))
        if self._error is not None:
            raise self._error
        return self._done_s - self._start_s

    def times(self) -> TicketTimes:
        return TicketTimes(self._start_s, self._done_s, ready_s=self._done_s)

    def run(self) -> None:
        """Do the task, on the worker's thread. Raises only what ends the thread."""
        try:
            self._start_s = time.perf_counter()
            self._task()
            self._done_s = time.perf_counter()
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = WorkerDied(f"the CPU attention worker ended in the middle of its work: {error!r}")
            raise
        finally:
            self._task = None  # tensors hang on it, and the ticket may stay
            self._is_over.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._is_over.set()


class CpuWorker:
    """Runs tasks one after the other, in the order of submission, on a thread of its own.

    The tasks are native calls that release the GIL, so the main thread goes on launching lane work meanwhile. A task
    that raises fails its own ticket. If the thread itself ends, every ticket under way fails with
    :class:`WorkerDied`, and so does every submission until :meth:`start_again`: nothing may go on as if the lost work
    had been done.

    Attributes:
        restarts: how often the thread had to be started again.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._tickets: SimpleQueue[WorkerTicket | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=[self._tickets], name="cpu-attention", daemon=True)
        self._is_gone = False
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> WorkerTicket:
        """See :class:`swiftllm.runtime.workers.inline.AttentionWorker`.

        Raises:
            WorkerDied: the thread has ended.
        """
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                raise WorkerDied("the CPU attention worker has ended")
            ticket = WorkerTicket(task, self._thread)
            self._tickets.put(ticket)
        return ticket

    def start_again(self) -> None:
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                self.restarts += 1
                logger.warning("starting the CPU attention worker again")
                self._start()

    def _work(self, tickets: SimpleQueue[WorkerTicket | None]) -> None:
        try:
            while (ticket := tickets.get()) is not None:
                ticket.run()
        except BaseException as error:
            logger.error("the CPU attention worker ended: %r", error)
        finally:
            with self._lock:  # from here on nothing is submitted to this thread
                self._is_gone = True
                while not tickets.empty():
                    if (left := tickets.get()) is not None:
                        left.fail(WorkerDied("the CPU attention worker ended before this work began"))

    def kill(self) -> None:
        """End the thread after the tasks submitted so far, as a crash would; for tests of what comes after."""
        self.submit(sys.exit)

    def close(self) -> None:
        """Finish the tasks under way and end the thread."""
        self._tickets.put(None)
        self._thread.join()
