"""Threads of a process whose GPU may be another than the first."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any


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
            sys.modules["torch"].cuda.set_device(self._card)
        super().run()
