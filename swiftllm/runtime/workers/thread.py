"""The dedicated thread that runs CPU attention while the main thread drives the lane (APEX section 4.2)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from swiftllm.device.device import Event
from swiftllm.engine.backend import WorkerDied
from swiftllm.runtime.workers.task import CpuTask, TaskRunner
from swiftllm.runtime.workers.ticket import TaskTicket
from swiftllm.threads import DeviceThread

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 1.0  # between two looks at the thread while its ticket is waited for
FINISH, CRASH = "finish", "crash"  # queued instead of a ticket


class WorkerTicket(TaskTicket):
    """A task handed to the worker's thread."""

    def __init__(
        self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None, thread: threading.Thread
    ) -> None:
        super().__init__(task, arrived, send_back)
        self._thread = thread

    def ready(self) -> bool:
        return super().ready() or not self._thread.is_alive()

    def wait(self) -> float:
        # A thread that ends fails the tickets it has left. It cannot if an exception hits it between two tasks.
        while not self._is_over.wait(ALIVE_CHECK_S):
            if not self._thread.is_alive():
                self.fail(WorkerDied("the CPU attention worker is gone"))
        return super().wait()


class CpuWorker:
    """Runs tasks one after the other, in the order of submission, on a thread of its own.

    Tasks are native calls that release the GIL, so the main thread goes on launching lane work. A task that raises
    fails its own ticket. If the thread itself ends, every ticket under way fails with :class:`WorkerDied`. So does
    every submission until :meth:`start_again`: a lost task must not pass for a finished one.

    Attributes:
        restarts: how often the thread had to be started again.
    """

    def __init__(self, runner: TaskRunner) -> None:
        self.restarts = 0
        self._runner = runner
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._queue: SimpleQueue[WorkerTicket | str] = SimpleQueue()
        self._thread = DeviceThread(self._work, self._queue, name="cpu-attention")
        self._is_gone = False
        self._thread.start()

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> WorkerTicket:
        """See :class:`swiftllm.runtime.workers.interface.AttentionWorker`."""
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                raise WorkerDied("the CPU attention worker has ended")
            ticket = WorkerTicket(task, arrived, send_back, self._thread)
            self._queue.put(ticket)
        return ticket

    def start_again(self) -> None:
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                self.restarts += 1
                logger.warning("starting the CPU attention worker again")
                self._start()

    def _work(self, queue: SimpleQueue[WorkerTicket | str]) -> None:
        try:
            while (ticket := queue.get()) != FINISH:
                if ticket == CRASH:
                    raise SystemExit("killed")
                ticket.run(self._runner)
        except BaseException as error:
            logger.error("the CPU attention worker ended: %r", error)
        finally:
            with self._lock:  # from here on nothing is submitted to this thread
                self._is_gone = True
                while not queue.empty():
                    if isinstance(left := queue.get(), WorkerTicket):
                        left.fail(WorkerDied("the CPU attention worker ended before this work began"))

    def kill(self) -> None:
        """End the thread after the tasks submitted so far, as a crash would; for tests of the recovery."""
        self._queue.put(CRASH)

    def close(self) -> None:
        """Finish the tasks under way and end the thread."""
        self._queue.put(FINISH)
        self._thread.join()
