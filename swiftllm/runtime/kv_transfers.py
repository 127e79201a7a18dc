"""Transfers of KV cache between the tiers, beside the work of both: swapped blocks, and K and V of prefills for the
CPU tier, layer by layer.

The CPU tier's memory is not pinned. What comes from a GPU arrives in pinned memory, from where the attention worker
writes it to the tier: so it is in order with the attention that reads it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from swiftllm.core.plan import Swap
from swiftllm.core.request import Tier
from swiftllm.device.device import Device, Event
from swiftllm.engine.backend import Ticket
from swiftllm.kv.pools import KVPools
from swiftllm.ops.interface import Ops
from swiftllm.runtime.workers.interface import AttentionWorker
from swiftllm.runtime.workers.task import BlocksWrite, HostWrite, RowsWrite, TaskRunner

CHUNK_BYTES = 16 << 20  # of one transfer of blocks
MAX_STAGED_BYTES = 256 << 20  # of pinned memory whose content is not yet written to the tier


@dataclass(frozen=True)
class _Pending:
    layers: range
    num_bytes: int
    ticket: Ticket


class HostWrites:
    """Writes to the CPU tier, in order, of data that may still be on its way from the device."""

    def __init__(self, runner: TaskRunner, worker: AttentionWorker) -> None:
        self._runner = runner
        self._worker = worker
        self._pending: deque[_Pending] = deque()

    def submit(self, write: HostWrite, arrived: Event, layers: range, num_bytes: int) -> None:
        """Write after ``arrived``: on this thread at once if there is nothing to wait for, else on the worker."""
        while self._pending and self._pending[0].ticket.ready():
            self._finish(self._pending[0])
        if not self._pending and arrived.done():
            self._runner.run_task(write)
            return
        self._pending.append(_Pending(layers, num_bytes, self._worker.submit(write, arrived)))
        while sum(pending.num_bytes for pending in self._pending) > MAX_STAGED_BYTES:
            self._finish(self._pending[0])

    def settle(self, layers: range) -> None:
        """Wait for the writes to these layers; raises what they raised."""
        for pending in list(self._pending):
            if pending.layers.start < layers.stop and layers.start < pending.layers.stop:
                self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        try:
            pending.ticket.wait()
        except BaseException:
            # The caller gives up all work under way: the other writes must not fail again afterwards.
            self.drop_writes()
            raise

    def drop_writes(self) -> None:
        """Wait for all writes and ignore their errors."""
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popleft().ticket.wait()


class KVTransfers:
    """Moves K and V between the pools of both tiers."""

    def __init__(self, device: Device, pools: KVPools, ops: Ops, runner: TaskRunner, worker: AttentionWorker) -> None:
        self._device = device
        self._pools = pools
        self._ops = ops
        self._writes = HostWrites(runner, worker)
        self._all_layers = range(len(pools.layers[Tier.CPU]))

    def drop_writes(self) -> None:
        """Wait until no write is under way; ignores errors."""
        self._writes.drop_writes()

    def swap_blocks(self, swaps: Sequence[Swap]) -> None:
        """Copy blocks between the tiers, in the order given: a later swap may fill blocks an earlier one emptied.

        Later work on the device finds the copies, and may overwrite the sources. So may the host, through this object
        or the attention worker.
        """
        if not swaps:
            return
        compute, stream = self._device.compute, self._device.swap
        stream.wait(compute.mark())  # all earlier writes of sources and reads of targets are done
        moved = None
        for source, run in groupby(swaps, key=lambda swap: swap.source):
            move = self._move_out if source is Tier.GPU else self._move_in
            for chunk in self._chunks(run):
                moved = move(*chunk)
        if moved is not None:
            compute.wait(moved)

    def store_rows(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Write K and V, ``kv [rows, 2 num_kv_heads, head_dim]`` of the device, to slots of the CPU tier."""
        stream = self._device.to_host
        kv = self._device.snapshot(kv)
        stream.wait(self._device.compute.mark())
        write = RowsWrite(layer, stream.fetch(kv), blocks, offsets)
        self._writes.submit(write, stream.mark(), range(layer, layer + 1), kv.nbytes)

    def load_context(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K and V of a request's first tokens from the CPU tier, ``[2, num_kv_heads, num_tokens, head_dim]``."""
        self._writes.settle(range(layer, layer + 1))
        kv = self._ops.gather_kv(self._pools.layers[Tier.CPU][layer], blocks, num_tokens)
        return self._device.compute.send(kv)

    def _move_out(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """Returns when the source blocks may be overwritten."""
        stream, pool = self._device.swap, self._pools.tensors[Tier.GPU]
        with stream.running():
            staged = torch.empty(self._shape(len(sources)), dtype=pool.dtype, device=pool.device)
            self._ops.gather_blocks(pool, stream.send(sources), staged)
        gathered = stream.mark()
        write = BlocksWrite(stream.fetch(staged), targets)
        self._writes.submit(write, stream.mark(), self._all_layers, staged.nbytes)
        return gathered

    def _move_in(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """Returns when the blocks have arrived."""
        stream, pool, host_pool = self._device.swap, self._pools.tensors[Tier.GPU], self._pools.tensors[Tier.CPU]
        self._writes.settle(self._all_layers)
        staged = self._device.pinned(self._shape(len(sources)), host_pool.dtype)
        self._ops.gather_blocks(host_pool, sources, staged)
        with stream.running():
            self._ops.scatter_blocks(stream.send(staged), pool, stream.send(targets))
        return stream.mark()

    def _chunks(self, swaps: Iterator[Swap]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Source and target blocks, int64, for one transfer each."""
        pairs = [pair for swap in swaps for pair in zip(swap.source_blocks, swap.target_blocks, strict=True)]
        size = max(1, CHUNK_BYTES // self._pools.bytes_per_block)
        for first in range(0, len(pairs), size):
            yield tuple(torch.tensor(pairs[first : first + size]).T.contiguous())

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        pool = self._pools.tensors[Tier.GPU]
        return (pool.shape[0], num_blocks, *pool.shape[2:])
