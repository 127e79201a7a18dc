"""Messages between the driver and a rank, over a socket within the machine.

A message is a tuple of plain values: numbers, texts, bytes, and tuples and lists of these. Its first value is its name.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any, overload

from swiftllm.threads import DeviceThread

Message = tuple[Any, ...]


class PipeClosed(ConnectionError):
    """The other end has closed, or its process has ended."""


class Pipe:
    """One end. Messages may be sent from any thread, and received by one."""

    def __init__(self, end: socket.socket) -> None:
        """Takes ``end`` over."""
        self._end = Connection(end.detach())
        self._sending = threading.Lock()
        self._arrivals = select.poll()
        self._arrivals.register(self._end, select.POLLIN)

    def send(self, *message: Any) -> None:
        """Waits only while the other end has a hundred kilobytes unread.

        Raises:
            PipeClosed: the other end has closed.
        """
        try:
            with self._sending:
                self._end.send_bytes(marshal.dumps(message))
        except OSError as error:
            raise PipeClosed(str(error)) from None

    @overload
    def receive(self, timeout_s: None = None) -> Message: ...

    @overload
    def receive(self, timeout_s: float | None) -> Message | None: ...

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message. None: none came within ``timeout_s``; 0 does not wait, None waits for ever.

        Raises:
            PipeClosed: the other end has closed, and all of its messages have been received.
        """
        try:
            if timeout_s is not None and not self._arrivals.poll(1000 * timeout_s):
                return None
            return marshal.loads(self._end.recv_bytes())
        except (EOFError, OSError) as error:
            raise PipeClosed(str(error) or "the other end has closed") from None

    def wait_until_closed(self) -> None:
        """Sleep until the other end has closed, whatever it sent before. From any thread."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        poll.poll()

    def exit_when_closed(self) -> None:
        """From now on this process exits as soon as the other end closes, whatever it is doing."""

        def watch() -> None:
            self.wait_until_closed()
            os._exit(0)

        DeviceThread(watch, name="exit-when-closed").start()

    def close(self) -> None:
        self._end.close()
