"""Full garbage collections at moments without latency-sensitive requests.

A full collection stops all threads while it goes over every object: half a second with five thousand queued requests.
Python begins one whenever the number of objects has grown by a quarter, so several while such requests arrive.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import APIRouter

from swiftllm.server.observe.background import lifespan_of

LOOK_EVERY_S = 1.0
LEAST_INTERVAL_S = 10.0
MOST_SHARE = 0.01
"""Of all time, for full collections."""
MOST_INTERVAL_S = 600.0
"""After this time a collection does not wait for such a moment: few objects of a request need one at all."""
NEVER = 2**30


@contextmanager
def without_full_collections() -> Iterator[None]:
    """Python collects young objects only, and objects that exist now are never looked at again."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


class GarbageCollector:
    """Runs full collections while the server runs, for :func:`without_full_collections`."""

    def __init__(
        self,
        is_urgent: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        """``is_urgent``: whether latency-sensitive requests are open. ``clock``: seconds."""
        self._is_urgent = is_urgent
        self._clock = clock
        self._collect = collect
        self._end_s = clock()
        self._interval_s = LEAST_INTERVAL_S
        self.router = APIRouter(lifespan=lifespan_of(self._watch))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look()

    def look(self) -> None:
        """Collect if it is time."""
        start_s = self._clock()
        waited_s = start_s - self._end_s
        if waited_s < (max(MOST_INTERVAL_S, self._interval_s) if self._is_urgent() else self._interval_s):
            return
        self._collect()
        self._end_s = self._clock()
        self._interval_s = max(LEAST_INTERVAL_S, (self._end_s - start_s) / MOST_SHARE)
