"""The HTTP backend with faulty servers, over real sockets."""

from __future__ import annotations

import functools
import threading
import time

import pytest

from apex.replay.records import REFUSED
from tests.evaluation.fake_server import token_by_token
from tests.evaluation.http_replay import only_record, replayed


def started(exchange):
    exchange.start()
    exchange.chunk("a", None, 1)
    exchange.chunk("b", None, 2)


def fails_in_the_middle(exchange, body, index):
    started(exchange)
    exchange.event({"error": {"message": "engine died", "code": 500}})
    exchange.event("[DONE]")
    exchange.end()


def disconnects_in_the_middle(exchange, body, index):
    started(exchange)
    exchange.disconnect()


def ends_early(exchange, body, index):
    started(exchange)
    exchange.end()


def sends_garbage(exchange, body, index):
    started(exchange)
    exchange.event('{"choices": [')
    exchange.done(2)


def sends_another_shape(exchange, body, index):
    started(exchange)
    exchange.event({"choices": [{"delta": {"content": "c"}}]})
    exchange.done(3)


def sends_a_list(exchange, body, index):
    started(exchange)
    exchange.event([1])
    exchange.done(3)


def stops_early(exchange, body, index):
    started(exchange)
    exchange.chunk("c", "stop", 3)
    exchange.done(3)


def does_not_stop(exchange, body, index):
    exchange.start()
    for number in range(1, 100):
        exchange.chunk("a", None, number)
    exchange.done(99)


def counts_nothing(exchange, body, index):
    exchange.start()
    for _ in range(6):
        exchange.chunk("a")
    exchange.done(None)


def is_no_stream(exchange, body, index):
    exchange.refuse(200, {"choices": [{"text": "abc"}]}, Content_Type="application/json")


@pytest.mark.parametrize(
    ("behave", "tokens", "words"),
    [
        (fails_in_the_middle, 2, "failed in the middle of the stream: engine died"),
        (disconnects_in_the_middle, 2, "connection failed after 2 tokens: peer closed connection"),
        (ends_early, 2, "ended after 2 tokens without [DONE]"),
        (sends_garbage, 2, "malformed event '{\"choices\": ['"),
        (sends_another_shape, 2, "malformed event"),
        (sends_a_list, 2, "malformed event '[1]'"),
        (stops_early, 3, "3 of 6 tokens (finish reason: stop)"),
        (does_not_stop, 6, "7 tokens where 6 were asked for"),
        (counts_nothing, 6, "no usage in the stream"),
        (is_no_stream, 0, "text/event-stream"),
        (lambda exchange, *_: exchange.disconnect(), 0, "connection failed: Server disconnected"),
    ],
)
def test_a_wrong_answer_is_a_failed_record_with_the_reason(behave, tokens, words):
    record = only_record(behave)
    assert not record.completed and words in record.failure and record.output_len == tokens
    assert record.finish_s is not None


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (429, {"error": {"message": "queue is full", "code": 429}}, f"{REFUSED}HTTP 429: queue is full"),
        (400, {"object": "error", "message": "too long"}, "HTTP 400: too long"),
        (500, "<html>oops</html>", "HTTP 500: <html>oops"),
        (503, "", "HTTP 503: Service Unavailable"),
    ],
)
def test_a_refused_request_is_a_failed_record_and_others_go_on(status, body, words):
    def refuse_one(exchange, request, index):
        if request["max_tokens"] == 3:
            exchange.refuse(status, body, Retry_After="1")
        else:
            token_by_token(exchange, request, index)

    result, requests = replayed(refuse_one, (4, 2, 0.0), (4, 3, 0.0), (4, 2, 0.1))
    assert [record.completed for record in result.records] == [True, False, True]
    assert result.records[1].failure.startswith(words) and len(requests) == 3  # a refused request is not sent again


def hangs_on_four(release, exchange, body, index):
    """Requests of four tokens get only two; requests of five get none."""
    if body["max_tokens"] == 4:
        started(exchange)
    if body["max_tokens"] in (4, 5):
        release.wait(10)
        return exchange.disconnect()
    return token_by_token(exchange, body, index)


def test_a_stall_fails_the_rest_with_the_state():
    release = threading.Event()
    rows = [(4, 2, 0.0), (4, 4, 0.0), (4, 5, 0.1), (4, 2, 60.0)]
    result, _ = replayed(functools.partial(hangs_on_four, release), *rows, stall_timeout_s=2.0)
    release.set()
    first, middle, waiting, unsent = result.records
    assert first.completed and middle.output_len == 2 and waiting.output_len == unsent.output_len == 0
    for record in (middle, waiting, unsent):
        assert record.failure == (
            "stalled: no token for 2 s; 1 requests finished, 1 in the middle of their answer, 1 without a first "
            "token, 1 not sent; GET /health answers 200"
        )


def test_the_end_of_the_server_fails_the_rest_at_once():
    """One request is in the middle of its answer, the other would be sent an hour later."""
    release, calls = threading.Event(), []

    def hangs(exchange, body, index):
        started(exchange)
        release.wait(30)

    def ended():
        calls.append(1)
        return "it ended with status 3" if len(calls) > 2 else None

    try:
        result, requests = replayed(hangs, (4, 6, 0.0), (4, 6, 3600.0), ended=ended)
    finally:
        release.set()
    assert [record.failure for record in result.records] == ["it ended with status 3"] * 2 and len(requests) == 1


def test_waiting_for_arrivals_is_no_stall():
    def slow(exchange, body, index):
        time.sleep(0.1)
        token_by_token(exchange, body, index)

    result, _ = replayed(slow, (4, 2, 0.0), (4, 2, 2.5), stall_timeout_s=2.0)
    assert all(record.completed for record in result.records)


def test_slow_progress_is_no_stall():
    def a_token_now_and_then(exchange, body, index):
        exchange.start()
        for number in range(1, 7):
            time.sleep(0.4)
            exchange.chunk("a", "length" if number == 6 else None, number)
        exchange.done(6)

    assert only_record(a_token_now_and_then, stall_timeout_s=2.0).completed


def test_a_request_that_takes_too_long_fails_alone():
    release = threading.Event()
    rows = [(4, 4, 0.0), (4, 2, 0.5)]
    result, _ = replayed(functools.partial(hangs_on_four, release), *rows, request_timeout_s=2.0)
    release.set()
    late, good = result.records
    assert late.failure == "no end within 2 s, after 2 tokens" and late.output_len == 2 and good.completed
