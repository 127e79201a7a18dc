"""Threads of a process whose GPU may be another than the first."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Any

SET_TIMER_SLACK = 29  # of Linux's prctl
SLACK_NS = 1000


def wake_on_time() -> None:
    """Sleeps of this thread, and of those that it starts, end within 1 us of their time. Linux adds 50 us by default,
    more than the sleeps between two looks at a GPU's event take."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)


class DeviceThread(threading.Thread):
    """A daemon thread that works on the GPU of the thread that makes it.

    CUDA gives each new thread GPU 0. A thread that only waits for an event would open a context there, which takes some
    hundred MiB. So every thread of an engine is one of these.
    """

    def __init__(self, target: Callable[..., Any], *arguments: Any, name: str) -> None:
        super().__init__(target=target, args=arguments, name=name, daemon=True)
        torch = sys.modules.get("torch")  # a command that computes nothing does not load it
        self._card = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

    def run(self) -> None:
        if self._card is not None:
            wake_on_time()
            # On a GPU that has failed every call raises. What runs here must see that by itself: some threads are there
            # to end the process.
            with contextlib.suppress(RuntimeError):
                sys.modules["torch"].cuda.set_device(self._card)
        super().run()
