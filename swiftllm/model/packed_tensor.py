"""Weights in host memory: in one piece for the CPU, or in pinned chunks from which they are sent to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Protocol, TypeVar

import torch

Parts = TypeVar("Parts")
MakeChunk = Callable[[int], torch.Tensor]
"""From a number of bytes to memory for them, uint8 ``[bytes]``."""
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

    def read(self) -> torch.Tensor:
        """A copy in one piece."""
        data = torch.cat(list(self.chunks))[self._start : self._start + self.nbytes].clone()
        return data.view(self.dtype).view(self.shape)

    def split(self, sizes: Sequence[int]) -> list[PackedTensor]:
        """Views of so many rows each, one after the other."""
        views, start = [], self._start
        for size in sizes:
            views.append(PackedTensor((size, *self.shape[1:]), self.dtype, self.chunks, start))
            start += size * self._row_bytes
        return views

    def layout(self) -> torch.Tensor:
        """A tensor without memory, of the same shape."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

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


class HostPlace(Protocol):
    """Where in host memory the matrices of a boundary are."""

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | PackedTensor:
        """Memory of a matrix that is read row by row."""

    def keep(self, matrix: Parts) -> Parts:
        """A matrix that was read whole, as it is kept; ``matrix`` may be freed then."""


class InOnePiece:
    """As torch allocates it: for the CPU."""

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def keep(self, matrix: Parts) -> Parts:
        return matrix


class InChunks:
    """In chunks of at most ``chunk_bytes``: to be sent."""

    def __init__(self, make_chunk: MakeChunk, chunk_bytes: int) -> None:
        self._make_chunk, self._chunk_bytes = make_chunk, chunk_bytes

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> PackedTensor:
        size = aligned(torch.Size(shape).numel() * dtype.itemsize)
        starts = range(0, size, self._chunk_bytes)
        chunks = [self._make_chunk(min(self._chunk_bytes, size - start)).zero_() for start in starts]
        return PackedTensor(shape, dtype, chunks)

    def keep(self, matrix: Parts) -> Parts:
        return map_tensors(matrix, self._pack)

    def _pack(self, tensor: torch.Tensor | PackedTensor) -> PackedTensor:
        if isinstance(tensor, PackedTensor):
            return tensor
        packed = self.new(tensor.shape, tensor.dtype)
        packed.write(0, tensor)
        return packed


def map_tensors(parts: Parts, change: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """The same structure with other tensors; they are changed in the order of the fields."""
    if isinstance(parts, torch.Tensor | PackedTensor):
        return change(parts)
    if isinstance(parts, tuple):
        return tuple(map_tensors(part, change) for part in parts)
    if is_dataclass(parts):
        return replace(parts, **{f.name: map_tensors(getattr(parts, f.name), change) for f in fields(parts)})
    return parts


def aligned(num_bytes: int) -> int:
    """Bytes that a tensor takes in a buffer."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
