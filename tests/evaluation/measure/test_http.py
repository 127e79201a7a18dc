"""The HTTP backend with correct servers, and its check that a server is ready; over real sockets."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from apex.replay.metrics import compute_metrics
from evaluation.measure.http import HttpReplay, SentRequest, replay_workload, spread_over
from evaluation.measure.server import Server, ServerNotReady, connect_server
from swiftllm.core.request import ServiceClass
from tests.evaluation.fake_server import FakeServer, token_by_token
from tests.evaluation.http_replay import only_record, replayed, workload


def test_a_normal_run():
    work = workload((4, 6, 0.0), (5, 1, 0.0), (3, 9, 0.0))
    with FakeServer() as fake:
        server = connect_server("fake", fake.url, 60.0)
        result = replay_workload(server, work)
    assert (server.model, server.max_model_len, server.version) == ("some/Tiny-Llama", 4096, "9.9")
    assert [record.request_id for record in result.records] == ["osc-0", "osc-1", "osc-2"]
    for record, request in zip(result.records, work.requests, strict=True):
        assert record.failure is None and record.finish_reason == "length"
        assert record.output_len == request.output_len and record.prompt_len == len(request.prompt_token_ids)
        assert list(record.token_times_s) == sorted(record.token_times_s)
        assert 0 < record.first_token_s <= record.token_times_s[-1] <= record.finish_s <= result.wall_s
    assert 0 <= result.stats["max_send_lag_s"] < result.wall_s
    sent = sorted((body for _, body in fake.requests), key=lambda body: body["max_tokens"])
    assert [body["prompt"] for body in sent] == [list(work.requests[i].prompt_token_ids) for i in (1, 0, 2)]
    del sent[0]["prompt"]
    assert sent[0] == {
        "model": "some/Tiny-Llama",
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


@pytest.fixture
def received_s(monkeypatch) -> list[float]:
    """When the client received each event but the last, by its own clock."""
    moments, receive = [], SentRequest.receive

    def noted(sent, data, now_s):
        moments.append(now_s)
        receive(sent, data, now_s)

    monkeypatch.setattr(SentRequest, "receive", noted)
    return moments


def test_tokens_of_one_chunk_share_its_time(received_s):
    def three_and_two(exchange, body, index):
        exchange.start()
        exchange.chunk("abc", None, 3)
        exchange.chunk("", None, 3)  # nothing new
        exchange.chunk("de", "length", 5)
        exchange.done(5)

    (record,) = replayed(three_and_two, (4, 5, 0.0))[0].records
    first, _, second, _ = received_s
    assert record.completed and record.token_times_s == (first, first, first, second, second) and first < second


def test_a_server_that_counts_only_at_the_end(received_s):
    def two_chunks(exchange, body, index):
        exchange.start()
        exchange.chunk("abc")
        exchange.chunk("def")
        exchange.chunk("", "length")  # closes the stream, carries no token
        exchange.done(6)

    record = only_record(two_chunks)
    first, second, _, _ = received_s
    assert record.completed and record.output_len == 6
    assert record.token_times_s == (first, first, first, second, second, second)


@pytest.mark.parametrize(
    ("chunks", "tokens", "expected"),
    [
        ([1.0, 2.0, 3.0], 3, (1.0, 2.0, 3.0)),
        ([1.0, 2.0], 4, (1.0, 1.0, 2.0, 2.0)),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 2, (1.0, 5.0)),
        ([1.0], 3, (1.0, 1.0, 1.0)),
        ([1.0, 2.0], 1, (1.0,)),
    ],
)
def test_tokens_are_spread_from_the_first_chunk_to_the_last(chunks, tokens, expected):
    assert spread_over(chunks, tokens) == expected


def test_a_slow_first_token_is_the_time_to_first_token():
    waited_s = []

    def slow(exchange, body, index):
        begun_s = time.perf_counter()
        exchange.start()
        time.sleep(0.3)
        waited_s.append(time.perf_counter() - begun_s)
        exchange.chunk("a", None, 1)
        exchange.chunk("b", "length", 2)
        exchange.done(2)

    result, _ = replayed(slow, (4, 2, 0.0))
    metrics = compute_metrics(result.records, result.wall_s)
    first_s, second_s = result.records[0].token_times_s
    assert metrics["ttft_s_mean"] == first_s >= waited_s[0]
    assert metrics["tpot_s_mean"] == pytest.approx(second_s - first_s)
    assert metrics["gpu_batch_busy_fraction"] is None and metrics["cpu_busy_fraction"] is None


def test_open_loop_arrivals_wait_for_nobody(monkeypatch):
    """The server answers none before it has all."""
    all_there, sent, record_of = threading.Barrier(3), [], SentRequest.record

    def together(exchange, body, index):
        all_there.wait(60)
        token_by_token(exchange, body, index)

    def noted(stream):
        sent.append(stream)
        return record_of(stream)

    monkeypatch.setattr(SentRequest, "record", noted)
    result, _ = replayed(together, (4, 2, 0.5), (4, 2, 0.0), (4, 2, 0.25))
    assert [record.arrival_s for record in result.records] == [0.5, 0.0, 0.25]
    assert all(record.completed for record in result.records)
    assert all(stream.sent_s >= stream.arrival_s for stream in sent)


def test_many_at_once_are_all_under_way_together():
    together = threading.Barrier(100)

    def all_or_none(exchange, body, index):
        together.wait(60)
        token_by_token(exchange, body, index)

    result, _ = replayed(all_or_none, *[(4, 2, 0.0)] * 100)
    assert all(record.completed for record in result.records)


def test_a_line_separator_within_a_token_breaks_no_event():
    def separators(exchange, body, index):
        exchange.start()
        exchange.chunk("a\u2028b\u0085", "length", 1)
        exchange.done(1)

    assert replayed(separators, (4, 1, 0.0))[0].records[0].completed


def test_a_server_that_is_never_there():
    with FakeServer() as gone:
        url = gone.url
    with pytest.raises(
        ServerNotReady, match=r"vllm: no server ready at .* within 0.3 s .*`vllm serve MODEL --port \d+`"
    ):
        connect_server("vllm", url, 0.3)


def test_a_server_that_is_still_loading():
    with FakeServer() as fake:
        fake.pages["/health"] = (503, {"detail": "loading"})
        with pytest.raises(ServerNotReady, match=r"GET /health: HTTP 503"):
            connect_server("fake", fake.url, 0.3)
        threading.Timer(0.3, fake.pages.__setitem__, ("/health", (200, ""))).start()
        assert connect_server("fake", fake.url, 60.0).version == "9.9"


def test_a_server_without_health_and_version():
    with FakeServer() as fake:
        del fake.pages["/health"], fake.pages["/version"]
        fake.pages["/v1/models"] = (200, {"data": [{"id": "m"}]})
        server = connect_server("fake", fake.url, 60.0)
    assert (server.model, server.version, server.max_model_len) == ("m", None, None)


@pytest.mark.parametrize("page", [(200, "<html>"), (200, {"data": []}), (401, {"error": "key"}), (200, ["x"])])
def test_a_server_of_another_kind(page):
    with FakeServer() as fake:
        fake.pages["/v1/models"] = page
        with pytest.raises(ServerNotReady, match="no OpenAI-compatible server"):
            connect_server("fake", fake.url, 1.0)


def test_best_effort_requests_are_sent_as_such_and_recorded() -> None:
    work = workload((4, 3, 0.0), (5, 3, 0.0, ServiceClass.BEST_EFFORT))
    with FakeServer() as fake:
        result = replay_workload(connect_server("fake", fake.url, 60.0), work)
    assert [record.service_class for record in result.records] == ["latency-sensitive", "best-effort"]
    assert {len(body["prompt"]): body.get("priority") for _, body in fake.requests} == {4: None, 5: 1}


def test_a_run_of_fixed_duration_keeps_the_tokens_of_unfinished_requests(monkeypatch) -> None:
    """By a clock that goes on once the first request has ended and the second has three tokens."""
    is_over = threading.Event()

    def three_tokens(exchange, body, index):
        exchange.start()
        for number in range(1, min(3, body["max_tokens"]) + 1):
            exchange.chunk("a", None, number)
        if body["max_tokens"] > 3:
            is_over.wait(60)
        exchange.done(body["max_tokens"])

    def now(replay):
        whole, cut, _ = replay.streams
        return 0.5 if whole.finish_s is None or cut.tokens_so_far < 3 else 1.5

    monkeypatch.setattr(HttpReplay, "now", now)
    result, _ = replayed(three_tokens, (4, 2, 0.0), (4, 1000, 0.0), (4, 5, 30.0), duration_s=1.0)
    is_over.set()
    whole, cut, unsent = result.records
    assert result.wall_s == 1.5
    assert whole.completed and not cut.completed and "after 1 s" in cut.failure and "after 1 s" in unsent.failure
    assert cut.token_times_s == (0.5, 0.5, 0.5)
    metrics = compute_metrics(result.records, result.wall_s, window_s=1.0)
    assert (metrics["latency_sensitive_arrived"], metrics["latency_sensitive_completed"]) == (2, 1)
    assert metrics["latency_sensitive_output_tokens"] == 2 + 3


BEST_EFFORT = (4, 1, 0.0, ServiceClass.BEST_EFFORT)


def test_best_effort_requests_begin_one_by_one_beside_the_others(monkeypatch):
    """In passes of the client's event loop. Each of the requests in flight would take its time of a pass."""
    begun, num_passes = [], 0

    async def complete(replay, stream):
        begun.append((stream.request.service_class, num_passes))

    async def count():
        nonlocal num_passes
        while True:
            num_passes += 1
            await asyncio.sleep(0)

    async def run():
        replay = HttpReplay(Server("none", "http://none", "none"), workload(*[BEST_EFFORT] * 20, (4, 1, 0.0)), 1.0, str)
        replay.start_s = time.perf_counter()
        counting = asyncio.create_task(count())
        await replay.send_all()
        counting.cancel()

    monkeypatch.setattr(HttpReplay, "complete", complete)
    asyncio.run(run())
    passes = [number for service_class, number in begun if service_class is ServiceClass.BEST_EFFORT]
    assert len(set(passes)) == 20 and [one for one, _ in begun].index(ServiceClass.LATENCY_SENSITIVE) < 3


def test_the_send_lag_of_each_class():
    result, sent = replayed(token_by_token, *[BEST_EFFORT] * 20, (4, 1, 0.0))
    assert [record.failure for record in result.records] == [None] * 21
    assert sum("priority" in body for _, body in sent) == 20
    assert result.stats.keys() == {"max_send_lag_s", "max_best_effort_send_lag_s"}
    assert 0 <= result.stats["max_send_lag_s"] <= result.stats["max_best_effort_send_lag_s"]


def test_the_lag_of_each_class_is_that_of_its_own_requests(monkeypatch):
    """The largest of those that were sent; one that never was has none."""
    replay = HttpReplay(
        Server("none", "http://none", "none"), workload(*[BEST_EFFORT] * 2, *[(4, 1, 2.0)] * 3), 1.0, str
    )
    sent = [9.0, 5.0, 2.25, 2.75, None]
    for stream, sent_s in zip(replay.streams, sent, strict=True):
        stream.sent_s = sent_s
    own, other = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT
    assert (replay.max_send_lag_s(own), replay.max_send_lag_s(other)) == (0.75, 9.0)

    async def nothing(self):
        pass

    monkeypatch.setattr(HttpReplay, "send_all", nothing)
    stats = asyncio.run(replay.run(None, 60.0, 60.0)).stats
    assert stats == {"max_send_lag_s": 0.75, "max_best_effort_send_lag_s": 9.0}
