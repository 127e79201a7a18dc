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


async def collect_at_rest(
    is_urgent: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    collect: Callable[[], object] = gc.collect,
) -> None:
    """Run full collections until it is cancelled, for :func:`without_full_collections`.

    ``is_urgent``: whether latency-sensitive requests are open. ``clock``: seconds.
    """
    end_s, interval_s = clock(), LEAST_INTERVAL_S
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        start_s = clock()
        if start_s - end_s >= (max(MOST_INTERVAL_S, interval_s) if is_urgent() else interval_s):
            collect()
            end_s = clock()
            interval_s = max(LEAST_INTERVAL_S, (end_s - start_s) / MOST_SHARE)
