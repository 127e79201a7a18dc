"""The way of tokens from the engine's thread to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swiftllm.request import TokenLogprob


class RequestFailed(RuntimeError):
    """The engine failed a request that it had taken.

    ``reason`` is one of ``deadline``, ``engine_error``, ``stalled`` and ``shutdown``; the message says more.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Delta:
    """What one or more engine steps gave one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token where the request asked for them, else empty."""
    finish_reason: str | None = None
    """stop, length or abort; None while the request runs."""


class Parcel(NamedTuple):
    """Something for one stream. ``error`` ends it, and so does ``finish_reason``."""

    stream: TokenStream
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: RequestFailed | None = None


class TokenStream:
    """The output of one request: an async iterator of :class:`Delta` on the event loop that submitted it.

    It ends after the delta with a ``finish_reason``, or raises :class:`RequestFailed`. Steps that came while nobody
    looked are merged into one delta.
    """

    def __init__(self, request_id: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None
        self._error: RequestFailed | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        while not (self._token_ids or self._finish_reason or self._error or self._is_over):
            self._waiter = self.mailbox.loop.create_future()
            await self._waiter
        if self._is_over:
            raise StopAsyncIteration
        if self._token_ids or self._finish_reason:
            delta = Delta(tuple(self._token_ids), tuple(self._logprobs), self._finish_reason)
            self._is_over = self._finish_reason is not None
            self._token_ids, self._logprobs = [], []
            return delta
        self._is_over = True
        raise self._error

    def take(self, parcel: Parcel) -> None:
        """On the stream's own event loop."""
        self._token_ids += parcel.token_ids
        self._logprobs += parcel.logprobs
        self._finish_reason = parcel.finish_reason
        self._error = parcel.error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Mailbox:
    """Brings parcels to the streams of one event loop, with one wake-up for all that has come since the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = threading.Lock()
        self._parcels: list[Parcel] = []

    def post(self, parcels: Sequence[Parcel]) -> bool:
        """From any thread. False if the event loop is closed: nobody will ever read this."""
        with self._lock:
            wakes = not self._parcels
            self._parcels += parcels
        if wakes:
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                self._parcels.clear()
                return False
        return True

    def _deliver(self) -> None:
        with self._lock:
            parcels, self._parcels = self._parcels, []
        for parcel in parcels:
            parcel.stream.take(parcel)
