"""Server-sent events on their way out: written by whoever has some, sent without a task while the client keeps up."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Send

SERVER_SEND = "swiftllm.send"  # where in a scope the server's own ``send`` stands
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class EventWriter:
    """The body of one response. Headers go before the first event.

    What is written in a turn of the event loop is sent in the next one: the texts of all streams of an engine's step
    are made before the first is sent, which keeps the processor's caches with one thing at a time. What comes while a
    slow client holds up the sending waits here; it is bounded by what the request may generate.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._texts: list[str] = []
        self._has_begun = False
        self._sender: asyncio.Task[None] | None = None  # while the client holds it up
        self._turn: asyncio.Handle | None = None

    def write(self, text: str) -> None:
        """Never waits. On the event loop's thread."""
        self._texts.append(text)
        if self._turn is None and self._sender is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        rest = begin(self._send(self._body(more=True)) if self._has_begun else self._send_first())
        if rest is not None:
            self._sender = asyncio.create_task(self._go_on(rest))

    async def _send_first(self) -> None:
        await self._begin_body()
        await self._send(self._body(more=True))

    async def _go_on(self, rest: Awaitable[None]) -> None:
        await rest
        while self._texts:
            await self._send(self._body(more=True))
        self._sender = None

    async def _begin_body(self) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})

    def _body(self, more: bool) -> Message:
        body = "".join(self._texts).encode()
        self._texts.clear()
        return {"type": "http.response.body", "body": body, "more_body": more}

    async def close(self) -> None:
        """Send what is left and end the body."""
        if self._sender is not None:
            await self._sender
        self.cancel()
        if not self._has_begun:
            await self._begin_body()
        await self._send(self._body(more=False))

    def cancel(self) -> None:
        """Send nothing more, unless it is closed."""
        for under_way in (self._turn, self._sender):
            if under_way is not None:
                under_way.cancel()


def begin(coroutine: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
    """Run a coroutine here and now, as far as it goes without waiting. What is left of it; None: it is done."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return go_on(coroutine, awaited)


@types.coroutine
def go_on(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that waits for what it has ``awaited``."""
    try:
        yield awaited
    except BaseException:
        coroutine.close()
        raise
    yield from coroutine
