"""The worker without a thread of its own: the synchronous twin of :mod:`swiftllm.runtime.workers.thread`."""

from __future__ import annotations

from collections.abc import Callable

from swiftllm.device.device import Event
from swiftllm.runtime.workers.task import CpuTask, TaskRunner
from swiftllm.runtime.workers.ticket import TaskTicket


class InlineWorker:
    """See :class:`swiftllm.runtime.workers.interface.AttentionWorker`: runs each task at once on the calling thread."""

    restarts = 0

    def __init__(self, runner: TaskRunner) -> None:
        self._runner = runner

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> TaskTicket:
        ticket = TaskTicket(task, arrived, send_back)
        ticket.run(self._runner)
        return ticket

    def start_again(self) -> None:
        pass

    def close(self) -> None:
        pass
