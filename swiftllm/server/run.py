"""Runs the application under uvicorn until a signal, then drains it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from swiftllm.server.app import create_app
from swiftllm.server.client import EngineClient, EngineGone
from swiftllm.server.engine_process import END_GRACE_S, EngineProcess, EngineService, calm_garbage_collection
from swiftllm.server.parsing import ApiError
from swiftllm.server.settings import ServerSettings

# -- a client's connection ---------------------------------------------------------------------------------------------
# A client's connection: uvicorn's, with limits on header bytes and on unread answers, and a deadline at shutdown.

MAX_HEADER_BYTES = 64 * 1024  # browsers and proxies stay far below
LAST_BYTES_TIMEOUT_S = 5.0  # that clients get to read the last bytes after all requests have ended
ARRIVAL_TIMEOUT_S = 30.0  # that a client gets to send its headers, and each further part of a body
UNREAD_TIMEOUT_S = 60.0  # that a client may leave a full buffer unread, where requests have no timeout

logger = logging.getLogger("uvicorn.error")


class ClientConnection(HttpToolsProtocol):
    """Limits the bytes of request line and headers and the time that a request takes to arrive, and closes when the
    server shuts down.

    Without the limits uvicorn's parser keeps headers of any size in memory, takes quadratic time for a long one, and
    waits for the rest of a request for ever. A client that leaves its answer unread is dropped: a stream would keep its
    KV blocks until it ends.
    """

    def __init__(self, *arguments: Any, unread_timeout_s: float = UNREAD_TIMEOUT_S, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_bytes = 0  # read since the last byte of a body
        self._num_header_bytes = 0  # of the request line and the whole headers of this request
        self._is_refused = False
        self._unread_timeout_s = unread_timeout_s
        self._drop: asyncio.TimerHandle | None = None  # while the buffer is full
        self._arrival: asyncio.TimerHandle | None = None  # while a request is expected that has not come whole

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._drop is None:
            self._drop = asyncio.get_running_loop().call_later(self._unread_timeout_s, self._drop_client)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep_client()

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._await_arrival()

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep_client()
        self._has_arrived()
        super().connection_lost(exc)

    def _keep_client(self) -> None:
        if self._drop is not None:
            self._drop.cancel()
            self._drop = None

    def _drop_client(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        logger.warning(
            "%s is dropped: it has left %d bytes unread for %g s", self.client, waiting, self._unread_timeout_s
        )
        self.transport.abort()

    # -- what arrives -----------------------------------------------------------------------------------------------

    def _await_arrival(self) -> None:
        """Give the client time: for all headers together, and then for each part of a body."""
        self._has_arrived()
        self._arrival = asyncio.get_running_loop().call_later(ARRIVAL_TIMEOUT_S, self._give_up)

    def _has_arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _give_up(self) -> None:
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if self.pipeline or (is_open and not cycle.more_body):  # an answer is under way: look again after it
            self._await_arrival()
        elif self._num_bytes or is_open:
            message = f"the rest of the request has not come within {ARRIVAL_TIMEOUT_S:g} s"
            self._close_with(ApiError(408, message, code="request_timeout"))
        else:  # browsers open connections that they may need later
            self.transport.close()

    def on_message_begin(self) -> None:
        self._num_header_bytes = 0
        if self._arrival is None:
            self._await_arrival()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value) + len(b": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._num_header_bytes > MAX_HEADER_BYTES and not self._is_refused:
            self._refuse_headers()
        if not self._is_refused:
            self._await_arrival()
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        if not self._is_refused:
            self._await_arrival()
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        if not self._is_refused:
            self._has_arrived()
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._arrival is None:
            self._await_arrival()
        super().data_received(data)
        if self._num_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        self._is_refused = True
        message = f"request line and headers exceed the {MAX_HEADER_BYTES} bytes that this server reads"
        self._close_with(ApiError(431, message, code="headers_too_large"))

    def shutdown(self) -> None:
        """Close the connection: the server shuts down and all requests it has read have ended."""
        if (
            self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete
        ):  # the rest of the body may never come
            self._close_with(ApiError(503, "the server is shutting down", code="not_serving"))
        else:
            super().shutdown()
        asyncio.get_running_loop().call_later(LAST_BYTES_TIMEOUT_S, self.transport.abort)

    def _close_with(self, error: ApiError) -> None:
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering:
            body = error.response().body
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


# -- running the server ------------------------------------------------------------------------------------------------

# Connections that wait to be accepted. Linux bounds it by net.core.somaxconn, and drops what comes beyond. The client
# then tries again after a second.
MAX_UNACCEPTED = 65_535
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_FAILED = 70  # an internal error, as in sysexits.h


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT answers new requests with 503 until the service is drained, then exits.

    A second SIGINT exits immediately. If the engine has failed for good, the server exits too, once the clients have
    been told: whoever watches it can start it again.
    """

    def __init__(self, config: uvicorn.Config, service: EngineClient) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler. The base class would stop listening, and raise the signal again after shutdown."""
        if self._draining is not None and sig == signal.SIGINT:
            logging.getLogger("uvicorn.error").warning("Interrupted again: exiting immediately")
            os._exit(EXIT_INTERRUPTED)  # even if a thread hangs, and without a traceback for every open connection
        asyncio.get_running_loop().call_soon_threadsafe(self.start_draining)

    async def on_tick(self, counter: int) -> bool:
        if self._service.health.status == "failed":
            self.start_draining()
        return await super().on_tick(counter)

    def start_draining(self) -> None:
        """Must be called on the server's event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._service.drain()
        finally:
            self.should_exit = True


def make_server(service: EngineClient, settings: ServerSettings) -> DrainingServer:
    config = uvicorn.Config(
        create_app(service, settings),
        host=settings.host,
        port=settings.port,
        http=partial(ClientConnection, unread_timeout_s=service.limits.request_timeout_s or UNREAD_TIMEOUT_S),
        ws="none",
        backlog=MAX_UNACCEPTED,
        access_log=False,
        timeout_graceful_shutdown=math.ceil(LAST_BYTES_TIMEOUT_S) + 1,  # connections close themselves earlier
    )
    return DrainingServer(config, service)


def run_server(
    build: Callable[[], EngineService],
    settings: ServerSettings,
    when_ready: Callable[[EngineClient], None] = lambda client: None,
) -> None:
    """Run ``build`` in a process of its own, and serve what it makes until SIGTERM or SIGINT.

    ``when_ready`` is called before the first request is taken.

    Raises:
        EngineNotBuilt: ``build`` has raised ValueError or OSError; this one has its message.
        SystemExit: the server could not be started (the reason is in uvicorn's log, or in the standard error of the
            engine's process), or ends with ``EXIT_FAILED`` because the engine has failed for good.
    """
    engine = EngineProcess(build)
    patience_s = 0.0
    try:
        leave_out_torch()
        client = engine.connect()
        when_ready(client)
        raise_open_file_limit()
        server = make_server(client, settings)
        calm_garbage_collection()
        patience_s = client.limits.drain_timeout_s + 2 * END_GRACE_S
        server.run()
        if client.health.status in ("stalled", "failed"):
            patience_s = END_GRACE_S
        has_failed = client.health.status == "failed"
    except EngineGone:
        raise SystemExit(1) from None
    finally:
        engine.close(patience_s)
    if has_failed:
        raise SystemExit(EXIT_FAILED)


def leave_out_torch() -> None:
    """Keep torch out of this process: the library that reads tokenizers loads it where it can, which takes 300 MB."""
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        sys.modules["torch"] = None


def raise_open_file_limit() -> None:
    """Raise the soft limit to the hard one: every client is an open file, and the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
