"""In which pass of the event loop a request may start."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest

from swiftllm.core.request import ServiceClass
from swiftllm.server.api.request_starts import BEST_EFFORT_SHARE, MAX_LOOP_PASSES_HELD, RequestStarts, likely_class

URGENT, REST = ServiceClass


class Clock:
    """Counts the passes of the running event loop."""

    def __init__(self) -> None:
        self.num_passes = 0
        self._tick()

    def _tick(self) -> None:
        self.num_passes += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def start_passes(num_tasks: int, starts: RequestStarts) -> list[int]:
    """The pass in which each of some tasks, begun together, started."""
    clock, passes = Clock(), []

    async def task() -> None:
        await starts.wait_for_start()
        passes.append(clock.num_passes)

    await asyncio.gather(*(task() for _ in range(num_tasks)))
    clock.stop()
    return passes


def test_a_burst_goes_on_one_per_pass() -> None:
    async def run() -> None:
        starts = RequestStarts(lambda: False)
        for _ in range(2):  # it is idle in between
            passes = await start_passes(5, starts)
            assert passes[0] <= 2
            assert all(1 <= later - earlier <= 2 for earlier, later in itertools.pairwise(passes))

    asyncio.run(run())


def test_no_task_starts_while_it_is_busy_but_not_for_ever() -> None:
    async def run() -> None:
        passes = await start_passes(3, RequestStarts(lambda: True))
        assert all(later - earlier >= MAX_LOOP_PASSES_HELD for earlier, later in itertools.pairwise([0, *passes]))

    asyncio.run(run())


def test_a_cancelled_task_takes_no_pass() -> None:
    async def run() -> None:
        busy = True
        starts = RequestStarts(lambda: busy)
        tasks = [asyncio.create_task(starts.wait_for_start()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        busy = False
        await asyncio.wait_for(tasks[1], 10.0)
        await asyncio.wait_for(starts.wait_for_start(), 10.0)

    asyncio.run(run())


def test_best_effort_tasks_let_later_ones_go_first() -> None:
    async def run() -> None:
        busy, order = True, []
        starts = RequestStarts(lambda: busy)

        async def task(name: str, *service_class: ServiceClass) -> None:
            await starts.wait_for_start(*service_class)
            order.append(name)

        tasks = [asyncio.create_task(task("first"))]
        tasks += [asyncio.create_task(task(f"rest-{i}", ServiceClass.BEST_EFFORT)) for i in range(3)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(task(f"urgent-{i}")) for i in range(3)]
        await asyncio.sleep(0)
        busy = False
        await asyncio.wait_for(asyncio.gather(*tasks), 10.0)
        assert order == ["first", "urgent-0", "urgent-1", "urgent-2", "rest-0", "rest-1", "rest-2"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "service_class"),
    [
        ({}, URGENT),
        ({"priority": 0}, URGENT),
        ({"priority": -1}, URGENT),
        ({"priority": None, "service_tier": None}, URGENT),
        ({"priority": 12}, REST),
        ({"service_tier": "flex"}, REST),
        ({"service_tier": "default"}, URGENT),
        ({"prompt": '"priority": 1, "service_tier": "flex"'}, URGENT),
    ],
)
@pytest.mark.parametrize("style", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_the_likely_class_of_a_body(fields, service_class, style):
    body = {"prompt": "a", "stream": True, **fields, "max_tokens": 1}
    assert likely_class(bytearray(json.dumps(body, **style).encode())) is service_class


async def passes(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_best_effort_tasks_take_their_share_beside_open_requests_and_hold_up_no_other() -> None:
    """A task takes a second by the clock. No real time matters: a rest of a second outlasts the passes."""
    now_s, has_urgent, order = 0.0, True, []

    async def run() -> None:
        nonlocal now_s, has_urgent
        starts = RequestStarts(lambda: False, lambda: has_urgent, lambda: now_s)

        async def task(name: str, service_class: ServiceClass) -> None:
            nonlocal now_s
            await starts.wait_for_start(service_class)
            order.append(name)
            now_s += 1.0

        rest = [asyncio.create_task(task(f"rest-{i}", REST)) for i in range(4)]
        await passes(50)
        assert order == ["rest-0"]  # the loop rests for three seconds
        await asyncio.wait_for(task("urgent", URGENT), 10.0)
        await passes(50)
        assert order == ["rest-0", "urgent"]  # two are left
        now_s += 1 / BEST_EFFORT_SHARE - 2
        await asyncio.wait_for(task("urgent", URGENT), 10.0)
        await passes(50)
        assert order == ["rest-0", "urgent", "urgent", "rest-1"]
        has_urgent = False
        await asyncio.wait_for(task("last", URGENT), 10.0)  # a pass ends the rest
        await asyncio.wait_for(asyncio.gather(*rest), 10.0)
        assert order[4:] == ["last", "rest-2", "rest-3"]

    asyncio.run(run())
