"""The device of the linear layers as the backend sees it: streams, events, copies between memories, captured graphs.

A GPU does the work of one stream in order, and that of different streams in any order that events and waits allow. On a
host all work is done when the call returns, and there is one memory: the same backend then waits for nothing and copies
nothing.
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
        ...

    def synchronize(self) -> None:
        """Block until then; the calling thread sleeps, without the GIL.

        Raises:
            DeviceHung: it takes too long; see :mod:`swiftllm.device.limits`.
        """


class Stream(Protocol):
    """Work that is done in order. Calls return before the work is done."""

    def running(self) -> AbstractContextManager[object]:
        """Inside, torch works on this stream, and its allocations belong to it."""
        ...

    def mark(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Later work on this stream starts after ``event``; the host does not wait."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between host memory (``pinned``) and the device, both contiguous. Device memory is not reused before the copy
        is done, even if its last reference is dropped; its content must not change meanwhile."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory that holds ``tensor`` once the stream has reached this point."""
        ...

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this stream on the device that holds ``tensor``, of host memory, for later work on the stream."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Repeat the captured work on the compute stream and the same memory."""


class Device(Protocol):
    """``compute`` is torch's default stream; the others carry K, V, Q and attention results to
    the host and back, and blocks between the tiers."""

    torch_device: torch.device
    can_capture: bool
    graph_bytes: int
    """Device memory that captured graphs may take."""

    @property
    def compute(self) -> Stream: ...

    @property
    def to_host(self) -> Stream: ...

    @property
    def to_device(self) -> Stream: ...

    @property
    def swap(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """Another stream, for copies that must not wait for those of the others."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for ``Stream.copy``; may be dropped while a copy is under way."""
        ...

    def mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that kernels of the device can read; it takes no more than its bytes, whereas
        ``pinned`` memory is rounded up."""
        ...

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the same shape on the device: on a host, ``host`` itself."""
        ...

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, made on the compute stream, for other streams to read: later writes to ``tensor`` do not
        show. On a host, which reads at once, ``tensor`` itself."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture what ``work`` does on the compute stream without doing it. It must have run before, with the same
        shapes.

        Raises:
            RuntimeError: it cannot be captured. No graph of this device may be replayed afterwards.
        """
        ...

    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...

    def left_free(self, work: Callable[[], object]) -> int | None:
        """Bytes that remain for permanent use beside what ``work`` needs, which is run to measure that. None: the
        device's memory is the host's.

        Raises:
            InsufficientMemory: there is not enough for ``work``.
        """
