"""In which pass of the event loop a request may start."""

from __future__ import annotations

import asyncio
import itertools

from swiftllm.core.request import ServiceClass
from swiftllm.server.api.request_starts import MAX_LOOP_PASSES_HELD, RequestStarts


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
