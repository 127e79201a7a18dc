"""Transfers of KV cache between the tiers, beside the work of both: swapped blocks, and K and V of prefills for the
CPU tier, layer by layer. Copies of states of linear attention to host memory and back.

The CPU tier's memory is not pinned. What comes from a GPU arrives in pinned memory, from where the tier takes it: so
it is in order with the attention that reads it. What goes to a GPU is gathered into pinned memory by the tier's
threads. Where the tier is int8, blocks cross in its format: the GPU makes codes before they leave, and elements when
they come back. Rows of prompts cross as elements, and the tier makes codes of them.

Swaps go layer by layer too. Beside a GPU only the first part begins at once, and each other one when the GPU batch is
at the layer before, so that launches of copies do not hold up those of the GPU batch. The GPU batch's layer waits for
its own part alone: see :meth:`KVTransfers.begin_swaps` and :meth:`KVTransfers.await_swaps`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch

from swiftllm.core.plan import StateCopy, Swap
from swiftllm.core.request import Tier
from swiftllm.device import Device, Event, Stream
from swiftllm.engine.backend import AttentionFuture
from swiftllm.kv.tensors import KVPools
from swiftllm.model.llama import LinearStates
from swiftllm.ops.interface import Ops
from swiftllm.runtime.cpu_tier import BlocksRead, BlocksWrite, ContextRead, CpuTier, RowsWrite
from swiftllm.runtime.model_input import ContextLoad, GpuBatchTensors, PrefillGroup

# -- pacing the host ---------------------------------------------------------------------------------------------------
# How far the host may launch work ahead of the device.

STAGES_AHEAD = 1


class Pacer:
    """Keeps the host's launches at most ``ahead`` stages beyond the one the device works on.

    Launching takes a tenth of the time of the work. A host far ahead would poll for CPU results long before the device
    can use them, and find none ready.
    """

    def __init__(self, stream: Stream, ahead: int = STAGES_AHEAD) -> None:
        self._stream = stream
        self._ahead = ahead
        self._marks: deque[Event] = deque()

    def launched(self) -> None:
        """Note that a stage has been launched."""
        self._marks.append(self._stream.mark())

    def wait(self) -> None:
        """Sleep until the device is close enough."""
        while len(self._marks) > self._ahead:
            self._marks.popleft().synchronize()


# -- transfers ---------------------------------------------------------------------------------------------------------

CHUNK_BYTES = 4 << 20  # of one transfer of blocks
SNAPSHOTS = 2  # most copies of a layer's K and V that wait on the device for their way to the host


@dataclass(frozen=True)
class _Blocks:
    """Blocks that move in the same direction, for one transfer a layer; those of the GPU tier are on the device."""

    source: Tier
    sources: torch.Tensor  # int64 [blocks]
    targets: torch.Tensor


@dataclass
class _Moved:
    """A part of the swaps: some layers of all blocks. ``pieces`` have not begun to move; ``futures`` are of what the
    host gathers."""

    layers: range
    pieces: Sequence[_Blocks]
    futures: list[AttentionFuture] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class KVTransfers:
    """Moves K and V between the GPU tier and ``cpu_tier``, which may be replaced while nothing is under way."""

    def __init__(self, device: Device, pools: KVPools, ops: Ops, cpu_tier: CpuTier) -> None:
        self.cpu_tier = cpu_tier
        self._device = device
        self._pools = pools
        self._ops = ops
        # A snapshot of rows lives on the device until it is on its way, and a prompt makes one in each layer.
        self._stored = Pacer(device.to_host, ahead=SNAPSHOTS - 1)
        self._staged = pools.formats[Tier.GPU if device.torch_device.type == "cpu" else Tier.CPU]  # crosses in swaps
        self._contexts = device.new_stream()  # of its own: results of CPU attention must not wait for it
        self._taken = Pacer(self._contexts)
        self._moved: deque[_Moved] = deque()  # what no work on the device waits for yet, by layer

    def swap_blocks(self, swaps: Sequence[Swap]) -> None:
        """Begin to copy blocks between the tiers, as if in the order given: a later swap may fill blocks that an
        earlier one emptied, and takes none that an earlier one filled.

        What is done to a layer of the CPU tier after :meth:`begin_swaps` finds the copies, and may overwrite the
        sources. So may work on the device after :meth:`await_swaps`.
        """
        if not swaps:
            return
        self.await_swaps()
        # Earlier writes of sources and reads of targets are done. Later ones begin or await swaps of their layer first.
        self._device.swap.wait(self._device.compute.mark())
        num_layers, num_blocks = len(self._pools.tensors[Tier.GPU]), sum(len(swap.source_blocks) for swap in swaps)
        layer_bytes = self._pools.plan.bytes_per_block[Tier.GPU] // num_layers
        # A transfer has several layers of few blocks, or one layer of many: about as many bytes either way, since each
        # costs the host a launch, and a layer's attention waits for all of its transfer.
        at_once = max(1, CHUNK_BYTES // max(1, num_blocks * layer_bytes))  # layers
        pieces = list(self._pieces(swaps, max(1, CHUNK_BYTES // (at_once * layer_bytes))))
        layers = [range(first, min(first + at_once, num_layers)) for first in range(0, num_layers, at_once)]
        self._moved.extend(_Moved(some, pieces) for some in layers)
        # On a host copies are made by this thread, so they gain nothing by waiting. Of a tier that may die it must be
        # known before the GPU batch begins what has moved: a death in the layers would leave swaps half done.
        begins_at_once = self._device.torch_device.type == "cpu" or self.cpu_tier.may_die
        for moved in list(self._moved)[: None if begins_at_once else 1]:
            self._begin(moved)

    @property
    def has_swaps(self) -> bool:
        """Whether :meth:`await_swaps` was not yet called for all layers of the last swaps."""
        return bool(self._moved)

    def begin_swaps(self, layer: int) -> None:
        """Begin the part of the last swaps that this layer belongs to: what is done to the layer in the CPU tier later
        finds the copies. Waits for nothing but pinned memory."""
        place = self._pools.groups.place_of[layer]
        for moved in self._moved:  # of which ``pieces`` are empty once it has begun
            if place in moved.layers:
                self._begin(moved)

    def _begin(self, moved: _Moved) -> None:
        """Launch what has not begun of a part. If that raises, the parts that have not begun are given up."""
        pieces, moved.pieces = moved.pieces, ()
        try:
            # In the plan's order: a block leaves before another one takes its place.
            for piece in pieces:
                move = self._move_out if piece.source is Tier.GPU else self._move_in
                move(piece, moved)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        for moved in self._moved:
            moved.pieces = ()

    def await_swaps(self, layer: int | None = None) -> None:
        """Later work on the device finds what swaps put into the layers up to this one (None: into all), and may
        overwrite what they took out. The host waits until what it gathers for them is on its way."""
        last = None if layer is None else self._pools.groups.place_of[layer]
        while self._moved and (last is None or self._moved[0].layers.start <= last):
            self._begin(self._moved[0])  # still among them: what has begun is waited for even if the rest raises
            moved = self._moved.popleft()
            # The host first: a transfer to the device is launched, and its event made, when its blocks are gathered.
            for future in moved.futures:
                future.wait()
            for event in moved.events:
                self._device.compute.wait(event)

    def forget_swaps(self) -> None:
        """The same for swaps that may have failed, of what has begun of them."""
        self._give_up()
        while self._moved:
            with contextlib.suppress(Exception):
                self.await_swaps()
        self._device.compute.wait(self._device.swap.mark())

    def store_rows(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> None:
        """Write K and V of a layer, ``kv [rows, 2 num_kv_heads, head_dim]`` of the device, to slots of the CPU tier."""
        stream = self._device.to_host
        self._stored.wait()
        kv = self._device.snapshot(kv)  # the next stage overwrites the GPU batch's own while this is on its way
        stream.wait(self._device.compute.mark())
        fetched = stream.fetch(kv)
        self._stored.launched()
        self.cpu_tier.write(RowsWrite(self._pools.groups.place_of[layer], fetched, blocks, offsets), stream.mark())

    def load_first(self, gpu_batch: GpuBatchTensors) -> None:
        """Begin to bring what :meth:`take_contexts` gives first."""
        for group in gpu_batch.prefills:
            if group.tier is Tier.CPU:
                self._load_from(0, 0, group)

    def load_after(self, layer: int, call: int, group: PrefillGroup) -> None:
        """Begin to bring what :meth:`take_contexts` gives after this call, whose own have been dropped. One call ahead
        is enough: the host gathers and copies it while the device computes, and memory holds those of two calls."""
        self._taken.launched()  # :meth:`_load` waits for it, so that no third context is in memory
        self._load_from(layer, call + 1, group)

    def take_contexts(self, layer: int, call: int, group: PrefillGroup) -> list[torch.Tensor]:
        """K and V ``[2, num_kv_heads, tokens, head_dim]`` of the earlier tokens of each chunk of the group's call, for
        later work on the device. Waits for the tier."""
        load = group.load
        if load is None or (load.layer, load.call) != (layer, call):  # another layer than the next, as in measurements
            load = self._load(layer, call, group)
        group.load = None
        for future in load.futures:
            future.wait()
        for event in load.events:
            self._device.compute.wait(event)
        return load.parts

    def _load_from(self, layer: int, call: int, group: PrefillGroup) -> None:
        """Load the first call with contexts from this one on."""
        group_of = self._pools.groups.group_of
        for later in range(layer, len(group_of)):
            calls = group.calls[group_of[later]]
            for number in range(call if later == layer else 0, len(calls)):
                if calls[number].contexts is not None:
                    group.load = self._load(later, number, group)
                    return

    def _load(self, layer: int, call: int, group: PrefillGroup) -> ContextLoad:
        self.begin_swaps(layer)  # they may bring the blocks that are read here
        groups, pool = self._pools.groups, self._pools.tensors[Tier.GPU]
        contexts, place = group.calls[groups.group_of[layer]][call].contexts, groups.place_of[layer]
        assert contexts is not None
        heads, head_dim = pool.shape[2], pool.shape[-1]
        self._taken.wait()  # else a host far ahead would fill the device with contexts
        pinned = self._device.pinned((sum(contexts.tokens) * 2 * heads * head_dim,), pool.dtype)
        on_device = self._device.mirror(pinned)
        self._contexts.wait(self._device.compute.mark())  # earlier work may still use that memory
        sizes = [tokens * 2 * heads * head_dim for tokens in contexts.tokens]
        shapes = [(2, heads, tokens, head_dim) for tokens in contexts.tokens]
        hosts, parts = (
            [part.view(shape) for part, shape in zip(whole.split(sizes), shapes, strict=True)]
            for whole in (pinned, on_device)
        )
        load = ContextLoad(layer, call, parts)
        for host, part, (blocks, _) in zip(hosts, parts, contexts.slices(groups.block_size), strict=True):
            read = ContextRead(place, contexts.blocks[blocks], host)
            load.futures.append(self.cpu_tier.read(read, partial(self._send, load, part, host)))
        return load

    def _send(self, load: ContextLoad, part: torch.Tensor, host: torch.Tensor) -> None:
        self._contexts.copy(part, host)
        load.events.append(self._contexts.mark())

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
        """Once the attention task is ready, the last event passes when the blocks have arrived."""
        stream, pool = self._device.swap, self._layers(moved.layers)
        staged = self._device.pinned(self._shape(pool, blocks), self._staged.dtype)
        scatter = self._ops.scatter_blocks if self._staged.is_exact else self._ops.dequantise_blocks

        def send() -> None:
            with stream.running():
                scatter(stream.send(staged), pool, blocks.targets)
            moved.events.append(stream.mark())

        moved.futures.append(self.cpu_tier.read(BlocksRead(moved.layers, blocks.sources, staged), send))

    def _pieces(self, swaps: Sequence[Swap], size: int) -> Iterator[_Blocks]:
        """The swaps in order, at most ``size`` blocks at once."""
        for source, run in groupby(swaps, key=lambda swap: swap.source):
            # Of a target that is filled twice only the last source counts: copies of one piece have no order.
            sources_of = dict(pair for swap in run for pair in zip(swap.target_blocks, swap.source_blocks, strict=True))
            if not sources_of:
                continue
            targets, sources = torch.tensor(list(sources_of.items())).T.contiguous()
            if source is Tier.GPU:
                sources = self._device.swap.send(sources)
            else:
                targets = self._device.swap.send(targets)
            for piece in zip(sources.split(size), targets.split(size), strict=True):
                yield _Blocks(source, *piece)

    def _layers(self, layers: range) -> torch.Tensor:
        return self._pools.tensors[Tier.GPU][layers.start : layers.stop]

    def _shape(self, pool: torch.Tensor, blocks: _Blocks) -> tuple[int, ...]:
        """Of what crosses, for some layers of the GPU tier."""
        num_layers, _, num_kv_heads, _, *head = pool.shape
        return (num_layers, len(blocks.sources), num_kv_heads, *self._staged.head_shape(*head))


# -- states of linear attention ----------------------------------------------------------------------------------------


class StateTransfers:
    """Copies states between the device and snapshots in host memory, layer by layer: the device's work waits for the
    layers it comes to."""

    def __init__(self, device: Device, states: LinearStates, layers_before: int, num_snapshots: int) -> None:
        """``layers_before``: layers of linear attention in a stage."""
        self._device, self._stream = device, device.new_stream()
        self._layers_before = layers_before
        # Of a snapshot all layers lie side by side.
        self.pools = [
            (pool, device.mapped((num_snapshots, len(pool), *pool.shape[2:]), pool.dtype))
            for pool in (states.recurrent, states.conv)
        ]
        self._copied: deque[Event] = deque()  # one for each stage that the device's work has not come to
        self._next_stage = -1

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Begin to make these copies, in order. Work on the device may change states after :meth:`await_copies`."""
        self.await_copies()
        self._stream.wait(self._device.compute.mark())  # earlier work writes the states, or reads the slots
        num_layers = len(self.pools[0][0])
        for layer in range(num_layers):
            for copy in copies:
                for states, snapshots in self.pools:
                    state, snapshot = states[layer, copy.slot], snapshots[copy.snapshot, layer]
                    source, target = (state, snapshot) if copy.saves else (snapshot, state)
                    self._stream.copy(target, source)
            if (layer + 1) % self._layers_before == 0:
                self._copied.append(self._stream.mark())
        self._next_stage = -1

    def await_copies(self, stage: int | None = None) -> None:
        """Later work on the device finds the states of the stages up to this one copied; None: of all."""
        while self._copied and (stage is None or self._next_stage <= stage):
            self._device.compute.wait(self._copied.popleft())
            self._next_stage += 1

    def forget_copies(self) -> None:
        """The same for copies that may have failed."""
        self._copied.clear()
        self._device.compute.wait(self._stream.mark())
