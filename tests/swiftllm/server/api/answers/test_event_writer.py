"""Events on their way out: order, what a slow client holds up, and what is left when it goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swiftllm.server.answer import EventWriter


class Client:
    """The other end of ASGI's ``send``; while ``is_slow`` it takes a message only when it is let."""

    def __init__(self, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.messages: list[dict[str, Any]] = []
        self.may_go_on = asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        if self.is_slow:
            await self.may_go_on.wait()
        self.messages.append(message)

    def body(self) -> bytes:
        assert self.messages[0] | {"headers": []} == {"type": "http.response.start", "status": 200, "headers": []}
        return b"".join(message["body"] for message in self.messages[1:])

    def is_over(self) -> bool:
        assert all(message["more_body"] for message in self.messages[1:-1]), "something came after the end"
        return not self.messages[-1].get("more_body", True)


def test_all_that_is_written_in_a_turn_goes_in_one_message() -> None:
    async def run() -> None:
        client = Client()
        writer = EventWriter(client.send)
        writer.write("a")
        writer.write("b\u00e9")
        assert not client.messages
        await asyncio.sleep(0)
        assert [message.get("body") for message in client.messages] == [None, "ab\u00e9".encode()]
        writer.write("c")
        await writer.close()
        assert client.body() == "ab\u00e9c".encode()
        assert client.is_over()

    asyncio.run(run())


def test_a_slow_client_gets_everything_in_order() -> None:
    async def run() -> None:
        client = Client(is_slow=True)
        writer = EventWriter(client.send)
        for number in range(5):
            writer.write(str(number))
            await asyncio.sleep(0)
        assert not client.messages
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        client.may_go_on.set()
        await closing
        assert client.body() == b"01234"
        assert client.is_over()

    asyncio.run(run())


def test_a_client_that_has_become_fast_again_is_served_without_a_task() -> None:
    async def run() -> None:
        client = Client(is_slow=True)
        writer = EventWriter(client.send)
        writer.write("a")
        await asyncio.sleep(0)
        client.may_go_on.set()
        client.is_slow = False
        while len(client.messages) < 2:
            await asyncio.sleep(0)
        writer.write("b")
        await asyncio.sleep(0)
        assert client.body() == b"ab"

    asyncio.run(run())


def test_nothing_is_sent_after_a_cancel() -> None:
    async def run(is_slow: bool) -> None:
        client = Client(is_slow)
        writer = EventWriter(client.send)
        writer.write("a")
        if is_slow:
            await asyncio.sleep(0)
        writer.cancel()
        client.may_go_on.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not client.messages
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run(is_slow=False))
    asyncio.run(run(is_slow=True))


def test_what_a_held_up_send_raises_reaches_who_closes() -> None:
    async def run() -> None:
        async def send(message: dict[str, Any]) -> None:
            await asyncio.sleep(0)
            raise OSError("gone")

        writer = EventWriter(send)
        writer.write("a")
        await asyncio.sleep(0)
        with pytest.raises(OSError, match="gone"):
            await writer.close()

    asyncio.run(run())
