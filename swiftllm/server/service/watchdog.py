"""Watches the engine's thread from another one, and fails requests when a step hangs.

A step that hangs in native code cannot be interrupted, but its clients get an error instead of waiting for ever.
"""

from __future__ import annotations

import logging
import threading

from swiftllm.server.service.engine_loop import PAST_DEADLINE, EngineLoop
from swiftllm.server.service.snapshot import Health
from swiftllm.server.service.state_dump import dump_state

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
PATIENCE = 2.0  # stall timeouts after which a hanging step fails requests without a deadline


class Watchdog:
    """Logs a step that exceeds the stall timeout, marks the service stalled, and fails requests in time."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._reported_s: float | None = None
        self._stop = threading.Event()

    def run(self) -> None:
        """Body of the watchdog's thread; returns after :meth:`stop`."""
        while not self._stop.wait(min(MAX_INTERVAL_S, self._loop.stall_timeout_s / 4)):
            self.check_engine()

    def stop(self) -> None:
        self._stop.set()

    def check_engine(self) -> None:
        """Act if the current pass of the engine's loop has taken ``stall_timeout_s`` or longer."""
        loop, open_requests = self._loop, self._loop.open_requests
        since_s, now_s = loop.busy_since_s, loop.clock()
        if since_s is None or now_s - since_s < loop.stall_timeout_s:
            return
        why = f"a step has not come back for {now_s - since_s:.0f} s"
        if since_s != self._reported_s:
            self._reported_s = since_s
            logger.critical("%s\n%s", why, dump_state(loop.engine))
        open_requests.set_health("ok", Health("stalled", why))
        with open_requests.lock:
            entries = list(open_requests.entries.values())
            loop.fail_requests([entry for entry in entries if entry.is_overdue(now_s)], *PAST_DEADLINE)
            if now_s >= since_s + PATIENCE * loop.stall_timeout_s:
                loop.fail_requests([entry for entry in entries if entry.deadline_s is None], "stalled", why)
