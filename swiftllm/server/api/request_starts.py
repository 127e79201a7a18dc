"""Requests begin one by one, between the tokens of those under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_TURNS_HELD = 16


class Turns:
    """Lets one task go on per turn of the event loop, in order, and none while ``is_busy``, though not for long.

    To begin a request takes as long as to serve fifty tokens: a burst of them would hold up every stream.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_turning = False
        self._num_held = 0  # turns since a task went on

    async def wait(self) -> None:
        """Until it is the calling task's turn."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
            if not self._is_busy():
                return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._waiting[0].done():  # who waited is gone
            self._waiting.popleft()
        if self._is_busy() and self._num_held < MOST_TURNS_HELD:
            self._num_held += 1
        else:
            self._num_held = 0
            self._is_turning = bool(self._waiting)
            if self._waiting:
                self._waiting.popleft().set_result(None)
        if self._is_turning:
            loop.call_soon(self._turn, loop)
