"""The engine's end of the connection to its front end."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from swiftllm.server.service.messages import Ends, Message, Step, ToEngine, decode_to_engine, frame, receive

MAX_LAG_S = 0.05
SERVED = struct.Struct("<Qd")
"""Steps that the front end has served so far, and how long the last ones took it (s)."""
MAX_SERVED_BYTES = 256 * SERVED.size


class FrontEndLink:
    """Sends messages from any thread. If the front end has gone, they are dropped."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._lock = threading.Lock()
        self._num_posted = self._num_served = 0
        self._serving_s = 0.0
        self._post_s = self._go_on_s = 0.0
        self._news = select.poll()
        self._news.register(ends.served, select.POLLIN)
        self._hang_up = select.poll()
        self._hang_up.register(ends.messages, select.POLLHUP)

    def send(self, message: Message) -> None:
        """Waits only while the front end has a hundred kilobytes unread."""
        with self._lock:
            self._send(message)

    def post_step(self, step: Step) -> None:
        """Send new tokens."""
        with self._lock:
            self._num_posted += 1
            self._post_s = time.perf_counter()
            self._send(step)

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # who receives will see it
            self._ends.messages.sendall(frame(message))

    def apply_backpressure(self) -> None:
        """Wait for the front end if the engine is faster; the engine's thread calls this after each of its posts.

        The engine is faster if two posts are not served, or if its part of a step was shorter than serving one.
        Without the wait tokens would queue in the socket. The wait ends after ``MAX_LAG_S``.
        """
        self._note_served(0.0)
        is_faster = self._post_s - self._go_on_s < self._serving_s
        lag_end_s = time.perf_counter() + MAX_LAG_S
        if is_faster or self._num_posted - self._num_served > 1:
            while self._num_posted > self._num_served and (left_s := lag_end_s - time.perf_counter()) > 0:
                if not self._note_served(left_s):
                    break
        self._go_on_s = time.perf_counter()

    def _note_served(self, timeout_s: float) -> bool:
        """Read what the front end has served; False if nothing came within ``timeout_s``."""
        if not self._news.poll(1000 * timeout_s):
            return False
        said = self._ends.served.recv(MAX_SERVED_BYTES)
        if len(said) < SERVED.size:
            return False  # the front end has gone
        self._num_served, self._serving_s = SERVED.unpack_from(said, len(said) - SERVED.size)
        return True

    def messages(self) -> Iterator[ToEngine]:
        """The front end's messages, until it closes or has ended. One thread may receive them."""
        return map(decode_to_engine, receive(self._ends.messages))

    def has_hung_up(self, timeout_s: float) -> bool:
        """Whether the front end has gone, or goes within ``timeout_s``."""
        return bool(self._hang_up.poll(1000 * timeout_s))

    def hang_up(self) -> None:
        """End the connection: the front end sees that the engine is gone."""
        with suppress(OSError):
            self._ends.messages.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ends.close()
