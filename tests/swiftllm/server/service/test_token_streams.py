"""Tokens between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from swiftllm.server.service import token_streams
from swiftllm.server.service.token_streams import Delta, DeltaDispatcher, RequestFailed, TokenStream


def test_steps_that_came_in_one_go_are_one_delta() -> None:
    async def run() -> None:
        dispatcher = DeltaDispatcher(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", dispatcher), []
        stream.set_listener(deltas.append)
        dispatcher.post_deltas([(stream, Delta([1]))])
        dispatcher.post_deltas([(stream, Delta([2, 3], finish_reason="stop"))])
        await asyncio.sleep(0)
        assert deltas == [Delta([1, 2, 3], [], "stop")]

    asyncio.run(run())


def test_who_listens_late_gets_all_that_came_before() -> None:
    async def run() -> None:
        dispatcher = DeltaDispatcher(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", dispatcher), []
        for token in (1, 2):
            dispatcher.post_deltas([(stream, Delta([token]))])
            await asyncio.sleep(0)
        stream.set_listener(deltas.append)
        assert deltas == [Delta([1, 2], [])]
        stream.set_listener(None)
        dispatcher.post_deltas([(stream, Delta([3]))])
        await asyncio.sleep(0)
        assert len(deltas) == 1
        stream.set_listener(deltas.append)
        assert deltas[1:] == [Delta([3])]

    asyncio.run(run())


def test_an_error_keeps_the_tokens_before_it() -> None:
    async def run() -> None:
        dispatcher = DeltaDispatcher(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", dispatcher), []
        error = RequestFailed("stalled", "why")
        dispatcher.post_deltas([(stream, Delta([1]))])
        dispatcher.post_deltas([(stream, Delta(error=error))])
        await asyncio.sleep(0)
        stream.set_listener(deltas.append)
        assert deltas == [Delta([1], [], None, error)]

    asyncio.run(run())


def test_an_engine_faster_than_its_clients_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the event loop comes, it never finds more than two posts at once."""
    monkeypatch.setattr(token_streams, "MAX_LAG_S", 60.0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        dispatcher = DeltaDispatcher(loop)
        stream, sizes = TokenStream("a", dispatcher), []

        def take(delta: Delta) -> None:
            sizes.append(len(delta.token_ids))

        def post() -> None:
            for token in range(50):
                dispatcher.post_deltas([(stream, Delta([token]))])
                dispatcher.apply_backpressure()

        stream.set_listener(take)
        posting = threading.Thread(target=post)
        posting.start()
        while sum(sizes) < 50:
            await asyncio.sleep(0)
        await asyncio.to_thread(posting.join)
        assert max(sizes) <= 2

    asyncio.run(run())


@pytest.mark.parametrize(("engine_s", "waits"), [(2.0, False), (0.5, True)])
def test_only_an_engine_faster_than_serving_waits(
    monkeypatch: pytest.MonkeyPatch, engine_s: float, waits: bool
) -> None:
    now_s, waited = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(threading.Condition, "wait_for", lambda *condition: waited.append(condition))

    async def run() -> None:
        nonlocal now_s
        dispatcher = DeltaDispatcher(asyncio.get_running_loop())
        stream = TokenStream("a", dispatcher)
        dispatcher.post_deltas([(stream, Delta([1]))])
        now_s += 1.0  # which is what serving takes
        while dispatcher.is_serving:
            await asyncio.sleep(0)
        dispatcher.apply_backpressure()
        assert not waited
        now_s += engine_s
        dispatcher.post_deltas([(stream, Delta([2]))])
        dispatcher.apply_backpressure()
        assert bool(waited) == waits

    asyncio.run(run())


def test_a_closed_event_loop_takes_no_deltas_and_holds_nobody_up() -> None:
    loop = asyncio.new_event_loop()
    dispatcher = DeltaDispatcher(loop)
    stream = TokenStream("a", dispatcher)
    loop.close()
    assert not dispatcher.post_deltas([(stream, Delta([1]))])
    dispatcher.apply_backpressure()
    assert not dispatcher.post_deltas([(stream, Delta([2]))])
