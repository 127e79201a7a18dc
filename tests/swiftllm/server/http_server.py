"""A real server on a loopback port, in a thread, for tests; and an engine that steps when it is told to."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import httpx
import openai

from swiftllm.engine.engine import Engine
from swiftllm.processes import reserved_port
from swiftllm.server.engine_process import EngineService
from swiftllm.server.run import make_server
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.serving import LocalClient

TIMEOUT_S = 30.0  # of tests that would hang
STARTED_S = 120.0  # a process loads its packages first
DEFAULT_SETTINGS = ServerSettings()


class RunningServer:
    """``thread`` runs until the server ends. ``front`` is the front end's view of ``service``."""

    def __init__(self, service: EngineService, settings: ServerSettings) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))  # clients may connect before the server has come up
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.service = service
        self.front = LocalClient(service)
        self.server = make_server(self.front, settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def client(self, **options: Any) -> openai.OpenAI:
        transport = openai.DefaultHttpxClient(trust_env=False)
        options = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S, "http_client": transport, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def async_client(self) -> openai.AsyncOpenAI:
        transport = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S, http_client=transport
        )

    def drain(self) -> None:
        """What a signal does, on a server that has come up."""
        loop = self.server.servers[0].get_loop()
        loop.call_soon_threadsafe(self.server.start_draining)


@contextmanager
def running(service: EngineService, settings: ServerSettings = DEFAULT_SETTINGS) -> Iterator[RunningServer]:
    """Serve until the end of the block, then close everything."""
    running_server = RunningServer(service, settings)
    running_server.thread.start()
    try:
        yield running_server
    finally:
        running_server.http.close()
        running_server.server.should_exit = True
        running_server.thread.join(TIMEOUT_S)
        running_server.front.close()
        service.wait_until_left()
        service.close()
        assert not running_server.thread.is_alive()


@contextmanager
def server_process(
    service: str = "slow_service", stderr: IO[str] | int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server of ``stand_ins.py`` in a process, with its URL."""
    with reserved_port() as port:
        command = [sys.executable, "-m", "tests.swiftllm.server.stand_ins", service, str(port)]
        process = subprocess.Popen(command, stdout=stderr, stderr=stderr, text=True)
        try:
            deadline_s = time.monotonic() + STARTED_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.communicate()


class Gate:
    """Lets an engine's steps through as a test wants it."""

    def __init__(self, engine: Engine) -> None:
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()
        self._step = engine.step
        engine.step = self._gated

    def _gated(self) -> Any:
        if not self._open.is_set():
            assert self._permits.acquire(timeout=TIMEOUT_S)
        return self._step()

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def open(self) -> None:
        self._open.set()
        self._permits.release()
