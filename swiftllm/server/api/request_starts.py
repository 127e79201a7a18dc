"""Starts HTTP requests one at a time, between the tokens of running streams."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import Callable

from swiftllm.core.request import ServiceClass

MAX_LOOP_PASSES_HELD = 16
BEST_EFFORT_SHARE = 0.25
"""Of the event loop's time, for best-effort bodies beside open latency-sensitive requests."""
LEAST_REST_S = 0.001  # the resolution of uvloop's timers; a shorter one would keep the loop awake

LATENCY_SENSITIVE, BEST_EFFORT = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
# Within a JSON string quotes are escaped, so these bytes can only be a field.
BEST_EFFORT_FIELDS = re.compile(rb'"priority"\s*:\s*\+?[1-9]|"service_tier"\s*:\s*"flex"')


def likely_class(body: bytes) -> ServiceClass:
    """The service class that an unparsed body seems to ask for.

    It decides only when the body is parsed. A field of a nested object, or a name with escapes, may mislead it.
    """
    return BEST_EFFORT if BEST_EFFORT_FIELDS.search(body) else LATENCY_SENSITIVE


class RequestStarts:
    """Lets one waiting task go on in each pass of the event loop: by class, then in order of arrival.

    While ``is_busy`` none goes on, for at most ``MAX_LOOP_PASSES_HELD`` passes. Starting a request takes as long as
    serving fifty tokens, so a burst of requests would delay every stream.

    While ``has_urgent`` (latency-sensitive requests are open) the loop rests after each best-effort task, so that these
    tasks take ``BEST_EFFORT_SHARE`` of its time. The loop shares the interpreter's lock with the engine's thread, whose
    steps would take several times as long beside thousands of bodies.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        has_urgent: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock``: seconds, to measure how long a task takes."""
        self._is_busy = is_busy
        self._has_urgent = has_urgent
        self._clock = clock
        self._waiting = {service_class: deque[asyncio.Future[None]]() for service_class in ServiceClass}
        self._next: asyncio.Handle | None = None  # of the pass, or of the end of a rest, that starts the next task
        self._is_resting = False
        self._rest_end_s = -math.inf
        self._num_held = 0  # passes since a task went on

    async def wait_for_start(self, service_class: ServiceClass = LATENCY_SENSITIVE) -> None:
        """Wait until the calling task may go on."""
        loop = asyncio.get_running_loop()
        if self._is_resting and service_class is LATENCY_SENSITIVE:
            self._next.cancel()
            self._next, self._is_resting = None, False
        if self._next is None:
            self._next = loop.call_soon(self._start_next, loop)
            if service_class is LATENCY_SENSITIVE and not self._is_busy():
                return
        future = loop.create_future()
        self._waiting[service_class].append(future)
        await future

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next, self._is_resting = None, False
        if self._is_busy() and self._num_held < MAX_LOOP_PASSES_HELD:
            self._num_held += 1
        elif (future := self._first_waiting(LATENCY_SENSITIVE)) is not None:
            self._start(future)
        else:
            rest_s = self._rest_end_s - self._clock() if self._has_urgent() else 0.0
            if rest_s > 0 and self._waiting[BEST_EFFORT]:
                self._is_resting = True
                self._next = loop.call_later(max(rest_s, LEAST_REST_S), self._start_next, loop)
                return
            if (future := self._first_waiting(BEST_EFFORT)) is None:
                return
            self._start(future)
            loop.call_soon(self._begin_rest, self._clock())  # the task's step comes before it
        self._next = loop.call_soon(self._start_next, loop)

    def _start(self, future: asyncio.Future[None]) -> None:
        self._num_held = 0
        future.set_result(None)

    def _begin_rest(self, start_s: float) -> None:
        end_s = self._clock()
        self._rest_end_s = end_s + (end_s - start_s) * (1 / BEST_EFFORT_SHARE - 1)

    def _first_waiting(self, service_class: ServiceClass) -> asyncio.Future[None] | None:
        """Take the oldest task of a class that still waits; the tasks of done futures were cancelled."""
        waiting = self._waiting[service_class]
        while waiting:
            if not (future := waiting.popleft()).done():
                return future
        return None
