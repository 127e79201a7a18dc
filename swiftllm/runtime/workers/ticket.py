"""The ticket of a CPU task that is computed in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import TicketTimes, WorkerDied
from swiftllm.runtime.workers.task import CpuTask, TaskRunner


class TaskTicket:
    """A submitted task: run on the worker's thread, waited for on the backend's.

    The ticket is ready when the result is in host memory and its way to the device has begun.
    """

    def __init__(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None) -> None:
        """See :meth:`swiftllm.runtime.workers.interface.AttentionWorker.submit`."""
        self._task: CpuTask | None = task
        self._arrived = arrived
        self._send_back = send_back
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._waits = not arrived.done()
        self._submitted_s = time.perf_counter()
        self._start_s = self._done_s = 0.0

    def ready(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> float:
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._done_s - self._start_s

    def times(self) -> TicketTimes:
        to_host = (self._submitted_s, self._start_s) if self._waits else None
        return TicketTimes(self._start_s, self._done_s, ready_s=self._done_s, to_host=to_host)

    def run(self, runner: TaskRunner) -> None:
        """Wait for the inputs, compute, send the result back. Exceptions come out of :meth:`wait`; what is none, such
        as SystemExit, is raised here too and ends the worker."""
        try:
            self._run(runner)
        except Exception as error:
            self._error = error
        except BaseException as error:
            self._error = WorkerDied(f"the CPU attention worker ended in the middle of its work: {error!r}")
            raise
        finally:
            self._task = self._send_back = None  # they hold tensors, and the ticket may outlive them
            self._is_over.set()

    # Inference mode belongs to a thread, and tensors made in it are not written outside it.
    @torch.inference_mode()
    def _run(self, runner: TaskRunner) -> None:
        self._arrived.synchronize()
        self._start_s = time.perf_counter()
        runner.run_task(self._task)
        self._done_s = time.perf_counter()
        if self._send_back is not None:
            self._send_back()

    def fail(self, error: BaseException) -> None:
        """The task will not run."""
        self._error = error
        self._is_over.set()
