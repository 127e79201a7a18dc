"""What a backend asks of a CPU attention worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swiftllm.device.device import Event
from swiftllm.engine.backend import Ticket
from swiftllm.runtime.workers.task import CpuTask, TaskRunner


class AttentionWorker(Protocol):
    """Runs tasks one after the other, in the order of submission.

    The task alone describes the computation, wherever it takes place. ``arrived`` and ``send_back`` concern the device,
    and are for the process that submits.
    """

    restarts: int
    """How often the worker ended by itself and was started again."""

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> Ticket:
        """Run the task after those submitted before it.

        The task's inputs are in host memory after ``arrived``; the wait does not count as computing. Once the results
        are there, ``send_back`` begins their way to the device, on any thread. Then the ticket is ready.

        Raises:
            WorkerDied: the worker has ended.
        """

    def start_again(self) -> None:
        """Start the worker if it has ended. Tasks that were lost with it are not repeated."""

    def close(self) -> None:
        """Finish the tasks under way, then stop."""


MakeWorker = Callable[[TaskRunner], AttentionWorker]
"""Makes a worker for the CPU tier that the runner holds."""
