"""Runs the application under uvicorn until a signal, and lets what is under way end first."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import resource
import signal
import sys
from types import FrameType

import uvicorn

from swiftllm.server.api.app import create_app
from swiftllm.server.api.header_limits import LAST_BYTES_TIMEOUT_S, Connection
from swiftllm.server.observe.status import IterationRecorder
from swiftllm.server.service.service import EngineService
from swiftllm.server.settings import ServerSettings

# The engine's thread launches a layer's work and sleeps, over and over. By default it would wait up to 5 ms for the
# interpreter's lock when it wakes up while the event loop serves a step's tokens, and the device with it.
SWITCH_INTERVAL_S = 0.001
EXIT_INTERRUPTED = 130  # as shells have it


class DrainingServer(uvicorn.Server):
    """On SIGTERM or SIGINT goes on answering, with 503 to what is new, until the service is drained; then exits.

    A second SIGINT quits at once.
    """

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config)
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler; the base class would stop listening, and die of the same signal in the end."""
        if self._draining is not None and sig == signal.SIGINT:
            logging.getLogger("uvicorn.error").warning("Interrupted again: quitting at once")
            os._exit(EXIT_INTERRUPTED)  # whatever hangs, and without the errors of all that is cut off
        asyncio.get_running_loop().call_soon_threadsafe(self.begin_to_drain)

    def begin_to_drain(self) -> None:
        """On the server's event loop."""
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
        http=Connection,
        ws="none",
        access_log=False,
        timeout_graceful_shutdown=math.ceil(LAST_BYTES_TIMEOUT_S) + 1,  # connections close themselves before
    )
    return DrainingServer(config, service)


def run_server(service: EngineService, settings: ServerSettings, recorder: IterationRecorder | None = None) -> None:
    """Start the service, serve it until SIGTERM or SIGINT, drain it and close it. ``recorder``: see the status page.

    Raises:
        SystemExit: the server could not be started (uvicorn's log says why).
    """
    server = make_server(service, settings, recorder)
    allow_open_files()
    # What importing and loading has made stays: a full collection would look through it for a tenth of a second.
    gc.collect()
    gc.freeze()
    switch_interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    service.start()
    try:
        server.run()
    finally:
        service.close()
        sys.setswitchinterval(switch_interval_s)
        gc.unfreeze()


def allow_open_files() -> None:
    """Every client is an open file, and many systems allow 1,024 unless asked for more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
