"""Memory of weights on host and device, and the copies between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from swiftllm.device import Device, Event
from swiftllm.model.placement import SLOTS

# -- tensors in one piece or in pinned chunks --------------------------------------------------------------------------
# Memory of weights: a tensor in one piece, or pinned chunks of the host from which it is sent to the device.

Parts = TypeVar("Parts")
Allocate = Callable[..., "torch.Tensor | PackedTensor"]
"""Memory of a tensor, called as ``torch.empty(shape, dtype=dtype)`` is."""
ALIGNMENT = 256  # bytes, of each tensor in a buffer: as torch's own


class PackedTensor:
    """A tensor ``[rows, ...]`` in chunks, of which a buffer on the device is the concatenation.

    It is written row by row or column by column, so that no second copy of it is ever in memory.
    """

    device = torch.device("cpu")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, chunks: Sequence[torch.Tensor], start: int = 0
    ) -> None:
        """``start``: byte of the first row. All ``chunks`` but the last, uint8 ``[bytes]``, are equally long."""
        self.shape, self.dtype, self.chunks = torch.Size(shape), dtype, chunks
        self._start = start

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def write(self, first: int, rows: torch.Tensor) -> None:
        """Put ``rows`` at row ``first``, converted to the dtype."""
        data = rows.to("cpu", self.dtype).contiguous().view(-1).view(torch.uint8)
        self._write_bytes(self._start + first * self._row_bytes, data)

    def write_columns(self, first: int, columns: torch.Tensor) -> None:
        """Put ``columns [rows, n]`` at column ``first``, converted to the dtype."""
        columns = columns.to("cpu", self.dtype).contiguous()
        data = columns.view(torch.uint8)  # [rows, bytes]
        start, chunk_bytes = self._start + first * self.dtype.itemsize, len(self.chunks[0])
        row, width = 0, data.shape[1]
        while row < len(data):
            number, position = divmod(start + row * self._row_bytes, chunk_bytes)
            chunk = self.chunks[number]
            whole = max(0, (len(chunk) - position - width) // self._row_bytes + 1)  # rows that end in this chunk
            if whole:
                whole = min(whole, len(data) - row)
                chunk.as_strided((whole, width), (self._row_bytes, 1), chunk.storage_offset() + position).copy_(
                    data[row : row + whole]
                )
                row += whole
            else:
                room = len(chunk) - position
                chunk[position:].copy_(data[row, :room])
                self._write_bytes((number + 1) * chunk_bytes, data[row, room:])
                row += 1

    def split(self, sizes: Sequence[int]) -> list[PackedTensor]:
        """Views of so many rows each, one after the other."""
        views, start = [], self._start
        for size in sizes:
            views.append(PackedTensor((size, *self.shape[1:]), self.dtype, self.chunks, start))
            start += size * self._row_bytes
        return views

    def _write_bytes(self, position: int, data: torch.Tensor) -> None:
        chunk_bytes = len(self.chunks[0])
        while len(data):
            number, start = divmod(position, chunk_bytes)
            room = self.chunks[number][start : start + len(data)]
            room.copy_(data[: len(room)])
            data, position = data[len(room) :], position + len(room)

    @property
    def _row_bytes(self) -> int:
        return self.shape[1:].numel() * self.dtype.itemsize


def in_chunks(make_chunk: Callable[[int], torch.Tensor], chunk_bytes: int) -> Allocate:
    """Memory in chunks of at most ``chunk_bytes``, to be sent, filled with zeros. ``make_chunk``: from a number of
    bytes to memory for them, uint8 ``[bytes]``."""

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> PackedTensor:
        size = _aligned(torch.Size(shape).numel() * dtype.itemsize)
        starts = range(0, size, chunk_bytes)
        chunks = [make_chunk(min(chunk_bytes, size - start)).zero_() for start in starts]
        return PackedTensor(shape, dtype, chunks)

    return allocate


def write_rows(target: torch.Tensor | PackedTensor, first: int, rows: torch.Tensor) -> None:
    """Put ``rows`` at row ``first``, converted to the dtype."""
    if isinstance(target, PackedTensor):
        target.write(first, rows)
    else:
        target[first : first + len(rows)].copy_(rows)


def write_columns(target: torch.Tensor | PackedTensor, first: int, columns: torch.Tensor) -> None:
    """Put ``columns [rows, n]`` at column ``first``, converted to the dtype."""
    if isinstance(target, PackedTensor):
        target.write_columns(first, columns)
    else:
        target[:, first : first + columns.shape[1]].copy_(columns)


def map_tensors(parts: Any, change: Callable[[Any], object]) -> Any:
    """The same structure with what ``change`` makes of its tensors, packed or not, in the order of the fields."""
    if isinstance(parts, torch.Tensor | PackedTensor):
        return change(parts)
    if isinstance(parts, tuple):
        return tuple(map_tensors(part, change) for part in parts)
    if isinstance(parts, dict):
        return {name: map_tensors(part, change) for name, part in parts.items()}
    if is_dataclass(parts) and not isinstance(parts, type):
        return replace(parts, **{f.name: map_tensors(getattr(parts, f.name), change) for f in fields(parts)})
    return parts


def packed_bytes(parts: Any) -> int:
    """Bytes of a buffer that holds the tensors."""
    sizes: list[int] = []
    map_tensors(parts, lambda tensor: sizes.append(_aligned(tensor.nbytes)))
    return sum(sizes)


def chunks_of(parts: Any) -> list[torch.Tensor]:
    """The memory of packed tensors, in the order in which :func:`lay_out` expects them in one piece."""
    chunks: list[torch.Tensor] = []
    map_tensors(parts, lambda packed: chunks.extend(packed.chunks))
    return chunks


def lay_out(parts: Parts, memory: torch.Tensor) -> Parts:
    """Tensors of the same shapes in ``memory``, uint8 ``[bytes]``, one behind the other."""
    offset = 0

    def place(tensor: torch.Tensor | PackedTensor) -> torch.Tensor:
        nonlocal offset
        piece = memory[offset : offset + tensor.nbytes]
        offset += _aligned(tensor.nbytes)
        return piece.view(tensor.dtype).view(tensor.shape)

    return map_tensors(parts, place)


def _aligned(num_bytes: int) -> int:
    """Bytes that a tensor takes in a buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# -- slots for weights that are streamed -------------------------------------------------------------------------------
# Weights that cross to the device in each iteration: slots there, filled in the order of the stages.

CHUNK_BYTES = 8 << 20
"""Of one copy: other copies of the link wait for one chunk, not for a whole stage.

A power of two, since torch rounds pinned memory up to one.
"""


class WeightSlots:
    """The streamed stages of a model: those whose weights are copied to the device in each iteration.

    Each has one fixed slot, so that captured graphs find its weights.

    An iteration enters the stages in ascending order. Once the next one is entered, whichever that is, the slot of the
    one before takes the streamed stage that is ``num_slots`` further: of two slots the next but one, of one slot the
    next. Who enters a stage out of order waits for a copy of its own; all others of an iteration cause one copy of each
    stage together.

    Attributes:
        bytes_sent: to the device so far, those of the first stages at the start included.
    """

    def __init__(self, device: Device, chunks: Mapping[int, Sequence[torch.Tensor]], num_slots: int = SLOTS) -> None:
        """``chunks``: of each streamed stage its weights, uint8 ``[bytes]`` each, in :meth:`Device.pinned` or
        :meth:`Device.mapped` memory. With one slot a stage's copy begins after the readers of the stage before."""
        if not chunks:
            raise ValueError("streamed weights need at least one stage")
        self._device, self._copies, self._chunks = device, device.new_stream(), dict(chunks)
        self._order = sorted(chunks)
        self._sizes = {stage: sum(map(len, of_one)) for stage, of_one in chunks.items()}
        size = max(self._sizes.values())
        # Not Device.mirror: on a host that is the buffer itself, and the twin must copy as a GPU does.
        slots = self._order[:num_slots]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for _ in slots]
        self._num_slots = num_slots
        self._held: list[int] = [0] * len(self._slots)
        self._arrived: list[Event] = []
        self._current: int | None = None
        self._left: Event | None = None  # by the readers of the current stage
        self.bytes_sent = 0
        for index in range(len(self._slots)):
            self._arrived.append(self._send(index))

    def slot_of(self, stage: int) -> torch.Tensor:
        """Where the weights of a stage are on the device while it is entered, uint8 ``[bytes]``."""
        return self._slots[self._order.index(stage) % self._num_slots][: self._sizes[stage]]

    def enter(self, stage: int) -> None:
        """Work launched on the compute stream from now on finds this stage's weights, if it is streamed.

        Call it outside of captures, before each crossing.
        """
        if stage == self._current:
            self._left = None  # more readers come
            return
        self.leave()
        if stage not in self._chunks:
            return
        index = self._order.index(stage)
        if stage not in self._held:
            self._restart(index)
        self._device.compute.wait(self._arrived[index % self._num_slots])
        self._current = stage

    def launched(self) -> None:
        """All readers so far are launched: the slot is free after them. Unless told, it is free after all that is
        launched before the next stage is entered, which may be a layer's attention too."""
        if self._current is not None:
            self._left = self._device.compute.mark()

    def holds(self, stage: int) -> bool:
        """Whether a stage can be entered without a copy now: it is not streamed, or was entered last."""
        return stage not in self._chunks or stage == self._current

    def leave(self) -> None:
        """All readers of this iteration are launched: the slot of the stage entered last, if it is streamed, is filled
        anew once they are done."""
        if self._current is not None:
            index = self._order.index(self._current)
            after = index + self._num_slots
            self._fill(after if after < len(self._order) else index % self._num_slots)
        self._current = self._left = None

    def _restart(self, index: int) -> None:
        """Send a stage that is not the next one, and the one that follows it, if that has the other slot."""
        self._fill(index)
        follower = (index + 1) % len(self._order)
        if follower % self._num_slots != index % self._num_slots and self._order[follower] not in self._held:
            self._fill(follower)

    def _fill(self, index: int) -> None:
        self._arrived[index % self._num_slots] = self._send(index)

    def _send(self, index: int) -> Event:
        """Start the copy of the ``index``-th streamed stage into its slot."""
        slot, stage, start = index % self._num_slots, self._order[index], 0
        # The slot's last readers, or its memory's last owner.
        self._copies.wait(self._left or self._device.compute.mark())
        for chunk in self._chunks[stage]:
            self._copies.copy(self._slots[slot][start : start + len(chunk)], chunk)
            start += len(chunk)
        self._held[slot] = stage
        self.bytes_sent += start
        return self._copies.mark()
