"""The tokens of a request, as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from swiftllm.core.request import TokenLogprob
from swiftllm.server.service.limits import NewRequest


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
    """The output of one request. A ``finish_reason`` or an error ends it.

    ``number`` names the request in messages. ``prompt_logprobs`` is complete when its first token arrives. So is
    ``num_cached_tokens``, the tokens of its prompt that were found in the prefix cache. ``new_s`` is when the request
    was submitted, then when its last tokens arrived, by the client's clock; it has no tokens yet if ``is_new``.
    """

    def __init__(self, new: NewRequest, number: int, now_s: float, deadline_s: float | None = None) -> None:
        self.request_id = new.request_id
        self.service_class = new.service_class
        self.number = number
        self.deadline_s = deadline_s
        self.new_s, self.is_new = now_s, True
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
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
        """Pass a delta to the listener, or keep it for the next one."""
        if self._listener is not None:
            self._listener(delta)
        else:
            self._kept = delta if self._kept is None else self._kept.merged_with(delta)
