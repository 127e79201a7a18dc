"""Watches the engine's thread from another one, and fails requests when a step hangs or requests do not reach it.

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


def watch_engine(loop: EngineLoop, stop: threading.Event) -> None:
    """Body of the watchdog's thread, until ``stop`` is set.

    Tell the front end regularly that the process runs. When a pass of the engine's loop has taken its stall timeout, or
    has not begun for as long although there are orders, log the engine's state, mark the service stalled, and fail
    requests in time.
    """
    open_requests, timeout_s = loop.open_requests, loop.stall_timeout_s
    reported_s: float | None = None
    while not stop.wait(min(MAX_INTERVAL_S, timeout_s / 4)):
        loop.tell_health(open_requests.health)
        busy_s, now_s = loop.busy_since_s, loop.clock()
        since_s = open_requests.ordered_s if busy_s is None else busy_s
        if since_s is None or now_s - since_s < timeout_s:
            continue
        what = "requests do not reach the engine's thread" if busy_s is None else "a step has not come back"
        why = f"{what} for {now_s - since_s:.0f} s"
        if since_s != reported_s:
            reported_s = since_s
            logger.critical("%s\n%s", why, dump_state(loop.engine))
        open_requests.set_health("ok", Health("stalled", why))
        with open_requests.lock:
            entries = list(open_requests.entries.values())
            loop.fail_requests([entry for entry in entries if entry.is_overdue(now_s)], *PAST_DEADLINE)
            if now_s >= since_s + PATIENCE * timeout_s:
                loop.fail_requests([entry for entry in entries if entry.deadline_s is None], "stalled", why)
