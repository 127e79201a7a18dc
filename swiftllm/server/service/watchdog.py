"""Watches the engine's thread from another one, and fails requests when a step hangs.

A step that hangs in native code cannot be interrupted, but its clients get an error instead of waiting for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from swiftllm.engine.engine import Engine
from swiftllm.server.service.engine_loop import PAST_DEADLINE, EngineLoop
from swiftllm.server.service.open_requests import OpenRequests
from swiftllm.server.service.snapshot import Health
from swiftllm.server.service.state_dump import dump_state

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
PATIENCE = 2.0  # stall timeouts after which a hanging step fails requests without a deadline


class Watchdog:
    """Logs a step that exceeds the stall timeout, marks the service stalled, and fails requests in time."""

    def __init__(
        self,
        engine: Engine,
        open_requests: OpenRequests,
        loop: EngineLoop,
        clock: Callable[[], float],
        stall_timeout_s: float,
    ) -> None:
        self._engine = engine
        self._open_requests = open_requests
        self._loop = loop
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._reported_s: float | None = None
        self._stop = threading.Event()

    def run(self) -> None:
        """Body of the watchdog's thread; returns after :meth:`stop`."""
        while not self._stop.wait(min(MAX_INTERVAL_S, self._stall_timeout_s / 4)):
            self.check_engine()

    def stop(self) -> None:
        self._stop.set()

    def check_engine(self) -> None:
        """Act if the current pass of the engine's loop has taken ``stall_timeout_s`` or longer."""
        since_s, now_s = self._loop.busy_since_s, self._clock()
        if since_s is None or now_s - since_s < self._stall_timeout_s:
            return
        why = f"a step has not come back for {now_s - since_s:.0f} s"
        if since_s != self._reported_s:
            self._reported_s = since_s
            logger.critical("%s\n%s", why, dump_state(self._engine))
        self._open_requests.set_health("ok", Health("stalled", why))
        patience_ends_s = since_s + PATIENCE * self._stall_timeout_s
        with self._open_requests.lock:
            entries = list(self._open_requests.entries.values())
            overdue = [entry for entry in entries if entry.deadline_s is not None and entry.deadline_s <= now_s]
            self._loop.fail_requests(overdue, *PAST_DEADLINE)
            if now_s >= patience_ends_s:
                self._loop.fail_requests([entry for entry in entries if entry.deadline_s is None], "stalled", why)
