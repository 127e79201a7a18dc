"""Clients that hang up, full queues, deadlines, and how a server ends."""

import json
import signal
import socket
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import ServiceLimits
from tests.reference.fake_backend import expected_output
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.server.http_server import TIMEOUT_S, Gate, running, server_process
from tests.swiftllm.server.serving import Clock, check_empty

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [7, 8, 9], "max_tokens": 60, "ignore_eos": True}


class Watched:
    """Tells a test when the service has been given a request, was told to abort one, and has ended one."""

    def __init__(self, service):
        self.submitted, self.aborted, self.ended = (threading.Semaphore(0) for _ in range(3))
        there = service._open_requests
        submit, abort = there.add, there.abort_requests

        def watched_submit(entries):
            is_accepted = submit(entries)
            self.submitted.release()
            return is_accepted

        def watched_abort(request_ids):
            abort(request_ids)
            self.aborted.release()

        there.add, there.abort_requests = watched_submit, watched_abort
        service.add_observer(self)

    def on_step(self, plan, result, outputs):
        pass

    def on_finish(self, request, reason):
        self.ended.release()


def wait_for(event):
    assert event.acquire(timeout=TIMEOUT_S)


@contextmanager
def gated(system="apex", *, num_gpu_blocks=16, num_cpu_blocks=64, clock=None, **limits):
    """A server whose engine steps when the test says so; in the end it must be empty and still serve."""
    engine = fake_engine(system, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks)
    gate = Gate(engine)
    service = EngineService(engine, ServiceLimits(**limits), **({"clock": clock} if clock else {}))
    watched = Watched(service)
    with running(service) as server:
        try:
            yield server, gate, watched
        finally:
            gate.open()
        if server.front.health.status == "ok":
            # By the time it has been served, nothing is under way for those that are gone.
            answer = server.post(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}).json()
            assert answer["usage"]["completion_tokens"] == 30
    check_empty(engine)


def request_bytes(body):
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(data) + data


# -- clients that hang up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["swiftllm", "apex", "fastdecode"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_hangs_up_in_a_stream_frees_its_blocks(system, n):
    with gated(system) as (server, gate, watched):
        gate.let(12)
        with server.http.stream("POST", COMPLETIONS, json={**LONG, "n": n, "stream": True}) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        wait_for(watched.aborted)
        gate.open()
        for _ in range(n):
            wait_for(watched.ended)
        assert dict(server.service.snapshot().finished) == {"abort": n}


def test_a_client_that_hangs_up_while_it_waits_frees_its_blocks():
    with gated() as (server, gate, watched):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(request_bytes(LONG))
            wait_for(watched.submitted)
        wait_for(watched.aborted)
        gate.open()
        wait_for(watched.ended)
        assert dict(server.service.snapshot().finished) == {"abort": 1}


def test_a_client_that_hangs_up_within_its_request_is_forgotten():
    with gated() as (server, _, _), socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(request_bytes(LONG)[:-20])


def test_the_openai_client_may_leave_a_stream(tmp_path):
    with gated() as (server, gate, watched):
        gate.let(5)
        stream = server.client().completions.create(
            model="model", prompt=[7, 8], max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        wait_for(watched.aborted)
        gate.open()
        wait_for(watched.ended)


# -- the queue and the clock ------------------------------------------------------------------------------------------


def test_a_full_queue_asks_to_come_back():
    with gated(max_queued_requests=1) as (server, gate, watched):
        first = threading.Thread(target=server.post, args=(COMPLETIONS, LONG))
        first.start()
        wait_for(watched.submitted)
        answer = server.post(COMPLETIONS, LONG)
        assert answer.status_code == 429 and int(answer.headers["Retry-After"]) >= 1
        error = answer.json()["error"]
        assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            server.client().completions.create(model="model", prompt=[5])
        gate.open()
        first.join()


def test_a_deadline_is_a_504():
    clock = Clock()
    with gated(clock=clock) as (server, gate, watched):
        answers = []
        body = {**LONG, "timeout": 5}
        client = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, body)))
        client.start()
        wait_for(watched.submitted)
        clock.now_s = 6.0
        gate.let(1)
        client.join()
        assert answers[0].status_code == 504 and answers[0].json()["error"]["code"] == "deadline"


def test_a_deadline_in_a_stream_is_its_last_event():
    clock = Clock()
    with gated(clock=clock) as (server, gate, _):
        gate.let(3)
        with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True, "timeout": 5}) as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines).removeprefix("data: "))["choices"]
            clock.now_s = 6.0
            gate.open()
            *_, last = [line for line in lines if line]
        assert answer.status_code == 200
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline"


# -- the end of a server ----------------------------------------------------------------------------------------------


def test_a_draining_server_ends_what_it_has_begun_and_takes_nothing_new():
    with gated() as (server, gate, _):
        gate.let(3)
        with server.http.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            chunks = [next(lines)]
            server.drain()
            refused = server.post(COMPLETIONS, LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_serving"
            health = server.http.get("/health")
            assert health.status_code == 503 and health.text.startswith("stopping")
            gate.open()
            chunks += [line for line in lines if line]
        assert chunks[-1] == "data: [DONE]"
        assert json.loads(chunks[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        server.thread.join(TIMEOUT_S)
        assert not server.thread.is_alive()
        with pytest.raises(httpx.ConnectError):
            server.http.get("/health")


def test_what_is_not_done_when_the_drain_is_over_is_told_so():
    with gated(drain_timeout_s=1e-3) as (server, gate, watched):
        answers = []
        client = threading.Thread(target=lambda: answers.append(server.post(COMPLETIONS, LONG)))
        client.start()
        wait_for(watched.submitted)
        server.drain()
        client.join()
        gate.open()
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutdown"


def test_sigterm_lets_streams_end_and_exits_with_0():
    with server_process() as (process, url), httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(TIMEOUT_S) == 0, process.stderr.read()


def test_an_engine_that_is_broken_for_good_ends_its_process_after_its_clients_were_told():
    with server_process("failing_service") as (process, url):
        with httpx.stream("POST", url + COMPLETIONS, json={**LONG, "stream": True}, trust_env=False) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert "cannot be replaced" in lines[-1] and "engine_error" in lines[-1]
        assert process.wait(TIMEOUT_S) == 70, process.stderr.read()


def test_a_second_sigint_quits_at_once():
    endless = {**LONG, "max_tokens": 200, "stream": True}
    with server_process() as (process, url), httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        with client.stream("POST", COMPLETIONS, json=endless) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            while client.get("/health").status_code == 200:
                pass
            process.send_signal(signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
        assert process.wait(TIMEOUT_S) == 130
        assert "Traceback" not in process.stderr.read()


# -- the tokens themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["swiftllm", "apex", "fastdecode"])
def test_tokens_of_either_tier_reach_the_client(system):
    body = {"prompt": [[7, 8, 9], [4] * 20], "max_tokens": 40, "n": 3, "logprobs": 0}
    with gated(system) as (server, gate, _):
        gate.open()
        choices = server.post(COMPLETIONS, body).json()["choices"]
    tokens = [[int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]] for choice in choices]
    assert tokens == [expected_output(prompt, 40) for prompt in body["prompt"] for _ in range(3)]
