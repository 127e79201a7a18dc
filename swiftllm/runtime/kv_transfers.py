"""Transfers of KV cache between the tiers, beside the work of both: swapped blocks, and K and V of prefills for the
CPU tier, layer by layer.

The CPU tier's memory is not pinned. What comes from a GPU arrives in pinned memory, from where the tier takes it: so
it is in order with the attention that reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from swiftllm.core.plan import Swap
from swiftllm.core.request import Tier
from swiftllm.device.device import Device, Event
from swiftllm.kv.pools import KVPools
from swiftllm.ops.interface import Ops
from swiftllm.runtime.cpu_tier import CpuTier
from swiftllm.runtime.pacing import Pacer

CHUNK_BYTES = 16 << 20  # of one transfer of blocks
SNAPSHOTS = 2  # most copies of a layer's K and V that wait on the device for their way to the host


class KVTransfers:
    """Moves K and V between the GPU tier and ``cpu_tier``, which may be replaced while nothing is under way."""

    def __init__(self, device: Device, pools: KVPools, ops: Ops, cpu_tier: CpuTier) -> None:
        self.cpu_tier = cpu_tier
        self._device = device
        self._pools = pools
        self._ops = ops
        self._stored = Pacer(device.to_host, ahead=SNAPSHOTS - 1)

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
        self._stored.wait()
        kv = self._device.snapshot(kv)
        stream.wait(self._device.compute.mark())
        fetched = stream.fetch(kv)
        self._stored.launched()
        self.cpu_tier.store(layer, fetched, blocks, offsets, stream.mark())

    def load_context(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K and V of a request's first tokens from the CPU tier, ``[2, num_kv_heads, num_tokens, head_dim]``."""
        return self._device.compute.send(self.cpu_tier.load(layer, blocks, num_tokens))

    def _move_out(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """Returns when the source blocks may be overwritten."""
        stream, pool = self._device.swap, self._pools.tensors[Tier.GPU]
        with stream.running():
            staged = torch.empty(self._shape(len(sources)), dtype=pool.dtype, device=pool.device)
            self._ops.gather_blocks(pool, stream.send(sources), staged)
        gathered = stream.mark()
        fetched = stream.fetch(staged)
        self.cpu_tier.put(fetched, targets, stream.mark())
        return gathered

    def _move_in(self, sources: torch.Tensor, targets: torch.Tensor) -> Event:
        """Returns when the blocks have arrived."""
        stream, pool = self._device.swap, self._pools.tensors[Tier.GPU]
        staged = self._device.pinned(self._shape(len(sources)), pool.dtype)
        self.cpu_tier.get(sources, staged)
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
