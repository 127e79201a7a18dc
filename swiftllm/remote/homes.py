"""The CPU tier over several homes: this host, and others that hold more of it and compute their own attention."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import HostDied, Ticket, TicketTimes
from swiftllm.remote.tier import RemoteCpuTier
from swiftllm.runtime.cpu_tier import CpuTier


@dataclass(frozen=True)
class _Part:
    """Adjacent rows that live in one home; ``opened`` is that home's."""

    tier: CpuTier
    rows: slice
    opened: object


class AttentionHosts:
    """See :class:`swiftllm.runtime.cpu_tier.CpuTier`. The local tier has the first block ids, then each host in turn.

    Attributes:
        num_blocks: of each host, without the local tier.
        deaths: hosts that were lost so far.
    """

    def __init__(
        self,
        local: CpuTier,
        num_local_blocks: int,
        hosts: Sequence[RemoteCpuTier],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """``on_close`` is called once the connections are closed."""
        self._on_close = on_close
        self.num_blocks = tuple(host.num_blocks for host in hosts)
        self.deaths = 0
        self.hosts = tuple(hosts)
        self._tiers: tuple[CpuTier, ...] = (local, *hosts)
        self._starts = torch.tensor([0, *accumulate((num_local_blocks, *self.num_blocks))][:-1])

    def describe(self) -> list[str]:
        """One line per host: its address, blocks and threads."""
        return [f"{host.channel.name}: {host.num_blocks:,} blocks, {host.threads} threads" for host in self.hosts]

    # -- what became of the hosts -----------------------------------------------------------------------------------

    def take_died(self) -> list[int]:
        """The homes that are gone since the last call: none of their K and V can be used any more."""
        died = [host.home for host in self.hosts if host.take_died()]
        self.deaths += len(died)
        return died

    def take_returned(self) -> list[int]:
        """The homes, of those once returned by :meth:`take_died`, that have a host again; their blocks are empty."""
        return [host.home for host in self.hosts if host.take_returned()]

    @property
    def num_connected(self) -> int:
        """Hosts whose blocks are in use."""
        return sum(not host.channel.is_dead for host in self.hosts)

    # -- blocks that are fetched before a swap (swiftllm.scheduling.homes.BlockFetcher) ------------------------------

    def fetch(self, blocks: Sequence[int]) -> None:
        for tier, own in self._on_hosts(blocks):
            tier.fetch(own)

    def has_fetched(self, blocks: Sequence[int]) -> bool:
        return all(tier.has_fetched(own) for tier, own in self._on_hosts(blocks))

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        for tier, own in self._on_hosts(blocks):
            tier.drop_fetched(own)

    def _on_hosts(self, blocks: Sequence[int]) -> Iterator[tuple[RemoteCpuTier, list[int]]]:
        ids = torch.tensor(blocks, dtype=torch.int64)
        for tier, rows, start in self._runs(ids):
            yield tier, (ids[rows] - start).tolist()

    # -- operations -------------------------------------------------------------------------------------------------

    def _runs(self, blocks: torch.Tensor) -> Iterator[tuple[CpuTier, slice, int]]:
        """Home, rows and first block id of each run of blocks that lie in one home."""
        homes = torch.bucketize(blocks, self._starts, right=True) - 1
        first = 0
        for home, count in zip(*(part.tolist() for part in homes.unique_consecutive(return_counts=True)), strict=True):
            yield self._tiers[home], slice(first, first + count), int(self._starts[home])
            first += count

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor) -> list[_Part]:
        return [
            _Part(tier, rows, tier.open(block_tables[rows] - start, seq_lens[rows]))
            for tier, rows, start in self._runs(block_tables[:, 0].long())
        ]

    def attend(
        self,
        layer: int,
        rows: list[_Part],
        qkv: torch.Tensor,
        out: torch.Tensor,
        arrived: Event,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        if len(rows) == 1:
            return rows[0].tier.attend(layer, rows[0].opened, qkv, out, arrived, send_back)
        joined = JoinedTicket(len(rows), send_back)
        # Another host's part first: with a worker that computes at once, the local part would hold it up.
        for part in sorted(rows, key=lambda part: part.tier is self._tiers[0]):
            own = part.rows
            try:
                ticket = part.tier.attend(layer, part.opened, qkv[own], out[own], arrived, joined.part_done)
            except HostDied as error:  # the other parts are under way and must be waited for
                joined.error = error
            else:
                joined.parts.append(ticket)
        return joined

    def store(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, arrived: Event) -> None:
        for tier, rows, start in self._runs(blocks):
            tier.store(layer, kv[rows], blocks[rows] - start, offsets[rows], arrived)

    def load(self, layer: int, blocks: torch.Tensor, out: torch.Tensor) -> Ticket:
        ((tier, _, start),) = self._runs(blocks)
        return tier.load(layer, blocks - start, out)

    def put(self, layers: range, content: torch.Tensor, blocks: torch.Tensor, arrived: Event) -> None:
        for tier, rows, start in self._runs(blocks):
            part = content
            if rows != slice(0, len(blocks)):
                arrived.synchronize()
                part = content[:, rows].contiguous()
            tier.put(layers, part, blocks[rows] - start, arrived)

    def get(
        self,
        layers: range,
        blocks: torch.Tensor,
        content: torch.Tensor,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        runs = list(self._runs(blocks))
        if len(runs) == 1:
            return runs[0][0].get(layers, blocks - runs[0][2], content, send_back)
        joined = JoinedTicket(len(runs), send_back)
        for tier, rows, start in runs:
            part = torch.empty_like(content[:, rows], memory_format=torch.contiguous_format)

            def place(rows: slice = rows, part: torch.Tensor = part) -> None:
                content[:, rows] = part
                joined.part_done()

            joined.parts.append(tier.get(layers, blocks[rows] - start, part, place))
        return joined

    def recover(self) -> None:
        for tier in self._tiers:
            tier.recover()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        if self._on_close is not None:
            self._on_close()


class JoinedTicket:
    """The tickets of parts in several homes, as one: ready when all are.

    Attributes:
        parts: tickets of the parts under way.
        error: why a part could not be submitted.
    """

    def __init__(self, num_parts: int, send_back: Callable[[], None] | None) -> None:
        self.error: Exception | None = None
        self.parts: list[Ticket] = []
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
        """The seconds of the home that computed longest. Waits for all parts before it raises."""
        errors, seconds = [] if self.error is None else [self.error], [0.0]
        for part in self.parts:
            try:
                seconds.append(part.wait())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return max(seconds)

    def times(self) -> TicketTimes:
        times = [part.times() for part in self.parts]
        done_s = max(of_part.done_s for of_part in times)
        return TicketTimes(min(of_part.start_s for of_part in times), done_s, done_s)
