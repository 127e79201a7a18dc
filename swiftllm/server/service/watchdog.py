"""Looks after the engine's thread from outside: a step that hangs in native code can be neither interrupted nor mended,
but nobody has to wait for it for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from swiftllm.engine.engine import Engine
from swiftllm.server.service.engine_loop import PAST_DEADLINE, EngineLoop
from swiftllm.server.service.open_requests import Ledger
from swiftllm.server.service.snapshot import Health
from swiftllm.server.service.state_dump import report

logger = logging.getLogger(__name__)

MAX_INTERVAL_S = 1.0
PATIENCE = 2.0  # stall timeouts that a request without a deadline waits for a step that hangs


class Watchdog:
    def __init__(
        self, engine: Engine, ledger: Ledger, loop: EngineLoop, clock: Callable[[], float], stall_timeout_s: float
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._loop = loop
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._reported_s: float | None = None
        self._stop = threading.Event()

    def run(self) -> None:
        """The watchdog's thread."""
        while not self._stop.wait(min(MAX_INTERVAL_S, self._stall_timeout_s / 4)):
            self.check()

    def stop(self) -> None:
        self._stop.set()

    def check(self) -> None:
        since_s, now_s = self._loop.busy_since_s, self._clock()
        if since_s is None or now_s - since_s < self._stall_timeout_s:
            return
        why = f"a step has not come back for {now_s - since_s:.0f} s"
        if since_s != self._reported_s:
            self._reported_s = since_s
            logger.critical("%s\n%s", why, report(self._engine))
        self._ledger.set_health("ok", Health("stalled", why))
        patience_ends_s = since_s + PATIENCE * self._stall_timeout_s
        with self._ledger.lock:
            entries = list(self._ledger.entries.values())
            overdue = [entry for entry in entries if entry.deadline_s is not None and entry.deadline_s <= now_s]
            self._loop.fail(overdue, *PAST_DEADLINE)
            if now_s >= patience_ends_s:
                self._loop.fail([entry for entry in entries if entry.deadline_s is None], "stalled", why)
