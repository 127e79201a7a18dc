"""The HTTP backend against servers that behave and servers that do not, over real sockets."""

from __future__ import annotations

import functools
import json
import threading
import time

import pytest
import tyro

from evaluation import reproduce_fig5, reproduce_fig6, reproduce_fig7
from evaluation.drivers.http import replay, spread_over
from evaluation.drivers.server import ServerNotReady, connect
from evaluation.metrics import compute_metrics
from evaluation.options import FigureOptions
from evaluation.results import read_records, records_file
from evaluation.traces import Origin, TraceRow
from evaluation.workloads import Lengths, PromptTokens, WorkloadSpec, load_prompt_tokens, make_workload
from tests.evaluation.fake_server import FakeServer, token_by_token


def workload(*rows):
    spec = WorkloadSpec("osc", len(rows))
    lengths = Lengths(spec, "OSC", Origin("fitted", "for tests"), tuple(TraceRow(*row) for row in rows))
    return make_workload(lengths, PromptTokens(100))


def replayed(behave, *rows, **limits):
    """The result of a workload (input, output, arrival) on a server with that behaviour, and what it was sent."""
    with FakeServer(behave) as fake:
        return replay(connect("fake", fake.url, 5.0), workload(*(rows or [(4, 6, 0.0)])), **limits), fake.requests


def only_record(behave, **limits):
    (record,) = replayed(behave, **limits)[0].records
    return record


# -- servers that behave ----------------------------------------------------------------------------------------------


def test_a_normal_run():
    work = workload((4, 6, 0.0), (5, 1, 0.0), (3, 9, 0.0))
    with FakeServer() as fake:
        server = connect("fake", fake.url, 5.0)
        result = replay(server, work)
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


def test_tokens_of_one_chunk_share_its_time():
    def three_and_two(exchange, body, index):
        exchange.start()
        exchange.chunk("abc", None, 3)
        time.sleep(0.1)
        exchange.chunk("", None, 3)  # nothing new
        time.sleep(0.1)
        exchange.chunk("de", "length", 5)
        exchange.done(5)

    (record,) = replayed(three_and_two, (4, 5, 0.0))[0].records
    times = record.token_times_s
    assert record.completed and len(times) == 5
    assert times[0] == times[1] == times[2] and times[3] == times[4] and times[3] - times[0] >= 0.19


def test_a_server_that_counts_only_at_the_end():
    def two_chunks(exchange, body, index):
        exchange.start()
        exchange.chunk("abc")
        time.sleep(0.1)
        exchange.chunk("def")
        time.sleep(0.1)
        exchange.chunk("", "length")  # closes the stream, carries no token
        exchange.done(6)

    record = only_record(two_chunks)
    assert record.completed and record.output_len == 6
    assert record.token_times_s[0] == record.token_times_s[2] and record.token_times_s[3] == record.token_times_s[5]
    assert 0.09 <= record.token_times_s[-1] - record.token_times_s[0] < 0.19


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
    def slow(exchange, body, index):
        exchange.start()
        time.sleep(0.3)
        exchange.chunk("a", None, 1)
        exchange.chunk("b", "length", 2)
        exchange.done(2)

    result, _ = replayed(slow, (4, 2, 0.0))
    metrics = compute_metrics(result.records, result.wall_s)
    assert 0.3 <= metrics["ttft_s_mean"] < 0.6 and metrics["tpot_s_mean"] < 0.1
    assert metrics["lane_busy_fraction"] is None and metrics["cpu_busy_fraction"] is None


def test_open_loop_arrivals_wait_for_nobody():
    def slow(exchange, body, index):
        time.sleep(0.6)
        token_by_token(exchange, body, index)

    result, requests = replayed(slow, (4, 2, 0.5), (4, 2, 0.0), (4, 2, 0.25))
    begun = [moment for moment, _ in requests]
    assert begun[1] - begun[0] == pytest.approx(0.25, abs=0.1) and begun[2] - begun[0] == pytest.approx(0.5, abs=0.1)
    assert [record.arrival_s for record in result.records] == [0.5, 0.0, 0.25]
    assert all(record.completed and record.first_token_s >= record.arrival_s + 0.6 for record in result.records)


def test_many_at_once_are_all_under_way_together():
    together = threading.Barrier(100)

    def all_or_none(exchange, body, index):
        together.wait(10)
        token_by_token(exchange, body, index)

    result, _ = replayed(all_or_none, *[(4, 2, 0.0)] * 100)
    assert all(record.completed for record in result.records)


def test_a_line_separator_within_a_token_breaks_no_event():
    def separators(exchange, body, index):
        exchange.start()
        exchange.chunk("a\u2028b\u0085", "length", 1)
        exchange.done(1)

    assert replayed(separators, (4, 1, 0.0))[0].records[0].completed


# -- servers that do not ----------------------------------------------------------------------------------------------


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
        (429, {"error": {"message": "queue is full", "code": 429}}, "HTTP 429: queue is full"),
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
    assert result.records[1].failure.startswith(words) and len(requests) == 3  # a refusal is not tried again


def hangs_on_four(release, exchange, body, index):
    """Requests of four tokens get two and no more; those of five get none."""
    if body["max_tokens"] == 4:
        started(exchange)
    if body["max_tokens"] in (4, 5):
        release.wait(10)
        return exchange.disconnect()
    return token_by_token(exchange, body, index)


def test_a_stall_fails_the_rest_with_the_state():
    release = threading.Event()
    start = time.monotonic()
    rows = [(4, 2, 0.0), (4, 4, 0.0), (4, 5, 0.1), (4, 2, 60.0)]
    result, _ = replayed(functools.partial(hangs_on_four, release), *rows, stall_timeout_s=0.4)
    release.set()
    assert time.monotonic() - start < 5
    first, middle, waiting, unsent = result.records
    assert first.completed and middle.output_len == 2 and waiting.output_len == unsent.output_len == 0
    for record in (middle, waiting, unsent):
        assert record.failure == (
            "stalled: no token for 0.4 s; 1 requests finished, 1 in the middle of their answer, 1 without a first "
            "token, 1 not sent; GET /health answers 200"
        )


def test_waiting_for_arrivals_is_no_stall():
    def slow(exchange, body, index):
        time.sleep(0.25)
        token_by_token(exchange, body, index)

    result, _ = replayed(slow, (4, 2, 0.0), (4, 2, 1.0), stall_timeout_s=0.5)
    assert all(record.completed for record in result.records)


def test_slow_progress_is_no_stall():
    def a_token_now_and_then(exchange, body, index):
        exchange.start()
        for number in range(1, 7):
            time.sleep(0.15)
            exchange.chunk("a", "length" if number == 6 else None, number)
        exchange.done(6)

    assert only_record(a_token_now_and_then, stall_timeout_s=0.5).completed


def test_a_request_that_takes_too_long_fails_alone():
    release = threading.Event()
    rows = [(4, 4, 0.0), (4, 2, 0.5)]
    result, _ = replayed(functools.partial(hangs_on_four, release), *rows, request_timeout_s=0.3)
    release.set()
    late, good = result.records
    assert late.failure == "no end within 0.3 s, after 2 tokens" and late.output_len == 2 and good.completed


# -- readiness --------------------------------------------------------------------------------------------------------


def test_a_server_that_is_never_there():
    with FakeServer() as gone:
        url = gone.url
    with pytest.raises(
        ServerNotReady, match=r"vllm: no server ready at .* within 0.3 s .*`vllm serve MODEL --port \d+`"
    ):
        connect("vllm", url, 0.3)


def test_a_server_that_is_still_loading():
    with FakeServer() as fake:
        fake.pages["/health"] = (503, {"detail": "loading"})
        with pytest.raises(ServerNotReady, match=r"GET /health: HTTP 503"):
            connect("fake", fake.url, 0.3)
        threading.Timer(0.3, fake.pages.__setitem__, ("/health", (200, ""))).start()
        assert connect("fake", fake.url, 5.0).version == "9.9"


def test_a_server_without_health_and_version():
    with FakeServer() as fake:
        del fake.pages["/health"], fake.pages["/version"]
        fake.pages["/v1/models"] = (200, {"data": [{"id": "m"}]})
        server = connect("fake", fake.url, 1.0)
    assert (server.model, server.version, server.max_model_len) == ("m", None, None)


@pytest.mark.parametrize("page", [(200, "<html>"), (200, {"data": []}), (401, {"error": "key"}), (200, ["x"])])
def test_a_server_of_another_kind(page):
    with FakeServer() as fake:
        fake.pages["/v1/models"] = page
        with pytest.raises(ServerNotReady, match="no OpenAI-compatible server"):
            connect("fake", fake.url, 1.0)


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    yield folder
    load_prompt_tokens.cache_clear()


def options(model, tmp_path, **changes):
    base = {"model": model, "results_dir": tmp_path / "results", "num_requests": 3, "scale": 0.02, "backend": "http"}
    return FigureOptions(**{**base, "ready_timeout_s": 0.3, **changes})


def test_a_figure_from_its_command_to_its_files(model, tmp_path, capsys):
    def slower(exchange, body, index):
        time.sleep(0.05)
        token_by_token(exchange, body, index)

    with FakeServer() as apex, FakeServer(slower) as vllm:
        url = (f"vllm={vllm.url}/v1", f"apex={apex.url}/")
        chosen = options(model, tmp_path, url=url, workloads=("osc", "livebench"))
        assert reproduce_fig5.main(chosen) == 0
        sent = len(apex.requests)
        prompts = [tuple(body["prompt"]) for _, body in apex.requests]
        assert reproduce_fig5.main(chosen) == 0
        assert len(apex.requests) == sent  # finished points are not measured again
        apex.pages["/version"] = (200, {"version": "10.0"})
        assert reproduce_fig5.main(options(model, tmp_path, url=url, workloads=("livebench",))) == 0
        assert len(apex.requests) > sent  # another server
    folder = next((tmp_path / "results" / "fig5").glob("*/points/osc*.json")).parent.parent
    summary = json.loads((folder / "summary.json").read_text())
    assert [record["system"] for record in summary] == ["vllm", "apex"] * 4
    for record in summary:
        assert record["backend"] == "http" and record["baseline"] == "vllm" and record["model"] == "Tiny-Llama"
        assert record["completed"] == 3 and record["failed"] == 0 and record["gpu"] is None
        assert record["lane_busy_fraction"] is None and record["cpu_busy_fraction"] is None
    assert summary[0]["server"] == f"{vllm.url} (version 9.9)" and summary[0]["ttft_s_mean"] >= 0.05
    assert sent == 4 * (2 + 3) and len({prompt[:2] for prompt in prompts}) == sent  # no cached prefix, warm-up included
    records = read_records(records_file(folder, "osc-out48-apex"))
    assert [len(record["token_times_s"]) for record in records] == [record["wanted_output_len"] for record in records]
    assert (folder / "figure.png").stat().st_size > 20_000
    told = json.loads((folder / "provenance.json").read_text())["configuration"]["http"]
    assert told["points"][0]["server"]["version"] == "9.9" and "engine" not in told["points"][0]
    printed = capsys.readouterr().out
    assert "MEASURED over HTTP" in printed and "SIMULATED" not in printed


@pytest.mark.parametrize(("figure", "swept"), [(reproduce_fig6, "request_rate"), (reproduce_fig7, "output_len")])
def test_the_other_figures(model, tmp_path, figure, swept):
    with FakeServer() as fake:
        assert figure.main(options(model, tmp_path, url=(f"swiftllm={fake.url}",))) == 0
    latest = tmp_path / "results" / figure.FIGURE.name / "latest"
    summary = json.loads((latest / "summary.json").read_text())
    assert len({record[swept] for record in summary}) == 3 and {record["backend"] for record in summary} == {"http"}
    assert (latest / "figure.png").is_file()


def test_a_point_that_nothing_came_of_is_tried_again(model, tmp_path, capsys):
    with FakeServer(lambda exchange, *_: exchange.refuse(500, {"error": {"message": "no memory"}})) as fake:
        chosen = options(model, tmp_path, url=(f"apex={fake.url}",), workloads=("livebench",))
        assert reproduce_fig5.main(chosen) == 1
        assert "completed none of 2 requests; the first: HTTP 500: no memory" in capsys.readouterr().out
        fake.behave = token_by_token
        assert reproduce_fig5.main(chosen) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "--url NAME=http://127.0.0.1:8000"),
        ({"url": ("127.0.0.1:8000",)}, "write it as NAME=http://HOST:PORT"),
        ({"url": ("a=http://h:1", "a=http://h:2")}, "a name of its own"),
        ({"url": ("a=http://h:1",), "systems": ("b",)}, "--systems b"),
        ({"url": ("a=http://h:1",), "num_gpu_blocks": 5}, "--num-gpu-blocks"),
        ({"url": ("a=http://h:1",), "backend": "torch"}, "--backend http"),
        ({"url": ("a=http://h:1",), "sensitivity": "cpu_bandwidth=20..300"}, "--backend simulated"),
        ({"url": ("a=http://127.0.0.1:9",)}, "`vllm serve MODEL --port 9`"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(model, tmp_path, capsys, changes, words):
    assert reproduce_fig5.main(options(model, tmp_path, **changes)) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("error: ") and words in printed


def test_the_command_line_takes_several_servers():
    chosen = tyro.cli(
        reproduce_fig7.Options, args=["--backend", "http", "--url", "vllm=http://h:1", "--url", "apex=http://h:2"]
    )
    assert chosen.url == ("vllm=http://h:1", "apex=http://h:2")
