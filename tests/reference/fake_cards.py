"""The two GPUs of a CUDA made of Python, see :mod:`tests.reference.fake_device`.

Which one each thread works on, where the process has contexts, and NCCL between them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.reference.fake_streams import Hazard

if TYPE_CHECKING:
    from tests.reference.fake_device import FakeCuda

CARDS = 2


class FakeCards:
    """Attributes: ``contexts``, the GPUs on which the process has opened one, some hundred MiB each."""

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self._thread = threading.local()

    def current(self) -> int:
        """The GPU that the calling thread works on: 0 until it chooses another."""
        return getattr(self._thread, "card", 0)

    def choose(self, card: int | torch.device) -> None:
        self._thread.card = card if isinstance(card, int) else card.index
        assert 0 <= self._thread.card < CARDS, "invalid device ordinal"
        self.touch()

    def touch(self) -> None:
        """The calling thread has called CUDA."""
        self.contexts.add(self.current())

    @contextmanager
    def working_on(self, card: int) -> Iterator[None]:
        outer, self._thread.card = self.current(), card
        try:
            yield
        finally:
            self._thread.card = outer


def properties(card: int) -> SimpleNamespace:
    address = {"pci_domain_id": 0, "pci_bus_id": card, "pci_device_id": 0}
    return SimpleNamespace(**address, major=8, minor=6, total_memory=1 << 30, multi_processor_count=40)


class FakeNccl:
    """A communicator of one rank, whose collectives change nothing.

    As NCCL's it can be given up only when no graph that holds one of its collectives is left: it waits for the last.
    """

    Options = SimpleNamespace

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.is_given_up = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeNccl:
        return self._launch(lambda tensor: None, *tensors)

    def gather(self, parts: list[list[torch.Tensor]], columns: list[torch.Tensor], options: Any) -> FakeNccl:
        return self._launch(lambda part, column: part.copy_(column), parts[0][0], *columns)

    def _launch(self, kernel: Any, *tensors: torch.Tensor) -> FakeNccl:
        self._cuda.raise_failure()
        if self.is_given_up:
            raise Hazard("a collective of a communicator that was given up")
        self._cuda.launch(kernel, *tensors)
        if self._cuda.capturing:
            self._cuda.captured_in.add(self)
        return self

    def wait(self) -> None:
        """Of a collective: in order on its stream."""

    def abort(self) -> None:
        if left := sum(self in graph.communicators for graph in self._cuda.graphs):
            raise Hazard(f"NCCL waits for ever: {left} graphs with its collectives are alive")
        self.is_given_up = True
        self._cuda.raise_failure()
        self._cuda.cards.touch()


class FakeRuntime:
    """CUDA's runtime. Attribute: ``mapped``, addresses of the host memory that kernels can read."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.mapped: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        self._cuda.raise_failure()
        self.mapped.add(address)

    def cudaHostUnregister(self, address: int) -> None:
        self.mapped.remove(address)
