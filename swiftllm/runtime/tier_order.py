"""The order of reads and writes of the CPU tier on two workers.

Reads do not stand behind attention. They still find what was written before them, and nothing that was written after.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftllm.device.device import Event
from swiftllm.engine.backend import Ticket
from swiftllm.runtime.workers.interface import AttentionWorker
from swiftllm.runtime.workers.task import HostRead, HostWrite, TaskRunner

MAX_STAGED_BYTES = 256 << 20  # of pinned memory each way whose content is not yet copied


@dataclass(frozen=True)
class AfterReads:
    """An event: ``arrived``, and the end of all reads up to ``last``."""

    last: Ticket
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

    writes: Sequence[Ticket]

    def done(self) -> bool:
        return all(write.ready() for write in self.writes)

    def synchronize(self) -> None:
        for write in self.writes:
            write.wait()


@dataclass(frozen=True)
class _Pending:
    layers: range
    num_bytes: int
    ticket: Ticket


class TierOrder:
    """Submits reads to one worker and writes to another, each after what it must come after.

    A task waits only for tasks that were submitted before it, so the workers cannot wait for each other in a circle.
    """

    def __init__(self, runner: TaskRunner, writer: AttentionWorker, reader: AttentionWorker) -> None:
        self._runner = runner
        self._writer = writer
        self._reader = reader
        self._writes: deque[_Pending] = deque()
        self._reads: deque[_Pending] = deque()

    def write(self, write: HostWrite, arrived: Event, layers: range, num_bytes: int) -> None:
        """Write after ``arrived`` and the reads so far: on this thread at once if there is nothing to wait for, else on
        the writer. Raises what an earlier write raised."""
        while self._writes and self._writes[0].ticket.ready():
            self._finish(self._writes[0])
        after = self.after_reads(arrived)
        if not self._writes and after.done():
            self._runner.run_task(write)
            return
        self._writes.append(_Pending(layers, num_bytes, self._writer.submit(write, after)))
        while _num_bytes(self._writes) > MAX_STAGED_BYTES:
            self._finish(self._writes[0])

    def read(
        self, read: HostRead, layers: range, num_bytes: int, send_back: Callable[[], None] | None = None
    ) -> Ticket:
        """Read after the writes to these layers so far. The ticket raises what they raised."""
        writes = [p.ticket for p in self._writes if p.layers.start < layers.stop and layers.start < p.layers.stop]
        ticket = self._reader.submit(read, AfterWrites(writes), send_back)
        self._reads.append(_Pending(layers, num_bytes, ticket))
        while _num_bytes(self._reads) > MAX_STAGED_BYTES:
            with contextlib.suppress(Exception):  # told to whoever waits for the read
                self._reads.popleft().ticket.wait()
        return ticket

    def after_reads(self, arrived: Event) -> Event:
        """When the reads so far are over too: what writes to the tier may overwrite what they read."""
        while self._reads and self._reads[0].ticket.ready():
            self._reads.popleft()
        return AfterReads(self._reads[-1].ticket, arrived) if self._reads else arrived

    def drop_all(self) -> None:
        """Wait for all reads and writes, and ignore their errors."""
        for pending in (self._reads, self._writes):
            while pending:
                with contextlib.suppress(Exception):
                    pending.popleft().ticket.wait()

    def _finish(self, pending: _Pending) -> None:
        self._writes.remove(pending)
        try:
            pending.ticket.wait()
        except BaseException:
            # The caller gives up all work under way: the other writes must not fail again afterwards.
            self.drop_all()
            raise


def _num_bytes(pending: deque[_Pending]) -> int:
    return sum(part.num_bytes for part in pending)
