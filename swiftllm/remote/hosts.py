"""The CPU tier over several hosts: this one, and others that hold more of it and compute their own attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import AttentionFuture, AttentionTimes, HostDied
from swiftllm.remote.tier import RemoteCpuTier
from swiftllm.runtime.cpu_tier import CpuTier
from swiftllm.runtime.workers import AttentionTask, BlocksRead, BlocksWrite, HostRead, HostWrite, RowsWrite

RowsByHost = list[tuple[CpuTier, slice, object]]
"""Adjacent rows that live on one host, and what its tier made of them."""


class AttentionHosts:
    """See :class:`swiftllm.runtime.cpu_tier.CpuTier`. Host 0 is this one and has the first block ids, then each other.

    Attributes:
        hosts: the others.
        num_blocks: of each of the others.
        deaths: hosts that were lost so far.
    """

    may_die = True

    def __init__(
        self,
        local: CpuTier,
        num_local_blocks: int,
        hosts: Sequence[RemoteCpuTier],
        close_hosts: Callable[[], None],
    ) -> None:
        self.num_blocks = tuple(host.num_blocks for host in hosts)
        self.deaths = 0
        self.hosts = tuple(hosts)
        self._tiers: tuple[CpuTier, ...] = (local, *hosts)
        self._firsts = torch.tensor([0, *accumulate((num_local_blocks, *self.num_blocks))][:-1])
        self._close_hosts = close_hosts

    def describe(self) -> list[str]:
        """One line per host: its address, blocks and threads."""
        return [f"{host.channel.name}: {host.num_blocks:,} blocks, {host.threads} threads" for host in self.hosts]

    # -- what became of the hosts -----------------------------------------------------------------------------------

    def take_died(self) -> list[int]:
        """The hosts that are gone since the last call: none of their K and V can be used any more."""
        died = [number for number, host in enumerate(self.hosts, 1) if host.take_died()]
        self.deaths += len(died)
        return died

    def take_returned(self) -> list[int]:
        """The hosts, of those once returned by :meth:`take_died`, that are there again; their blocks are empty."""
        return [number for number, host in enumerate(self.hosts, 1) if host.take_returned()]

    @property
    def num_connected(self) -> int:
        """Hosts whose blocks are in use."""
        return sum(not host.channel.is_dead for host in self.hosts)

    # -- blocks that are fetched before a swap (swiftllm.scheduling.host_pools.BlockFetcher) -----------------------

    def fetch(self, blocks: Sequence[int]) -> None:
        for tier, _, own in self._split(blocks):
            tier.fetch(own.tolist())

    def has_fetched(self, blocks: Sequence[int]) -> bool:
        return all(tier.has_fetched(own.tolist()) for tier, _, own in self._split(blocks))

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        for tier, _, own in self._split(blocks):
            tier.drop_fetched(own.tolist())

    # -- operations -------------------------------------------------------------------------------------------------

    def _split(self, blocks: torch.Tensor | Sequence[int]) -> Iterator[tuple[CpuTier, slice, torch.Tensor]]:
        """Tier, rows and own numbers (int64) of each run of blocks that lie on one host."""
        blocks = torch.as_tensor(blocks, dtype=torch.int64)
        hosts = torch.bucketize(blocks, self._firsts, right=True) - 1
        first = 0
        for host, count in zip(*(part.tolist() for part in hosts.unique_consecutive(return_counts=True)), strict=True):
            rows = slice(first, first + count)
            yield self._tiers[host], rows, blocks[rows] - self._firsts[host]
            first += count

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> RowsByHost:
        opened = []
        for tier, rows, own in self._split(block_tables[:, 0]):
            shift = int(own[0] - block_tables[rows.start, 0])
            opened.append((tier, rows, tier.open(block_tables[rows] + shift, seq_lens[rows], window)))
        return opened

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        if len(task.rows) == 1:
            ((tier, _, opened),) = task.rows
            return tier.attend(replace(task, rows=opened), arrived, send_back)
        joined = JoinedFuture(len(task.rows), send_back)
        # Another host's part first: with a worker that computes at once, the local part would hold it up.
        for tier, rows, opened in sorted(task.rows, key=lambda part: part[0] is self._tiers[0]):
            part = AttentionTask(task.layer, opened, task.qkv[rows], task.out[rows], task.sinks)
            try:
                future = tier.attend(part, arrived, joined.part_done)
            except HostDied as error:  # the other parts are under way and must be waited for
                joined.error = error
            else:
                joined.parts.append(future)
        return joined

    def write(self, write: HostWrite, arrived: Event) -> None:
        for tier, rows, blocks in self._split(write.blocks):
            if isinstance(write, RowsWrite):
                part = RowsWrite(write.layer, write.content[rows], blocks, write.offsets[rows])
            elif len(blocks) == len(write.blocks):
                part = replace(write, blocks=blocks)
            else:
                arrived.synchronize()
                part = BlocksWrite(write.layers, write.content[:, rows].contiguous(), blocks)
            tier.write(part, arrived)

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        parts = list(self._split(read.blocks))
        if len(parts) == 1:
            ((tier, _, blocks),) = parts
            return tier.read(replace(read, blocks=blocks), send_back)
        joined = JoinedFuture(len(parts), send_back)
        for tier, rows, blocks in parts:  # of whole blocks: a context is on one host
            part = torch.empty_like(read.out[:, rows], memory_format=torch.contiguous_format)

            def place(rows: slice = rows, part: torch.Tensor = part) -> None:
                read.out[:, rows] = part
                joined.part_done()

            joined.parts.append(tier.read(BlocksRead(read.layers, blocks, part), place))
        return joined

    def recover(self) -> None:
        for tier in self._tiers:
            tier.recover()

    def close(self) -> None:
        self._tiers[0].close()
        self._close_hosts()


class JoinedFuture:
    """The attention tasks of parts on several hosts, as one: ready when all are.

    Attributes:
        parts: attention tasks of the parts under way.
        error: why a part could not be submitted.
    """

    def __init__(self, num_parts: int, send_back: Callable[[], None] | None) -> None:
        self.error: Exception | None = None
        self.parts: list[AttentionFuture] = []
        self._left = num_parts
        self._send_back = send_back
        self._lock = threading.Lock()

    def part_done(self) -> None:
        """Called by each part, on any thread, once its result is there; the last call sends the whole back."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._send_back is not None:
            self._send_back()

    def ready(self) -> bool:
        return all(part.ready() for part in self.parts)

    def wait(self) -> float:
        """The seconds of the host that computed longest. Waits for all parts before it raises."""
        errors, seconds = [] if self.error is None else [self.error], [0.0]
        for part in self.parts:
            try:
                seconds.append(part.wait())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return max(seconds)

    def times(self) -> AttentionTimes:
        times = [part.times() for part in self.parts]
        done_s = max(of_part.done_s for of_part in times)
        return AttentionTimes(min(of_part.start_s for of_part in times), done_s, done_s)
