"""Memory of weights: a tensor in one piece, or pinned chunks of the host from which it is sent to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

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
