"""The engine's end of a connection to an attention host: a thread that sends frames and one that receives answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import HostDied, TicketTimes
from swiftllm.remote.frames import (
    HEADER,
    SILENCE_S,
    Buffer,
    Header,
    Kind,
    ProtocolError,
    receive_bytes,
    receive_header,
    receive_into,
    send_frame,
    set_silence_limit,
)
from swiftllm.threads import DeviceThread

MAX_QUEUED_BYTES = 256 << 20  # of frames that are not sent yet


class RemoteTicket:
    """An answer under way; see :class:`swiftllm.engine.backend.Ticket`.

    ``target`` takes the answer's bytes. ``send_back`` is called on the receiving thread once they are there.
    """

    def __init__(self, target: memoryview, send_back: Callable[[], None] | None = None) -> None:
        self.target = target
        self._send_back = send_back
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._submitted_s = self._done_s = time.perf_counter()
        self._seconds = 0.0

    def ready(self) -> bool:
        return self._is_over.is_set()

    def wait(self) -> float:
        self._is_over.wait()
        if self._error is not None:
            raise self._error
        return self._seconds

    def times(self) -> TicketTimes:
        # The host computes just before it answers; the way back is short beside the way there.
        start_s = max(self._submitted_s, self._done_s - self._seconds)
        return TicketTimes(start_s, self._done_s, self._done_s, to_host=(self._submitted_s, start_s))

    # Inference mode belongs to a thread, and tensors made in it are not written outside it.
    @torch.inference_mode()
    def finish(self, seconds: float) -> None:
        """The answer is in ``target``; the host computed so many seconds."""
        self._seconds, self._done_s = seconds, time.perf_counter()
        try:
            if self._send_back is not None:
                self._send_back()
        except Exception as error:
            self._error = error
        self._release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._release()

    def _release(self) -> None:
        self.target, self._send_back = memoryview(b""), None  # they hold tensors, and the ticket may outlive them
        self._is_over.set()


@dataclass(frozen=True)
class _Frame:
    header: Header
    buffers: Callable[[], Sequence[Buffer]]
    arrived: Event | None
    num_bytes: int


class Channel:
    """Frames to one host, sent in the order of the calls.

    The end of the connection, or ``SILENCE_S`` without a byte, ends the channel: every ticket under way and every later
    call fails with :class:`HostDied`.

    Attributes:
        bytes_sent: with headers.
        bytes_received: with headers, without heartbeats.
        error: why the channel has ended; None while it has not.
    """

    def __init__(self, connection: socket.socket, name: str, home: int) -> None:
        """``home`` is the number of the host's blocks among the CPU tier's, for error messages and errors."""
        self.bytes_sent = self.bytes_received = 0
        self.name = name
        self._home = home
        self._connection = connection
        self._sequences = itertools.count(1)
        self._queue: SimpleQueue[_Frame | None] = SimpleQueue()
        self._state = threading.Condition()
        self._pending: dict[int, RemoteTicket] = {}
        self._queued_bytes = 0
        self.error: str | None = None
        set_silence_limit(connection, SILENCE_S)
        self._threads = [
            DeviceThread(work, name=f"{what}-{name}")
            for what, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    def wait_dead(self, timeout_s: float | None = None) -> bool:
        """Block until the channel has ended."""
        with self._state:
            return self._state.wait_for(lambda: self.is_dead, timeout_s)

    def post(
        self, header: Header, buffers: Callable[[], Sequence[Buffer]], num_bytes: int, arrived: Event | None = None
    ) -> None:
        """Send a frame that needs no answer. ``buffers`` is called once ``arrived`` has passed, on another thread, and
        gives ``num_bytes`` bytes. Blocks while too many bytes wait to be sent.

        Raises:
            HostDied: the channel has ended.
        """
        with self._state:
            self._state.wait_for(lambda: self.is_dead or self._queued_bytes <= MAX_QUEUED_BYTES)
            self._check()
            self._queued_bytes += num_bytes
            self._queue.put(_Frame(header, buffers, arrived, num_bytes))

    def ask(
        self,
        header: Header,
        buffers: Callable[[], Sequence[Buffer]],
        num_bytes: int,
        target: memoryview,
        arrived: Event | None = None,
        send_back: Callable[[], None] | None = None,
    ) -> RemoteTicket:
        """As :meth:`post`, with an answer, which must fill ``target``."""
        ticket = RemoteTicket(target, send_back)
        sequence = next(self._sequences)
        with self._state:
            self._check()
            self._pending[sequence] = ticket
        self.post(header._replace(sequence=sequence), buffers, num_bytes, arrived)
        return ticket

    def _check(self) -> None:
        if self.is_dead:
            raise HostDied(self._home, f"attention host {self.name} is gone: {self.error}")

    def _send_all(self) -> None:
        try:
            while (frame := self._queue.get()) is not None:
                if frame.arrived is not None:
                    frame.arrived.synchronize()
                self.bytes_sent += send_frame(self._connection, frame.header, frame.buffers())
                with self._state:
                    self._queued_bytes -= frame.num_bytes
                    self._state.notify_all()
        except Exception as error:
            self._end(error)

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive_one()
        except Exception as error:
            self._end(error)

    def _receive_one(self) -> None:
        header = receive_header(self._connection)
        if header.kind == Kind.BEAT:
            return
        self.bytes_received += HEADER.size + header.num_bytes
        if header.sequence == 0:
            text = receive_bytes(self._connection, header.num_bytes).decode(errors="replace")
            raise ProtocolError(f"it ended the connection: {text}")
        with self._state:
            ticket = self._pending.pop(header.sequence)
        try:
            if header.kind == Kind.FAILED:
                text = receive_bytes(self._connection, header.num_bytes).decode(errors="replace")
                ticket.fail(RuntimeError(f"attention host {self.name}: {text}"))
                return
            if header.num_bytes != len(ticket.target):
                raise ProtocolError(f"an answer of {header.num_bytes} bytes came for one of {len(ticket.target)}")
            receive_into(self._connection, ticket.target)
        except BaseException as error:
            ticket.fail(HostDied(self._home, f"attention host {self.name} is gone: {error}"))
            raise
        ticket.finish(header.seconds)

    def _end(self, error: BaseException) -> None:
        with self._state:
            if self.error is not None:
                return
            self.error = str(error) or type(error).__name__
            pending, self._pending = self._pending, {}
            self._state.notify_all()
        self._shut_down()
        for ticket in pending.values():
            ticket.fail(HostDied(self._home, f"attention host {self.name} is gone: {self.error}"))

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # it is already
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and its threads. Nothing may be under way."""
        self._end(ConnectionAbortedError("it was closed here"))
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()
