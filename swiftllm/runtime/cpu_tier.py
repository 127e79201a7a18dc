"""The CPU tier as the backend sees it: what may be done with its blocks, wherever they lie.

:class:`LocalCpuTier` is the memory of this process. :mod:`swiftllm.remote` has tiers in other processes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import AttentionFuture
from swiftllm.runtime.workers import (
    AttentionTask,
    HostRead,
    HostWrite,
    InlineWorker,
    MakeWorker,
    OpenedRows,
    TaskRunner,
)

MAX_STAGED_BYTES = 256 << 20  # of pinned memory each way whose content is not yet copied


class CpuTier(Protocol):
    """Operations take effect in the order of the calls.

    ``arrived`` is when an input may be read; the caller does not change the input afterwards. Once an output is
    written, ``send_back`` is called on any thread; then the attention task is ready. On another host any call, and an
    attention task's ``wait``, may raise :class:`swiftllm.engine.backend.HostDied`.

    Attributes:
        may_die: whether blocks may be lost in that way.
    """

    may_die: bool

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> Any:
        """The ``rows`` of an :class:`AttentionTask`: of int32 ``[rows, max_blocks]`` and ``[rows]``. With a ``window``
        each attends to its last tokens only, and what the table tells of those before may be any block."""
        ...

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        """Decode attention of opened rows."""
        ...

    def write(self, write: HostWrite, arrived: Event) -> None:
        """May raise what an earlier write raised."""

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture: ...

    def recover(self) -> None:
        """Wait until no read or write is under way, ignore their errors, and make the tier usable again."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class AfterReads:
    """An event: ``arrived``, and the end of all reads up to ``last``."""

    last: AttentionFuture
    arrived: Event

    def done(self) -> bool:
        return self.last.ready() and self.arrived.done()

    def synchronize(self) -> None:
        with contextlib.suppress(Exception):  # told to whoever waits for the read
            self.last.wait()
        self.arrived.synchronize()


@dataclass(frozen=True)
class AfterWrites:
    """An event: the end of these writes. The error of a write is raised."""

    writes: Sequence[AttentionFuture]

    def done(self) -> bool:
        return all(write.ready() for write in self.writes)

    def synchronize(self) -> None:
        for write in self.writes:
            write.wait()


@dataclass(frozen=True)
class _Pending:
    layers: range
    num_bytes: int
    future: AttentionFuture


class LocalCpuTier:
    """See :class:`CpuTier`: blocks in the memory of this process, and two workers.

    One worker attends and writes. The other one reads for the device, which need not wait for attention. A read still
    finds what was written before it, and nothing that was written after. A task waits only for tasks that were
    submitted before it, so the workers cannot wait for each other in a circle.

    Attributes:
        runner: carries out the tasks.
        worker: the one that attends and writes.
    """

    may_die = False

    def __init__(self, runner: TaskRunner, make_worker: MakeWorker = InlineWorker) -> None:
        self.runner = runner
        self.worker, self._reader = make_worker(runner), make_worker(runner)
        self._writes: deque[_Pending] = deque()
        self._reads: deque[_Pending] = deque()

    @property
    def restarts(self) -> int:
        """How often a worker ended by itself and was started again."""
        return self.worker.restarts + self._reader.restarts

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> OpenedRows:
        return OpenedRows(block_tables, seq_lens, window)

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        return self.worker.submit(task, self._after_reads(arrived), send_back)

    def write(self, write: HostWrite, arrived: Event) -> None:
        """On this thread at once if there is nothing to wait for, else by the worker."""
        while self._writes and self._writes[0].future.ready():
            self._finish_write()
        after = self._after_reads(arrived)
        if not self._writes and after.done():
            self.runner.run_task(write)
            return
        self._writes.append(_Pending(write.layers, write.content.nbytes, self.worker.submit(write, after)))
        while _num_bytes(self._writes) > MAX_STAGED_BYTES:
            self._finish_write()

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        """The attention task raises what earlier writes to these layers raised."""
        first, stop = read.layers.start, read.layers.stop
        writes = [write.future for write in self._writes if write.layers.start < stop and first < write.layers.stop]
        future = self._reader.submit(read, AfterWrites(writes), send_back)
        self._reads.append(_Pending(read.layers, read.out.nbytes, future))
        while _num_bytes(self._reads) > MAX_STAGED_BYTES:
            with contextlib.suppress(Exception):  # told to whoever waits for the read
                self._reads.popleft().future.wait()
        return future

    def _after_reads(self, arrived: Event) -> Event:
        """When the reads so far are over too: what writes to the tier may overwrite what they read."""
        while self._reads and self._reads[0].future.ready():
            self._reads.popleft()
        return AfterReads(self._reads[-1].future, arrived) if self._reads else arrived

    def _finish_write(self) -> None:
        try:
            self._writes.popleft().future.wait()
        except BaseException:
            # The caller gives up all work under way: the other writes must not fail again afterwards.
            self._drop_all()
            raise

    def _drop_all(self) -> None:
        for pending in (self._reads, self._writes):
            while pending:
                with contextlib.suppress(Exception):
                    pending.popleft().future.wait()

    def recover(self) -> None:
        self._drop_all()
        self.worker.start_again()
        self._reader.start_again()

    def close(self) -> None:
        self._reader.close()
        self.worker.close()


def _num_bytes(pending: deque[_Pending]) -> int:
    return sum(part.num_bytes for part in pending)
