"""Threads and ports of the processes that make up a server."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# -- threads -----------------------------------------------------------------------------------------------------------
# Threads of a process whose GPU may be another than the first.

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


# -- ports -------------------------------------------------------------------------------------------------------------
# Ports for servers that are started later, and perhaps by others.


@contextmanager
def reserved_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The port, or a free one for 0. While it is reserved, the system gives it to nobody who asks for any free port.

    A server that is told the number may listen there, as servers allow an address to be used again.

    Raises:
        socket.gaierror: there is no such host.
        OSError: another program listens there, or this machine has no such address.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as holder:  # which never listens: clients are refused until the server does
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        yield holder.getsockname()[1]
