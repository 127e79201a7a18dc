"""Tokens between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from swiftllm.server.service import token_streams as streams
from swiftllm.server.service.token_streams import Delta, Mailbox, RequestFailed, TokenStream


def test_steps_that_came_in_one_go_are_one_delta() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", mailbox), []
        stream.listen(deltas.append)
        mailbox.post([(stream, Delta([1]))])
        mailbox.post([(stream, Delta([2, 3], finish_reason="stop"))])
        await asyncio.sleep(0)
        assert deltas == [Delta([1, 2, 3], [], "stop")]

    asyncio.run(run())


def test_who_listens_late_gets_all_that_came_before() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", mailbox), []
        for token in (1, 2):
            mailbox.post([(stream, Delta([token]))])
            await asyncio.sleep(0)
        stream.listen(deltas.append)
        assert deltas == [Delta([1, 2], [])]
        stream.listen(None)
        mailbox.post([(stream, Delta([3]))])
        await asyncio.sleep(0)
        assert len(deltas) == 1
        stream.listen(deltas.append)
        assert deltas[1:] == [Delta([3])]

    asyncio.run(run())


def test_an_error_keeps_the_tokens_before_it() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, deltas = TokenStream("a", mailbox), []
        error = RequestFailed("stalled", "why")
        mailbox.post([(stream, Delta([1]))])
        mailbox.post([(stream, Delta(error=error))])
        await asyncio.sleep(0)
        stream.listen(deltas.append)
        assert deltas == [Delta([1], [], None, error)]

    asyncio.run(run())


def test_an_engine_faster_than_its_clients_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the event loop comes, it never finds more than two posts at once."""
    monkeypatch.setattr(streams, "MAX_LAG_S", 60.0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        stream, sizes = TokenStream("a", mailbox), []

        def take(delta: Delta) -> None:
            sizes.append(len(delta.token_ids))

        def post() -> None:
            for token in range(50):
                mailbox.post([(stream, Delta([token]))])
                mailbox.keep_pace()

        stream.listen(take)
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
        mailbox = Mailbox(asyncio.get_running_loop())
        stream = TokenStream("a", mailbox)
        mailbox.post([(stream, Delta([1]))])
        now_s += 1.0  # which is what serving takes
        while mailbox.is_serving:
            await asyncio.sleep(0)
        mailbox.keep_pace()
        assert not waited
        now_s += engine_s
        mailbox.post([(stream, Delta([2]))])
        mailbox.keep_pace()
        assert bool(waited) == waits

    asyncio.run(run())


def test_a_closed_event_loop_takes_no_parcels_and_holds_nobody_up() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    stream = TokenStream("a", mailbox)
    loop.close()
    assert not mailbox.post([(stream, Delta([1]))])
    mailbox.keep_pace()
    assert not mailbox.post([(stream, Delta([2]))])
