"""The way of tokens from the engine's thread to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swiftllm.request import TokenLogprob

MAX_LAG_S = 0.05


class RequestFailed(RuntimeError):
    """The engine failed a request that it had taken.

    ``reason`` is one of ``deadline``, ``engine_error``, ``stalled`` and ``shutdown``; the message says more.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Delta(NamedTuple):
    """What one or more engine steps gave one request.

    ``logprobs`` has one entry for each token where the request asked for them, else none. ``finish_reason`` is stop,
    length or abort; None while the request runs.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None


class Parcel(NamedTuple):
    """Something for one stream. ``error`` ends it, and so does ``finish_reason``."""

    stream: TokenStream
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: RequestFailed | None = None


class TokenStream:
    """The output of one request on the event loop that submitted it, by :meth:`take` or as an async iterator.

    Steps that came while nobody looked are merged into one :class:`Delta`. The last one has a ``finish_reason``.
    """

    def __init__(self, request_id: str, mailbox: Mailbox) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: str | None = None
        self._error: RequestFailed | None = None
        self._is_over = False
        self._on_news: Callable[[], None] | None = None

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Have ``on_news`` called on the event loop whenever there is something to take; None: no longer.

        It is called once for all that has come, so it has to take until there is nothing left.
        """
        self._on_news = on_news
        if on_news is not None and (self._token_ids or self._finish_reason or self._error):
            on_news()

    def take(self) -> Delta | None:
        """What has come since the last time; None if nothing has.

        Raises:
            RequestFailed: the engine failed the request. Raised once, after the last delta.
        """
        if self._token_ids or self._finish_reason is not None:
            delta = Delta(self._token_ids, self._logprobs, self._finish_reason)
            self._is_over = self._finish_reason is not None
            self._token_ids, self._logprobs, self._finish_reason = [], [], None
            return delta
        error, self._error = self._error, None
        if error is not None:
            self._is_over = True
            raise error
        return None

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_over:
            raise StopAsyncIteration
        while (delta := self.take()) is None:
            news = asyncio.Event()
            self.listen(news.set)
            await news.wait()
        return delta

    def put(self, parcel: Parcel) -> None:
        """On the stream's own event loop, as is :meth:`tell`."""
        self._token_ids += parcel.token_ids
        self._logprobs += parcel.logprobs
        self._finish_reason = parcel.finish_reason
        self._error = parcel.error

    def tell(self) -> None:
        """To be called after parcels have been put."""
        if self._on_news is not None:
            self._on_news()


class Mailbox:
    """Brings parcels to the streams of one event loop, with one wake-up for all that has come since the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._parcels: list[Parcel] = []
        self._num_posts = 0  # that the event loop has not taken
        self._taken = threading.Condition()

    def post(self, parcels: Sequence[Parcel]) -> bool:
        """From any thread. False if the event loop is closed: nobody will ever read this."""
        with self._taken:
            self._parcels += parcels
            self._num_posts += 1
            if self._num_posts > 1:
                return True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._take()
            return False
        return True

    def keep_pace(self) -> None:
        """Wait while the event loop has not taken what was posted before the last post; not from its own thread.

        An engine faster than its clients can be served would else hold the interpreter's lock against the very thread
        that serves them, which would lag ever further behind. After ``MAX_LAG_S`` the loop has other troubles.
        """
        with self._taken:
            if self._num_posts > 1:
                self._taken.wait(MAX_LAG_S)

    def _take(self) -> list[Parcel]:
        with self._taken:
            parcels, self._parcels, self._num_posts = self._parcels, [], 0
            self._taken.notify_all()
        return parcels

    def _deliver(self) -> None:
        parcels = self._take()
        for parcel in parcels:
            parcel.stream.put(parcel)
        for stream in dict.fromkeys([parcel.stream for parcel in parcels]):
            stream.tell()
