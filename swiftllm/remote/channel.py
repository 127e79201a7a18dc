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
from swiftllm.engine.backend import HostDied
from swiftllm.remote.frames import (
    HEADER,
    SILENCE_S,
    FrameKind,
    Header,
    ProtocolError,
    as_bytes,
    receive_header,
    receive_into,
    receive_text,
    send_frame,
    set_silence_limit,
)
from swiftllm.runtime.workers import WorkFuture
from swiftllm.threads import DeviceThread

MAX_QUEUED_BYTES = 256 << 20  # of frames that are not sent yet


class RemoteFuture(WorkFuture):
    """An answer under way, whose bytes go to ``target``."""

    def __init__(self, target: memoryview, send_back: Callable[[], None] | None = None) -> None:
        super().__init__(send_back)
        self.target = target

    def answer(self, seconds: float) -> None:
        """The answer is in ``target``; the host computed so many seconds."""
        self.done_s = time.perf_counter()
        # It computes just before it answers; the way back is short beside the way there.
        self.start_s = max(self.submitted_s, self.done_s - seconds)
        self.finish()

    def _end(self) -> None:
        self.target = memoryview(b"")  # it holds a tensor, and the attention task may outlive it
        super()._end()


@dataclass(frozen=True)
class _Outgoing:
    header: Header
    tensors: Sequence[torch.Tensor]
    arrived: Event | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Channel:
    """Frames to one host, sent in the order of the calls.

    The end of the connection, or ``SILENCE_S`` without a byte, ends the channel: every attention task under way and
    every later call fails with :class:`HostDied`.

    Attributes:
        bytes_sent: with headers.
        bytes_received: with headers, without heartbeats.
        error: why the channel has ended; None while it has not.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        """``name`` of the host, for messages."""
        self.bytes_sent = self.bytes_received = 0
        self.name = name
        self._connection = connection
        self._sequences = itertools.count(1)
        self._queue: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._state = threading.Condition()
        self._pending: dict[int, RemoteFuture] = {}
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

    def post(self, header: Header, *tensors: torch.Tensor, arrived: Event | None = None) -> None:
        """Send a frame that needs no answer, with contiguous tensors that may be read once ``arrived`` has passed.
        Blocks while too many bytes wait to be sent.

        Raises:
            HostDied: the channel has ended.
        """
        frame = _Outgoing(header, tensors, arrived)
        with self._state:
            self._state.wait_for(lambda: self.is_dead or self._queued_bytes <= MAX_QUEUED_BYTES)
            self._check()
            self._queued_bytes += frame.num_bytes
            self._queue.put(frame)

    def ask(
        self,
        header: Header,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        arrived: Event | None = None,
        send_back: Callable[[], None] | None = None,
    ) -> RemoteFuture:
        """As :meth:`post`, with an answer, which must fill ``out``."""
        future = RemoteFuture(as_bytes(out), send_back)
        sequence = next(self._sequences)
        with self._state:
            self._check()
            self._pending[sequence] = future
        self.post(header._replace(sequence=sequence), *tensors, arrived=arrived)
        return future

    def _check(self) -> None:
        if self.is_dead:
            raise self._death(self.error)

    def _death(self, why: object) -> HostDied:
        return HostDied(f"attention host {self.name} is gone: {why}")

    def _send_all(self) -> None:
        try:
            while (frame := self._queue.get()) is not None:
                self._send_one(frame)
        except Exception as error:
            self._end(error)

    def _send_one(self, frame: _Outgoing) -> None:
        if frame.arrived is not None:
            frame.arrived.synchronize()
        self.bytes_sent += send_frame(self._connection, frame.header, [as_bytes(tensor) for tensor in frame.tensors])
        with self._state:
            self._queued_bytes -= frame.num_bytes
            self._state.notify_all()

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive_one()
        except Exception as error:
            self._end(error)

    def _receive_one(self) -> None:
        header = receive_header(self._connection)
        if header.kind == FrameKind.BEAT:
            return
        self.bytes_received += HEADER.size + header.num_bytes
        if header.sequence == 0:
            raise ProtocolError(f"it ended the connection: {receive_text(self._connection, header.num_bytes)}")
        with self._state:
            future = self._pending.pop(header.sequence)
        try:
            if header.kind == FrameKind.FAILED:
                text = receive_text(self._connection, header.num_bytes)
                future.fail(RuntimeError(f"attention host {self.name}: {text}"))
                return
            if header.num_bytes != len(future.target):
                raise ProtocolError(f"an answer of {header.num_bytes} bytes came for one of {len(future.target)}")
            receive_into(self._connection, future.target)
        except BaseException as error:
            future.fail(self._death(error))
            raise
        future.answer(header.seconds)

    def _end(self, error: BaseException) -> None:
        with self._state:
            if self.error is not None:
                return
            self.error = str(error) or type(error).__name__
            pending, self._pending = self._pending, {}
            self._state.notify_all()
        with contextlib.suppress(OSError):  # it is already
            self._connection.shutdown(socket.SHUT_RDWR)
        for future in pending.values():
            future.fail(self._death(self.error))

    def close(self) -> None:
        """End the connection and its threads. Nothing may be under way."""
        self._end(ConnectionAbortedError("it was closed here"))
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()
