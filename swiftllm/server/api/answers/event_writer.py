"""Sends server-sent events; it needs no asyncio task while the client keeps up."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Message, Send

SERVER_SEND = "swiftllm.send"  # key of the server's own ``send`` in an ASGI scope
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from buffering the events
]


class EventWriter:
    """The body of one response. Headers go before the first event.

    Text written in one pass of the event loop is sent in the next one. So the texts of all streams of a step are made
    before the first is sent, which suits the processor's caches. Text for a slow client is kept here, until its
    connection is dropped (``ClientConnection``).
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._texts: list[str] = []
        self._has_begun = False
        self._sender: asyncio.Task[None] | None = None  # while a slow client blocks the sending
        self._send_handle: asyncio.Handle | None = None

    def write(self, text: str) -> None:
        """Add text to the body. Never waits; must be called on the event loop's thread."""
        self._texts.append(text)
        if self._send_handle is None and self._sender is None:
            self._send_handle = asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._send_handle = None
        rest = run_until_wait(self._send(self._body(more=True)) if self._has_begun else self._send_first())
        if rest is not None:
            self._sender = asyncio.create_task(self._send_rest(rest))

    async def _send_first(self) -> None:
        await self._begin_body()
        await self._send(self._body(more=True))

    async def _send_rest(self, rest: Awaitable[None]) -> None:
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
        """Send the remaining text and end the body."""
        if self._sender is not None:
            await self._sender
        self.cancel()
        if not self._has_begun:
            await self._begin_body()
        await self._send(self._body(more=False))

    def cancel(self) -> None:
        """Cancel all sending that is scheduled or blocked."""
        for under_way in (self._send_handle, self._sender):
            if under_way is not None:
                under_way.cancel()


def run_until_wait(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run a coroutine until it first waits. Returns the rest of it, or None if it is done."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return resume_coroutine(coroutine, awaited)


@types.coroutine
def resume_coroutine(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that has yielded ``awaited`` and waits for it."""
    try:
        yield awaited
    except BaseException:
        coroutine.close()
        raise
    yield from coroutine
