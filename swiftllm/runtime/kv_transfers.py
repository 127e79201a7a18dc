"""Transfers of KV cache between the tiers, beside the work of both: swapped blocks, and K and V of prefills for the
CPU tier, layer by layer.

The CPU tier's memory is not pinned. What comes from a GPU arrives in pinned memory, from where the tier takes it: so
it is in order with the attention that reads it. What goes to a GPU is gathered into pinned memory by the tier's
threads. Where the tier is int8, blocks cross in its format: the GPU makes codes before they leave, and elements when
they come back. Rows of prompts cross as elements, and the tier makes codes of them.

Swaps go layer by layer too, and the lane's layer waits for its own part alone: see :meth:`KVTransfers.await_swaps`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from swiftllm.core.plan import Swap
from swiftllm.core.request import Tier
from swiftllm.device.device import Device, Event, Stream
from swiftllm.engine.backend import Ticket
from swiftllm.kv.pools import KVPools
from swiftllm.ops.interface import Ops
from swiftllm.runtime.cpu_tier import CpuTier
from swiftllm.runtime.pacing import Pacer
from swiftllm.runtime.workers import BlocksRead, BlocksWrite, ContextRead, RowsWrite

if TYPE_CHECKING:
    from swiftllm.runtime.batch import LaneBatch, PrefillChunk

CHUNK_BYTES = 4 << 20  # of one transfer of blocks
SNAPSHOTS = 2  # most copies of a layer's K and V that wait on the device for their way to the host


@dataclass(frozen=True)
class LoadedContext:
    """K and V of a request's earlier tokens, on their way from the CPU tier into ``pinned`` memory."""

    pinned: torch.Tensor  # [2, num_kv_heads, tokens, head_dim]
    gathered: Ticket
    compute: Stream

    def on_device(self) -> torch.Tensor:
        """The same on the device, for later work there. Waits for the tier."""
        self.gathered.wait()
        return self.compute.send(self.pinned)


@dataclass(frozen=True)
class _Blocks:
    """Blocks that move in the same direction, for one transfer a layer; those of the GPU tier are on the device."""

    source: Tier
    sources: torch.Tensor  # int64 [blocks]
    targets: torch.Tensor


@dataclass
class _Moved:
    """A part of the swaps: some layers of all blocks. ``tickets`` are of what the host gathers."""

    layers: range
    tickets: list[Ticket] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class KVTransfers:
    """Moves K and V between the GPU tier and ``cpu_tier``, which may be replaced while nothing is under way."""

    def __init__(self, device: Device, pools: KVPools, ops: Ops, cpu_tier: CpuTier) -> None:
        self.cpu_tier = cpu_tier
        self._device = device
        self._pools = pools
        self._ops = ops
        self._stored = Pacer(device.to_host, ahead=SNAPSHOTS - 1)
        self._staged = pools.formats[Tier.GPU if device.torch_device.type == "cpu" else Tier.CPU]  # crosses in swaps
        self._moved: deque[_Moved] = deque()  # what no work on the device waits for yet, by layer

    def swap_blocks(self, swaps: Sequence[Swap]) -> None:
        """Begin to copy blocks between the tiers, as if in the order given: a later swap may fill blocks that an
        earlier one emptied, and takes none that an earlier one filled.

        What is done to the CPU tier afterwards finds the copies, and may overwrite the sources. So may work on the
        device, layer by layer, after :meth:`await_swaps`.
        """
        if not swaps:
            return
        self.await_swaps()
        self._device.swap.wait(self._device.compute.mark())  # earlier writes of sources and reads of targets are done
        num_layers, num_blocks = len(self._pools.tensors[Tier.GPU]), sum(len(swap.source_blocks) for swap in swaps)
        layer_bytes = self._pools.plan.bytes_per_block[Tier.GPU] // num_layers
        at_once = max(1, CHUNK_BYTES // max(1, num_blocks * layer_bytes))  # layers
        pieces = list(self._pieces(swaps, max(1, CHUNK_BYTES // (at_once * layer_bytes))))
        for first in range(0, num_layers, at_once):
            moved = _Moved(range(first, min(first + at_once, num_layers)))
            self._moved.append(moved)  # first: what has begun is waited for even if the rest raises
            for piece in pieces:
                move = self._move_out if piece.source is Tier.GPU else self._move_in
                move(piece, moved)

    @property
    def has_swaps(self) -> bool:
        """Whether :meth:`await_swaps` was not yet called for all layers of the last swaps."""
        return bool(self._moved)

    def await_swaps(self, layer: int | None = None) -> None:
        """Later work on the device finds what swaps put into the layers up to this one (None: into all), and may
        overwrite what they took out. The host waits until what it gathers for them is on its way."""
        last = None if layer is None else self._pools.groups.place_of[layer]
        while self._moved and (last is None or self._moved[0].layers.start <= last):
            moved = self._moved.popleft()
            for ticket in moved.tickets:
                ticket.wait()
            for event in moved.events:
                self._device.compute.wait(event)

    def forget_swaps(self) -> None:
        """The same for swaps that may have failed."""
        while self._moved:
            with contextlib.suppress(Exception):
                self.await_swaps()
        self._device.compute.wait(self._device.swap.mark())

    def store_rows(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Write K and V of a layer, ``kv [rows, 2 num_kv_heads, head_dim]`` of the device, to slots of the CPU tier."""
        stream = self._device.to_host
        self._stored.wait()
        kv = self._device.snapshot(kv)
        stream.wait(self._device.compute.mark())
        fetched = stream.fetch(kv)
        self._stored.launched()
        self.cpu_tier.write(RowsWrite(self._pools.groups.place_of[layer], fetched, blocks, offsets), stream.mark())

    def load_first_layer(self, lane: LaneBatch) -> None:
        """Begin to gather what :meth:`take_context` gives in the first layer."""
        for group in lane.prefills:
            for chunk in group.chunks if group.tier is Tier.CPU else ():
                self._load_ahead(0, chunk)

    def take_context(self, layer: int, chunk: PrefillChunk, own: torch.Tensor) -> torch.Tensor | None:
        """The chunk's context on the device: the earlier one in the CPU tier, and its ``own [2, num_kv_heads, rows,
        head_dim]``. None without an earlier one.

        While the device computes this layer, the host gathers the next. A layer that does not follow the one before
        waits for the host.
        """
        if chunk.earlier_layer != layer:
            self._load_ahead(layer, chunk)
        context = None if chunk.earlier is None else torch.cat([chunk.earlier.on_device(), own], dim=2)
        if layer + 1 < len(self._pools.layers[Tier.GPU]):
            self._load_ahead(layer + 1, chunk)
        return context

    def _load_ahead(self, layer: int, chunk: PrefillChunk) -> None:
        chunk.earlier, chunk.earlier_layer = self._load_earlier(layer, chunk), layer

    def _load_earlier(self, layer: int, chunk: PrefillChunk) -> LoadedContext | None:
        groups = self._pools.groups
        context = chunk.contexts[groups.group_of[layer]]
        return context and self.load_context(groups.place_of[layer], context.blocks, context.num_tokens)

    def load_context(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> LoadedContext:
        """Begin to gather K and V of the first tokens in these blocks of the CPU tier, in a layer of its pool. This
        thread copies nothing."""
        pool = self._pools.tensors[Tier.GPU]
        pinned = self._device.pinned((2, pool.shape[2], num_tokens, pool.shape[-1]), pool.dtype)
        return LoadedContext(pinned, self.cpu_tier.read(ContextRead(layer, blocks, pinned)), self._device.compute)

    def _move_out(self, blocks: _Blocks, moved: _Moved) -> None:
        """Once the last event has passed, the source blocks may be overwritten."""
        stream, pool = self._device.swap, self._layers(moved.layers)
        with stream.running():
            staged = torch.empty(self._shape(pool, blocks), dtype=self._staged.dtype, device=pool.device)
            gather = self._ops.gather_blocks if self._staged.is_exact else self._ops.quantise_blocks
            gather(pool, blocks.sources, staged)
        moved.events.append(stream.mark())
        fetched = stream.fetch(staged)
        self.cpu_tier.write(BlocksWrite(moved.layers, fetched, blocks.targets), stream.mark())

    def _move_in(self, blocks: _Blocks, moved: _Moved) -> None:
        """Once the ticket is ready, the last event passes when the blocks have arrived."""
        stream, pool = self._device.swap, self._layers(moved.layers)
        staged = self._device.pinned(self._shape(pool, blocks), self._staged.dtype)
        scatter = self._ops.scatter_blocks if self._staged.is_exact else self._ops.dequantise_blocks

        def send() -> None:
            with stream.running():
                scatter(stream.send(staged), pool, blocks.targets)
            moved.events.append(stream.mark())

        moved.tickets.append(self.cpu_tier.read(BlocksRead(moved.layers, blocks.sources, staged), send))

    def _pieces(self, swaps: Sequence[Swap], size: int) -> Iterator[_Blocks]:
        """The swaps in order, at most ``size`` blocks at once."""
        for source, run in groupby(swaps, key=lambda swap: swap.source):
            # Of a target that is filled twice only the last source counts: copies of one piece have no order.
            sources_of = dict(pair for swap in run for pair in zip(swap.target_blocks, swap.source_blocks, strict=True))
            pairs = list(sources_of.items())
            for first in range(0, len(pairs), size):
                targets, sources = torch.tensor(pairs[first : first + size]).T.contiguous()
                if source is Tier.GPU:
                    sources = self._device.swap.send(sources)
                else:
                    targets = self._device.swap.send(targets)
                yield _Blocks(source, sources, targets)

    def _layers(self, layers: range) -> torch.Tensor:
        return self._pools.tensors[Tier.GPU][layers.start : layers.stop]

    def _shape(self, pool: torch.Tensor, blocks: _Blocks) -> tuple[int, ...]:
        """Of what crosses, for some layers of the GPU tier."""
        num_layers, _, num_kv_heads, _, *head = pool.shape
        return (num_layers, len(blocks.sources), num_kv_heads, *self._staged.head_shape(*head))
