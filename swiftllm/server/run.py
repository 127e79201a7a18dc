"""Runs the application under uvicorn until a signal, then drains it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
from types import FrameType

import uvicorn

from swiftllm.server.api.app import create_app
from swiftllm.server.api.connection import LAST_BYTES_TIMEOUT_S, ClientConnection
from swiftllm.server.garbage import without_full_collections
from swiftllm.server.observe.status import IterationRecorder
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

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
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


def make_server(
    service: EngineService, settings: ServerSettings, recorder: IterationRecorder | None = None
) -> DrainingServer:
    config = uvicorn.Config(
        create_app(service, settings, recorder),
        host=settings.host,
        port=settings.port,
        http=ClientConnection,
        ws="none",
        backlog=MAX_UNACCEPTED,
        access_log=False,
        timeout_graceful_shutdown=math.ceil(LAST_BYTES_TIMEOUT_S) + 1,  # connections close themselves earlier
    )
    return DrainingServer(config, service)


def run_server(service: EngineService, settings: ServerSettings, recorder: IterationRecorder | None = None) -> None:
    """Start the service, serve it until SIGTERM or SIGINT, drain it and close it.

    ``recorder`` gives the status page its timeline.

    Raises:
        SystemExit: the server could not be started (the reason is in uvicorn's log), or ends with ``EXIT_FAILED``
            because the engine has failed for good.
    """
    server = make_server(service, settings, recorder)
    raise_open_file_limit()
    with without_full_collections():
        service.start()
        try:
            server.run()
            has_failed = service.health.status == "failed"
        finally:
            service.close()
    if has_failed:
        raise SystemExit(EXIT_FAILED)


def raise_open_file_limit() -> None:
    """Raise the soft limit to the hard one: every client is an open file, and the usual soft limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
