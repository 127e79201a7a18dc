"""Carries tokens from the engine's thread to the event loops of its clients."""

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
    """The engine failed a request that the service had accepted.

    ``reason`` is one of ``deadline``, ``engine_error``, ``slo_unattainable``, ``stalled`` and ``shutdown``; the message
    has the details. ``retry_after_s`` says when the request could be served, where that is known.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Delta(NamedTuple):
    """Output of one request from one or more engine steps.

    ``logprobs`` has one entry a token if the request asked for them, else none. ``finish_reason`` is stop,
    length or abort; None while the request runs. ``error``: the engine has failed the request, after these tokens.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: RequestFailed | None = None

    def merged_with(self, later: Delta) -> Delta:
        """This delta and the one after it as one delta."""
        token_ids, logprobs = [*self.token_ids, *later.token_ids], [*self.logprobs, *later.logprobs]
        return Delta(token_ids, logprobs, later.finish_reason, later.error)


class TokenStream:
    """The output of one request, on the event loop that submitted it. A ``finish_reason`` or an error ends it.

    ``prompt_logprobs`` is the request's own list, complete when its first token arrives. So is ``num_cached_tokens``,
    the tokens of its prompt that were found in the prefix cache.
    """

    def __init__(
        self, request_id: str, dispatcher: DeltaDispatcher, prompt_logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        self.request_id = request_id
        self.dispatcher = dispatcher
        self.prompt_logprobs = prompt_logprobs
        self.num_cached_tokens = 0
        self._listener: Callable[[Delta], None] | None = None
        self._kept: Delta | None = None  # deltas that arrived while there was no listener

    def set_listener(self, listener: Callable[[Delta], None] | None) -> None:
        """Call ``listener`` with the deltas that have arrived and with every later one; None removes the listener."""
        self._listener = listener
        if listener is not None and self._kept is not None:
            kept, self._kept = self._kept, None
            listener(kept)

    def push_delta(self, delta: Delta) -> None:
        """Pass a delta to the listener, or keep it for the next one. Must be called on the stream's event loop."""
        if self._listener is not None:
            self._listener(delta)
        else:
            self._kept = delta if self._kept is None else self._kept.merged_with(delta)


StreamDelta = tuple[TokenStream, Delta]


class DeltaDispatcher:
    """Passes deltas to the streams of one event loop.

    One wake-up of the loop serves all posts since the last one, merged into one delta a stream.

    Attributes:
        is_serving: deltas are posted, or the loop has not finished serving the last ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._posted: list[StreamDelta] = []
        self._num_posts = 0  # not yet taken by the event loop
        self.is_serving = False
        self._post_s = 0.0  # time of the first post that the loop serves
        self._serving_s = 0.0  # how long the last serving took, from that post on
        self._go_on_s = -math.inf  # when the engine last continued
        self._changed = threading.Condition()

    def post_deltas(self, deltas: Sequence[StreamDelta]) -> bool:
        """Queue deltas for the event loop; False if the loop is closed. From any thread."""
        with self._changed:
            self._posted += deltas
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

    def apply_backpressure(self) -> None:
        """Wait for the event loop if the engine is faster; the engine calls this after each post.

        The engine is faster if it posts again before the loop has taken the last post, or if its part of a step was
        shorter than serving one. Without the wait the engine would hold the interpreter's lock while the loop needs it
        to serve the tokens. The wait ends after ``MAX_LAG_S``: then something else delays the loop.
        """
        with self._changed:
            is_faster = self._post_s - self._go_on_s < self._serving_s
            if self.is_serving and (is_faster or self._num_posts > 1):
                self._changed.wait_for(lambda: not self.is_serving, MAX_LAG_S)
            self._go_on_s = time.perf_counter()

    def _take(self) -> list[StreamDelta]:
        with self._changed:
            deltas, self._posted, self._num_posts = self._posted, [], 0
        return deltas

    def _deliver(self) -> None:
        deltas: dict[TokenStream, Delta] = {}
        for stream, delta in self._take():
            earlier = deltas.get(stream)
            deltas[stream] = delta if earlier is None else earlier.merged_with(delta)
        for stream, delta in deltas.items():
            stream.push_delta(delta)
        self.loop.call_soon(self._end_serving)  # after the callbacks that the listeners have scheduled

    def _end_serving(self) -> None:
        with self._changed:
            if not self._num_posts:
                self.is_serving, self._serving_s = False, time.perf_counter() - self._post_s
                self._changed.notify_all()
