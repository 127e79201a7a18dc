"""The tokens of a request, as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from swiftllm.core.request import TokenLogprob
from swiftllm.server.service.limits import NewRequest


class RequestFailed(RuntimeError):
    """The engine failed a request that the service had accepted.

    ``reason`` is one of ``deadline``, ``engine_error``, ``invalid_grammar``, ``slo_unattainable``, ``stalled`` and
    ``shutdown``; the message has the details. ``retry_after_s`` says when the request could be served, where that
    is known.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Failure(NamedTuple):
    """The fields of a :class:`RequestFailed`."""

    reason: str
    message: str
    retry_after_s: float | None = None


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Output of one request from one or more engine steps. It is a part of a message.

    ``logprobs`` has one entry a token if the request asked for them, else none. ``finish_reason`` is stop,
    length or abort; None while the request runs. ``failure``: the engine has failed the request, after these tokens.
    ``number`` names the request. Only its first delta has ``prompt_logprobs``.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    failure: Failure | None = None
    number: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def append(self, later: Delta) -> None:
        """Add the delta that came after this one."""
        self.token_ids = [*self.token_ids, *later.token_ids]
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.finish_reason, self.failure = later.finish_reason, later.failure


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
        elif self._kept is None:
            self._kept = delta
        else:
            self._kept.append(delta)
