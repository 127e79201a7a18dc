"""Where the linear layers run, as the backend sees it: streams, events, copies between memories, captured graphs.

A GPU works through each stream in order and through different streams in any order; marks and waits are what orders
them. On a host everything has happened when the call returns, and memories are one: the same backend then waits for
nothing and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A mark on a stream."""

    def done(self) -> bool:
        """Whether all work before the mark is done; never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until then: asleep, without the GIL."""


class Stream(Protocol):
    """Work that is done in order. Calls return before the work is done."""

    def running(self) -> AbstractContextManager[object]:
        """What torch is told to do inside runs on this stream, and what it allocates there belongs to it."""

    def mark(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Nothing that comes later on this stream starts before ``event``; the host goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between host memory (``pinned``) and the device, both contiguous. Memory of the device is not given to
        others before the copy is over, even if the last reference to it goes; what it holds must stay meanwhile."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory that holds ``tensor`` once the stream has come here."""

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, belonging to this stream, that holds ``tensor`` of host memory from here on."""


class Graph(Protocol):
    def replay(self) -> None:
        """Do the captured work again on the compute stream, on the same memory."""


class Device(Protocol):
    """``compute`` is the stream torch uses unless told otherwise; the others carry K, V, Q and attention results to
    the host and back, and blocks between the tiers."""

    torch_device: torch.device
    compute: Stream
    to_host: Stream
    to_device: Stream
    swap: Stream
    can_capture: bool
    graph_bytes: int
    """Of the device's memory that captured graphs may take."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for ``Stream.copy``, uninitialised; may be dropped while a copy is under way."""

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the same shape on the device: on a host, ``host`` itself."""

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as the compute stream leaves it here, contiguous, for other streams to read: later writes do not
        show. On a host, which reads at once, ``tensor`` itself."""

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture what ``work`` does on the compute stream without doing it. It has run before with these shapes.

        Raises:
            RuntimeError: it cannot be captured. No graph of this device may be replayed any more.
        """

    def free_bytes(self) -> int:
        """Memory that can be had."""

    def left_free(self, work: Callable[[], object]) -> int | None:
        """Memory that can be given away for good so that ``work``, which is run to see, still finds what it needs
        beside it. None: what is there is the host's.

        Raises:
            InsufficientMemory: there is not even enough for ``work``.
        """
