"""One layer's decode attention of a cohort on its way through the CPU worker."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import Ticket, TicketTimes
from swiftllm.runtime.workers.inline import AttentionWorker


class CpuAttention:
    """Waits for q, k and v, computes, and sends the result on: a task for the worker, and the ticket for it.

    The ticket is ready when the result is in host memory and its way to the device has begun. Waiting for the device
    does not count as computing.
    """

    def __init__(self, arrived: Event, attend: Callable[[], None], send_back: Callable[[], None]) -> None:
        self._arrived = arrived
        self._attend = attend
        self._send_back = send_back

    def submit(self, worker: AttentionWorker) -> Ticket:
        self._waits = not self._arrived.done()
        self._submitted_s = time.perf_counter()
        self._ticket = worker.submit(self._run)
        return self

    # The worker's thread has modes of its own, and tensors made in inference mode are not written outside it.
    @torch.inference_mode()
    def _run(self) -> None:
        self._arrived.synchronize()
        self._start_s = time.perf_counter()
        self._attend()
        self._done_s = time.perf_counter()
        self._send_back()

    def ready(self) -> bool:
        return self._ticket.ready()

    def wait(self) -> float:
        self._ticket.wait()
        return self._done_s - self._start_s

    def times(self) -> TicketTimes:
        to_host = (self._submitted_s, self._start_s) if self._waits else None
        return TicketTimes(self._start_s, self._done_s, ready_s=self._done_s, to_host=to_host)
