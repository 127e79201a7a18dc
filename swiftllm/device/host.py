"""A host as a device: the calling thread does all work, and there is one memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from swiftllm.device.device import Event, Graph, Stream
from swiftllm.machine import available_host_bytes


class _Done:
    """Stream and event of work that is done when the call returns."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def running(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Event:
        return self

    def wait(self, event: Event) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            target.copy_(source)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class HostDevice:
    """See :class:`Device`: the calling thread does all work."""

    torch_device = torch.device("cpu")
    compute = to_host = to_device = swap = _Done()
    can_capture = False
    graph_bytes = 0

    def new_stream(self) -> Stream:
        return self.compute

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, work: Callable[[], object]) -> Graph:
        raise NotImplementedError("a host has no graphs to capture")

    def free_bytes(self) -> int:
        return available_host_bytes()

    def left_free(self, work: Callable[[], object]) -> int | None:
        return None
