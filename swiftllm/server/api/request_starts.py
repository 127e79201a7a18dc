"""Starts HTTP requests one at a time, between the tokens of running streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from swiftllm.core.request import ServiceClass

MAX_LOOP_PASSES_HELD = 16


class RequestStarts:
    """Lets one waiting task go on in each pass of the event loop: by class, then in order of arrival.

    While ``is_busy`` none goes on, for at most ``MAX_LOOP_PASSES_HELD`` passes. Starting a request takes as long as
    serving fifty tokens, so a burst of requests would delay every stream.

    A request's class is in its body. So a request waits once to be read, as a latency-sensitive one, and a best-effort
    request waits again before it is tokenized and queued. The best-effort requests of a burst then delay others by
    their reading only.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._waiting = {service_class: deque[asyncio.Future[None]]() for service_class in ServiceClass}
        self._is_scheduled = False
        self._num_held = 0  # passes since a task went on

    async def wait_for_start(self, service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE) -> None:
        """Wait until the calling task may go on."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._start_next, loop)
            if not self._is_busy():
                return
        future = loop.create_future()
        self._waiting[service_class].append(future)
        await future

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._is_busy() and self._num_held < MAX_LOOP_PASSES_HELD:
            self._num_held += 1
        else:
            self._num_held = 0
            first = self._first_waiting()
            self._is_scheduled = first is not None
            if first is not None:
                first.set_result(None)
        if self._is_scheduled:
            loop.call_soon(self._start_next, loop)

    def _first_waiting(self) -> asyncio.Future[None] | None:
        """Take the most urgent task that still waits; the tasks of done futures were cancelled."""
        for service_class in ServiceClass:
            waiting = self._waiting[service_class]
            while waiting:
                if not (future := waiting.popleft()).done():
                    return future
        return None
