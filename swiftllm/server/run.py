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

import uvicorn

from swiftllm.server.api.app import create_app
from swiftllm.server.api.connection import LAST_BYTES_TIMEOUT_S, UNREAD_TIMEOUT_S, ClientConnection
from swiftllm.server.service.client import EngineClient, EngineGone
from swiftllm.server.service.engine_process import END_GRACE_S, EngineProcess, calm_garbage_collection
from swiftllm.server.service.service import EngineService
from swiftllm.server.settings import ServerSettings

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
