"""Starts HTTP requests one at a time, between the tokens of running streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_LOOP_PASSES_HELD = 16


class RequestStarts:
    """Lets one waiting task start in each pass of the event loop, in order of arrival.

    While ``is_busy`` none starts, for at most ``MAX_LOOP_PASSES_HELD`` passes. Starting a request takes as long as
    serving fifty tokens, so a burst of requests would delay every stream.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False
        self._num_held = 0  # passes since a task started

    async def wait_for_start(self) -> None:
        """Wait until the calling task may start."""
        loop = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._start_next, loop)
            if not self._is_busy():
                return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # the task was cancelled
            self._waiting.popleft()
        if self._is_busy() and self._num_held < MAX_LOOP_PASSES_HELD:
            self._num_held += 1
        else:
            self._num_held = 0
            self._is_scheduled = bool(self._waiting)
            if self._waiting:
                self._waiting.popleft().set_result(None)
        if self._is_scheduled:
            loop.call_soon(self._start_next, loop)
