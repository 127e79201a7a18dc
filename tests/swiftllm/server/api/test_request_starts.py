"""Who may go on in which turn of the event loop."""

from __future__ import annotations

import asyncio
import itertools

from swiftllm.server.api.request_starts import MOST_TURNS_HELD, Turns


class Clock:
    """Counts the turns of the running event loop."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._tick()

    def _tick(self) -> None:
        self.num_turns += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._handle.cancel()


async def turns_of(num_tasks: int, turns: Turns) -> list[int]:
    """In which turn each of some tasks, begun together, went on."""
    clock, went_on = Clock(), []

    async def task() -> None:
        await turns.wait()
        went_on.append(clock.num_turns)

    await asyncio.gather(*(task() for _ in range(num_tasks)))
    clock.stop()
    return went_on


def test_a_burst_goes_on_one_per_turn() -> None:
    async def run() -> None:
        turns = Turns(lambda: False)
        for _ in range(2):  # it comes to rest in between
            went_on = await turns_of(5, turns)
            assert went_on[0] <= 2
            assert all(1 <= later - earlier <= 2 for earlier, later in itertools.pairwise(went_on))

    asyncio.run(run())


def test_nobody_goes_on_while_it_is_busy_but_not_for_ever() -> None:
    async def run() -> None:
        went_on = await turns_of(3, Turns(lambda: True))
        assert all(later - earlier >= MOST_TURNS_HELD for earlier, later in itertools.pairwise([0, *went_on]))

    asyncio.run(run())


def test_who_has_gone_takes_no_turn() -> None:
    async def run() -> None:
        busy = True
        turns = Turns(lambda: busy)
        tasks = [asyncio.create_task(turns.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        busy = False
        await asyncio.wait_for(tasks[1], 10.0)
        await asyncio.wait_for(turns.wait(), 10.0)

    asyncio.run(run())
