"""The tokens of a request on their way to who listens."""

from __future__ import annotations

from swiftllm.core.request import SamplingParams
from swiftllm.server.messages import Delta, Failure, NewRequest, TokenStream


def new_stream() -> tuple[TokenStream, list[Delta]]:
    return TokenStream(NewRequest("a", (1,), SamplingParams()), 0, 0.0), []


def test_who_listens_late_gets_all_that_came_before() -> None:
    stream, deltas = new_stream()
    for token in (1, 2):
        stream.push_delta(Delta([token]))
    stream.set_listener(deltas.append)
    assert deltas == [Delta([1, 2], [])]
    stream.set_listener(None)
    stream.push_delta(Delta([3]))
    assert len(deltas) == 1
    stream.set_listener(deltas.append)
    assert deltas[1:] == [Delta([3])]


def test_an_error_keeps_the_tokens_before_it() -> None:
    stream, deltas = new_stream()
    failure = Failure("stalled", "why")
    stream.push_delta(Delta([1]))
    stream.push_delta(Delta(failure=failure))
    stream.set_listener(deltas.append)
    assert deltas == [Delta([1], [], None, failure)]
