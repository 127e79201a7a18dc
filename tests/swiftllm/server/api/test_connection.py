"""What a connection puts up with, how it ends with the server, and which websites' pages may use it."""

import contextlib
import logging
import socket

import pytest

from swiftllm.server import run
from swiftllm.server.engine_process import EngineService
from swiftllm.server.settings import ServerSettings
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.server.http_server import TIMEOUT_S, Gate, running

PAGE = {"Origin": "http://localhost:3000"}


def fake_service():
    return EngineService(fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=0))


def connected(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def read_all(client):
    """What comes until the server closes the connection, or throws it away with what it has not read."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(65536):
            received += part
    return received


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
ENDLESS = {
    "line": b"GET /" + b"y" * 2**21,
    "header": GET + b"X: " + b"y" * 2**21,
    "headers": GET + b"X: y\r\n" * 2**18,
    "trailers": POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 2**18,
}


@pytest.mark.parametrize("endless", ENDLESS.values(), ids=ENDLESS)
def test_headers_have_an_end(endless):
    with running(fake_service()) as server, connected(server) as client:
        with contextlib.suppress(ConnectionError):  # closed meanwhile
            client.sendall(endless)
        assert read_all(client).startswith(b"HTTP/1.1 431 ")
        assert server.http.get("/health", headers={"X": "y" * 30_000}).status_code == 200


@pytest.mark.parametrize("size", [60_000, 70_000, 200_000])
def test_headers_that_come_whole_have_an_end_too(size):
    """The documents' 64 KiB, also where one read brings request line, headers and body."""
    body = b'{"prompt": [5], "max_tokens": 1}'
    head = POST + b"Connection: close\r\nContent-Length: %d\r\nX: " % len(body)
    with running(fake_service()) as server, connected(server) as client:
        with contextlib.suppress(ConnectionError):  # closed meanwhile
            client.sendall(head + b"y" * size + b"\r\n\r\n" + body)
        assert read_all(client).startswith(b"HTTP/1.1 200 " if size < run.MAX_HEADER_BYTES else b"HTTP/1.1 431 ")


HALVES = {
    "nothing": (b"", b""),
    "line": (b"POST /v1/comp", b"HTTP/1.1 408 "),
    "headers": (POST, b"HTTP/1.1 408 "),
    "body": (POST + b"Content-Length: 50\r\n\r\n{", b"HTTP/1.1 408 "),
    "second request": (GET + b"\r\n" + POST, b"HTTP/1.1 200 "),
    "body of no path": (POST.replace(b"completions", b"nothing") + b"Content-Length: 50\r\n\r\n{", b"HTTP/1.1 404 "),
}


@pytest.mark.parametrize(("half", "answer"), HALVES.values(), ids=HALVES)
def test_half_a_request_is_not_waited_for_for_ever(half, answer, monkeypatch):
    """408 is what nginx and Node answer; a connection on which nothing came is closed without a word."""
    monkeypatch.setattr(run, "ARRIVAL_TIMEOUT_S", 0.05)
    with running(fake_service()) as server, connected(server) as client:
        client.sendall(half)
        received = read_all(client)
    assert received.startswith(answer) and (received == b"") == (half == b"")


def test_stray_bytes_end_no_answer(monkeypatch):
    monkeypatch.setattr(run, "ARRIVAL_TIMEOUT_S", 0.02)
    service = fake_service()
    gate = Gate(service.engine)
    body = b'{"prompt": [5], "max_tokens": 2}'
    with running(service) as server, connected(server) as client:
        client.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body + b"\r\n")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(TIMEOUT_S)
        gate.open()
        assert read_all(client).startswith(b"HTTP/1.1 200 ")


def test_a_body_in_small_pieces_is_no_header():
    chunks = [b'{"prompt": [5], "max_tokens": 1', *[b" "] * 16_000, b"}"]
    with running(fake_service()) as server:
        answer = server.http.post("/v1/completions", content=iter(chunks), headers={"Content-Type": "application/json"})
        assert answer.status_code == 200


def test_many_requests_on_a_connection_may_have_headers():
    with running(fake_service()) as server:
        for _ in range(4):
            assert server.http.get("/health", headers={"X": "y" * 30_000}).status_code == 200


def drain(server, caplog):
    """Take the server down, its log in ``caplog``."""
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)  # whose loggers do not propagate
    server.drain()
    server.thread.join(TIMEOUT_S)
    assert not server.thread.is_alive()


def test_a_body_that_never_ends_does_not_hold_up_the_end(caplog):
    with running(fake_service()) as server, connected(server) as client:
        client.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        assert server.http.get("/health").status_code == 200  # by now it has been read so far
        drain(server, caplog)
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"not_serving" in answer
    assert "Shutting down" in caplog.messages and all(r.levelno < logging.WARNING for r in caplog.records)


def test_an_answer_that_nobody_reads_does_not_hold_up_the_end(caplog, monkeypatch):
    monkeypatch.setattr(run, "LAST_BYTES_TIMEOUT_S", 0.0)
    with running(fake_service()) as server, socket.socket() as client:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # hands it on to its connections
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # 24 kB
        assert client.recv(1)
        drain(server, caplog)
    assert "Shutting down" in caplog.messages and all(r.levelno < logging.WARNING for r in caplog.records)


def test_pages_of_other_websites_may_not_use_the_server():
    with running(fake_service()) as server:
        answer = server.http.get("/v1/models", headers=PAGE)
        assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers
        assert server.http.options("/v1/completions", headers=PAGE).status_code == 405
        refused = server.post("/reset_prefix_cache", headers=PAGE)  # needs no preflight
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"


def test_pages_of_allowed_websites_may():
    settings = ServerSettings(allowed_origins=(PAGE["Origin"],), api_key="sesame")
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    key = {"Authorization": "Bearer sesame"}
    with running(fake_service(), settings) as server:
        answer = server.http.options("/v1/completions", headers={**PAGE, **asked})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert "authorization" in answer.headers["access-control-allow-headers"].lower()
        assert server.http.options("/v1/completions", headers={"Origin": "http://x", **asked}).status_code == 400
        assert server.post("/reset_prefix_cache", headers={**PAGE, **key}).status_code == 200
        for stream in (False, True):
            body = {"prompt": [5], "max_tokens": 2, "stream": stream}
            answer = server.post("/v1/completions", body, headers={**PAGE, **key})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE["Origin"]
            assert "access-control-allow-origin" not in server.post("/v1/completions", body, headers=key).headers
