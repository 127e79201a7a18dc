"""Each end of the server dies, freezes or is not read from while streams run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from swiftllm.server.engine_process import EngineService, end_if_alone
from swiftllm.server.messages import ServiceLimits
from swiftllm.server.run import DrainingServer
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.server.http_server import TIMEOUT_S, running, server_process
from tests.swiftllm.server.serving import check_empty
from tests.swiftllm.server.stand_ins import EMPTY

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [7, 8, 9], "max_tokens": 200, "ignore_eos": True, "stream": True}


@contextmanager
def streaming(url: str, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream that has begun."""
    with httpx.stream("POST", url + COMPLETIONS, json={**LONG, **fields}, timeout=TIMEOUT_S, trust_env=False) as answer:
        events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {"))
        assert next(events)["choices"]
        yield events


def last_error(events: Iterator[dict[str, Any]]) -> dict[str, str]:
    *_, last = events
    return last["error"]


def engine_of(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def wait_until(is_so: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s


def test_a_frozen_engine_is_told_of_and_serves_again_and_a_killed_one_ends_the_server():
    with server_process() as (process, url), httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        pid = engine_of(process)
        with streaming(url) as patient, streaming(url, timeout=1.0) as hurried:
            os.kill(pid, signal.SIGSTOP)
            assert last_error(hurried)["code"] == "deadline"
            assert last_error(patient)["code"] == "stalled"
        health, refused = client.get("/health"), client.post(COMPLETIONS, json=LONG)
        assert (health.status_code, refused.status_code) == (503, 503)
        assert "has said nothing for" in health.text and "has said nothing for" in refused.text
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: client.get("/health").status_code == 200)
        with streaming(url) as events:
            os.kill(pid, signal.SIGKILL)
            error = last_error(events)
        assert error["code"] == "engine_error" and "ended by SIGKILL" in error["message"]
        assert process.wait(TIMEOUT_S) == 70


def test_an_engine_that_dies_or_fails_is_started_again_as_often_as_is_allowed():
    for name, fault in (("mortal_service", signal.SIGKILL), ("broken_once_service", None)):
        with server_process(name) as (process, url), httpx.Client(base_url=url, trust_env=False) as client:
            for may_live in (True, False):
                with streaming(url) as events:
                    pid = engine_of(process)
                    if fault is not None:
                        os.kill(pid, fault)
                    error = last_error(events)
                assert error["code"] == "engine_error"
                assert ("ended by SIGKILL" if fault else "a rank has died") in error["message"]
                if may_live:
                    health, refused = client.get("/health"), client.post(COMPLETIONS, json=LONG)
                    assert health.status_code == refused.status_code == 503 and "started again" in health.text
                    assert refused.json()["error"]["code"] == "not_serving"
                    wait_until(lambda: client.get("/health").status_code == 200)
                    assert engine_of(process) != pid
                    with streaming(url, max_tokens=4) as events:
                        *_, last = events
                    assert last["choices"][0]["finish_reason"] == "length"
            assert process.wait(TIMEOUT_S) == 70


def test_an_engine_outlives_no_front_end_and_frees_what_it_had():
    with server_process() as (process, url), streaming(url):
        process.kill()
        rest = process.stderr.read()  # ends when the engine's process has
    assert EMPTY in rest and "Traceback" not in rest


@pytest.mark.parametrize("is_built_meanwhile", [False, True])
def test_only_before_it_is_built_an_engine_ends_with_the_front_end_at_once(monkeypatch, is_built_meanwhile):
    is_built, exits = threading.Event(), []

    def has_hung_up(_: float) -> bool:
        if is_built_meanwhile or exits:
            is_built.set()
        return True

    monkeypatch.setattr(os, "_exit", exits.append)
    end_if_alone(SimpleNamespace(has_hung_up=has_hung_up), is_built)
    assert len(exits) == (0 if is_built_meanwhile else 1)


def test_a_full_disk_for_logs_changes_nothing():
    with open("/dev/full", "w") as full, server_process(stderr=full) as (process, url):
        with streaming(url, max_tokens=10) as events:
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_what_comes_after_the_engine_is_gone_is_told_why(monkeypatch):
    monkeypatch.setattr(DrainingServer, "start_draining", lambda self: None)  # it would end before it could be asked
    with running(EngineService(fake_engine("swiftllm", num_gpu_blocks=64, num_cpu_blocks=0))) as server:
        server.front.link.hang_up()
        wait_until(lambda: server.http.get("/health").status_code != 200)
        health, answer = server.http.get("/health"), server.post(COMPLETIONS, LONG)
        assert (health.status_code, answer.status_code) == (503, 503)
        assert "the engine's process is gone" in health.text and "the engine's process is gone" in answer.text
        assert server.http.get("/metrics").status_code == 200  # as last known


def test_a_client_that_never_reads_is_dropped(capsys):
    engine = fake_engine("apex", num_gpu_blocks=1000, num_cpu_blocks=1000)
    step = engine.step
    engine.step = lambda: (time.sleep(1e-3), step())[1]
    with running(EngineService(engine, ServiceLimits(request_timeout_s=0.2))) as server, socket.socket() as client:
        for sock, option in ((server.listener, socket.SO_SNDBUF), (client, socket.SO_RCVBUF)):
            sock.setsockopt(socket.SOL_SOCKET, option, 4096)
        client.connect(("127.0.0.1", server.port))
        body = {**LONG, "max_tokens": 3000, "logprobs": 20, "timeout": TIMEOUT_S}
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        client.sendall(f"{head}{len(json.dumps(body))}\r\n\r\n{json.dumps(body)}".encode())
        wait_until(lambda: server.service.snapshot().finished)
    assert server.service.snapshot().finished == {"abort": 1}
    assert re.search(r"is dropped: it has left \d+ bytes unread for 0.2 s", capsys.readouterr().err)
    check_empty(engine)
