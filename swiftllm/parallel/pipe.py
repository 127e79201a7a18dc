"""Messages between the driver and a rank, over a socket within the machine.

A message is a tuple of plain values: numbers, texts, bytes, and tuples and lists of these. Its first value is its name.
"""

from __future__ import annotations

import marshal
import os
import select
import socket
import struct
import threading
from collections import deque
from typing import Any

from swiftllm.threads import DeviceThread

LENGTH = struct.Struct("<I")
READ_BYTES = 1 << 16

Message = tuple[Any, ...]


class PipeClosed(ConnectionError):
    """The other end has closed, or its process has ended."""


class Pipe:
    """One end. Messages may be sent from any thread, and received by one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._unread = bytearray()
        self._received: deque[Message] = deque()
        self._sending = threading.Lock()

    def send(self, *message: Any) -> None:
        """Waits only while the other end has a hundred kilobytes unread.

        Raises:
            PipeClosed: the other end has closed.
        """
        body = marshal.dumps(message)
        try:
            with self._sending:
                self._end.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PipeClosed(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message. None: none came within ``timeout_s``; 0 does not wait, None waits for ever.

        Raises:
            PipeClosed: the other end has closed, and all of its messages have been received.
        """
        while not self._received:
            if timeout_s and not self._is_readable(timeout_s):
                return None
            try:
                data = self._end.recv(READ_BYTES, 0 if timeout_s is None else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError as error:
                raise PipeClosed(str(error)) from None
            if not data:
                raise PipeClosed("the other end has closed")
            self._unread += data
            self._split()
        return self._received.popleft()

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))

    def _split(self) -> None:
        start = 0
        while len(self._unread) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread, start)
            end = start + LENGTH.size + length
            if end > len(self._unread):
                break
            self._received.append(marshal.loads(memoryview(self._unread)[start + LENGTH.size : end]))
            start = end
        del self._unread[:start]

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
