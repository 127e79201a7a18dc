"""The way of tokens from the engine's thread to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from swiftllm.core.request import TokenLogprob

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
    length or abort; None while the request runs. ``error``: the engine has failed the request, after these tokens.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: RequestFailed | None = None

    def then(self, later: Delta) -> Delta:
        """Both as one."""
        token_ids, logprobs = [*self.token_ids, *later.token_ids], [*self.logprobs, *later.logprobs]
        return Delta(token_ids, logprobs, later.finish_reason, later.error)


class TokenStream:
    """The output of one request, on the event loop that submitted it. A ``finish_reason`` or an error is the end.

    ``prompt_logprobs``: the request's own, all there when its first token is.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, prompt_logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self.prompt_logprobs = prompt_logprobs
        self._listener: Callable[[Delta], None] | None = None
        self._kept: Delta | None = None  # what came while nobody listened

    def listen(self, listener: Callable[[Delta], None] | None) -> None:
        """Have ``listener`` called with what has come already and with whatever comes; None: no longer."""
        self._listener = listener
        if listener is not None and self._kept is not None:
            kept, self._kept = self._kept, None
            listener(kept)

    def put(self, delta: Delta) -> None:
        """On the stream's own event loop."""
        if self._listener is not None:
            self._listener(delta)
        else:
            self._kept = delta if self._kept is None else self._kept.then(delta)


Parcel = tuple[TokenStream, Delta]


class Mailbox:
    """Brings deltas to the streams of one event loop: one wake-up, and one delta a stream, for all since the last.

    Attributes:
        is_serving: something is posted, or on its way out.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._parcels: list[Parcel] = []
        self._num_posts = 0  # that the event loop has not taken
        self.is_serving = False
        self._post_s = 0.0  # when the last post was made ...
        self._serving_s = 0.0  # ... and how long it took to serve the last one that has been served
        self._go_on_s = -math.inf  # when the engine was let go on
        self._changed = threading.Condition()

    def post(self, parcels: Sequence[Parcel]) -> bool:
        """From any thread. False if the event loop is closed: nobody will ever read this."""
        with self._changed:
            self._parcels += parcels
            self._num_posts += 1
            if self._num_posts > 1:
                return True
            self.is_serving, self._post_s = True, time.perf_counter()
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            self._take()
            self._end_serving()
            return False
        return True

    def keep_pace(self) -> None:
        """Called by an engine after each post: wait for the event loop where the engine is faster.

        It is if there is a post that has not even been taken when the next one comes, or if the engine's own part of a
        step was shorter than serving one. It would then hold the interpreter's lock against the very thread that
        serves its tokens, and nothing would be gained. After ``MAX_LAG_S`` the loop has other troubles.
        """
        with self._changed:
            is_faster = self._post_s - self._go_on_s < self._serving_s
            if self.is_serving and (is_faster or self._num_posts > 1):
                self._changed.wait_for(lambda: not self.is_serving, MAX_LAG_S)
            self._go_on_s = time.perf_counter()

    def _take(self) -> list[Parcel]:
        with self._changed:
            parcels, self._parcels, self._num_posts = self._parcels, [], 0
        return parcels

    def _deliver(self) -> None:
        deltas: dict[TokenStream, Delta] = {}
        for stream, delta in self._take():
            earlier = deltas.get(stream)
            deltas[stream] = delta if earlier is None else earlier.then(delta)
        for stream, delta in deltas.items():
            stream.put(delta)
        self.loop.call_soon(self._end_serving)  # after what the streams' listeners have put off to the next turn

    def _end_serving(self) -> None:
        with self._changed:
            if not self._num_posts:
                self.is_serving, self._serving_s = False, time.perf_counter() - self._post_s
                self._changed.notify_all()
