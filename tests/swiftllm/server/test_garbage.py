"""When the server runs full garbage collections."""

import asyncio
import gc

from swiftllm.server import garbage
from swiftllm.server.garbage import (
    LEAST_INTERVAL_S,
    MOST_INTERVAL_S,
    MOST_SHARE,
    NEVER,
    collect_at_rest,
    without_full_collections,
)
from tests.swiftllm.server.serving import Clock


def test_python_itself_begins_no_full_collection_meanwhile():
    before = gc.get_threshold()
    with without_full_collections():
        assert gc.get_threshold() == (*before[:2], NEVER) and gc.get_freeze_count() > 0
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_collections_wait_for_a_moment_without_urgent_requests_but_not_for_ever(monkeypatch):
    monkeypatch.setattr(garbage, "LOOK_EVERY_S", 0.0)
    asyncio.run(look_on())


async def look_on():
    clock, ends_s, is_urgent, takes_s = Clock(), [], False, 0.0

    def collect():
        clock.now_s += takes_s
        ends_s.append(clock.now_s)

    async def look_until(end_s):
        while clock.now_s < end_s:
            clock.now_s += 1.0
            await asyncio.sleep(0)  # the collector looks

    collector = asyncio.create_task(collect_at_rest(lambda: is_urgent, clock, collect))
    await asyncio.sleep(0)
    await look_until(2.5 * LEAST_INTERVAL_S)
    assert ends_s == [LEAST_INTERVAL_S, 2 * LEAST_INTERVAL_S]
    is_urgent = True
    await look_until(2 * LEAST_INTERVAL_S + MOST_INTERVAL_S - 1)
    assert len(ends_s) == 2
    await look_until(2 * LEAST_INTERVAL_S + MOST_INTERVAL_S)
    assert len(ends_s) == 3
    is_urgent, takes_s = False, 0.5  # a long one is followed by a long pause
    await look_until(clock.now_s + LEAST_INTERVAL_S)
    await look_until(ends_s[-1] + takes_s / MOST_SHARE - 1)
    assert len(ends_s) == 4
    await look_until(clock.now_s + 1)
    assert len(ends_s) == 5
    collector.cancel()
