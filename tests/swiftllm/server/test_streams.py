"""Tokens between the engine's thread and an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swiftllm.server import streams
from swiftllm.server.streams import Delta, Mailbox, Parcel, RequestFailed, TokenStream


def test_steps_that_nobody_took_are_one_delta_and_one_notice() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, notices = TokenStream("a", mailbox), []
        stream.listen(lambda: notices.append(stream.take()))
        mailbox.post([Parcel(stream, [1])])
        mailbox.post([Parcel(stream, [2, 3], finish_reason="stop")])
        await asyncio.sleep(0)
        assert notices == [Delta([1, 2, 3], [], "stop")]
        assert stream.take() is None

    asyncio.run(run())


def test_who_listens_late_is_told_at_once() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream, notices = TokenStream("a", mailbox), []
        mailbox.post([Parcel(stream, [1])])
        await asyncio.sleep(0)
        stream.listen(lambda: notices.append(stream.take()))
        assert notices == [Delta([1], [])]

    asyncio.run(run())


def test_an_error_comes_after_the_tokens_before_it_and_once() -> None:
    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        stream = TokenStream("a", mailbox)
        mailbox.post([Parcel(stream, [1])])
        mailbox.post([Parcel(stream, error=RequestFailed("stalled", "why"))])
        await asyncio.sleep(0)
        assert stream.take() == Delta([1], [])
        with pytest.raises(RequestFailed, match="why"):
            stream.take()
        assert stream.take() is None

    asyncio.run(run())


def test_an_engine_faster_than_its_clients_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the event loop comes, it never finds more than two posts at once."""
    monkeypatch.setattr(streams, "MAX_LAG_S", 60.0)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        stream, sizes = TokenStream("a", mailbox), []

        def take() -> None:
            sizes.append(len(stream.take().token_ids))

        def post() -> None:
            for token in range(50):
                mailbox.post([Parcel(stream, [token])])
                mailbox.keep_pace()

        stream.listen(take)
        posting = threading.Thread(target=post)
        posting.start()
        while sum(sizes) < 50:
            await asyncio.sleep(0)
        posting.join()
        assert max(sizes) <= 2

    asyncio.run(run())


def test_a_closed_event_loop_takes_no_parcels_and_holds_nobody_up() -> None:
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    stream = TokenStream("a", mailbox)
    loop.close()
    assert not mailbox.post([Parcel(stream, [1])])
    mailbox.keep_pace()
    assert not mailbox.post([Parcel(stream, [2])])
