"""Weights that cross to the device in each iteration: two slots there, filled in the order of the boundaries."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from swiftllm.device.device import Device, Event

SLOTS = 2  # while one boundary is used, the next arrives
CHUNK_BYTES = 8 << 20  # other copies of the link wait for one chunk, not for a whole boundary


class WeightStream:
    """The streamed boundaries of a model. Each has one fixed slot, so that captured graphs find its weights.

    Boundaries are used in ascending order, again and again. :meth:`leave` sends the next boundary of the slot.

    Attributes:
        bytes_sent: to the device so far, those of the first :data:`SLOTS` boundaries at the start included.
    """

    def __init__(self, device: Device, buffers: Mapping[int, torch.Tensor], chunk_bytes: int = CHUNK_BYTES) -> None:
        """``buffers``: of each streamed boundary its weights, ``[elements]`` of one dtype, in :meth:`Device.pinned`
        memory. ``chunk_bytes``: of one copy.

        Raises:
            ValueError: there is no buffer, or their dtypes differ.
        """
        if len({buffer.dtype for buffer in buffers.values()}) != 1:
            raise ValueError("streamed weights need at least one boundary, and one dtype for all of them")
        self._device, self._copies, self._buffers = device, device.new_stream(), dict(buffers)
        self._order = sorted(buffers)
        first = self._buffers[self._order[0]]
        self._chunk = max(1, chunk_bytes // first.itemsize)
        size = max(len(buffer) for buffer in buffers.values())
        # Not Device.mirror: on a host that is the buffer itself, and the twin must copy as a GPU does.
        self._slots = [torch.empty(size, dtype=first.dtype, device=device.torch_device) for _ in self._order[:SLOTS]]
        self._held: list[int] = [0] * len(self._slots)
        self._arrived: list[Event] = []
        self.bytes_sent = 0
        for index in range(len(self._slots)):
            self._arrived.append(self._send(index))

    def need(self, boundary: int) -> torch.Tensor:
        """The weights of a boundary on the device, ``[elements]``, for work on the compute stream until :meth:`leave`.

        Call it outside of captures.

        Raises:
            RuntimeError: the slot holds another boundary: the caller is not where the lane is.
        """
        slot = self._slot_with(boundary)
        self._device.compute.wait(self._arrived[slot])
        return self._slots[slot][: len(self._buffers[boundary])]

    def leave(self, boundary: int) -> None:
        """All readers of this iteration are launched: the slot is filled anew once they are done.

        Raises:
            RuntimeError: see :meth:`need`.
        """
        slot = self._slot_with(boundary)
        index = self._order.index(boundary) + SLOTS
        self._arrived[slot] = self._send(index if index < len(self._order) else slot)

    def holds(self, boundary: int) -> bool:
        """Whether the boundary's weights are in its slot or on their way: reading them sends nothing."""
        return boundary in self._held

    def _slot_with(self, boundary: int) -> int:
        if boundary not in self._held:
            raise RuntimeError(f"the weights of boundary {boundary} are not in their slot: {self._held} are")
        return self._held.index(boundary)

    def _send(self, index: int) -> Event:
        """Start the copy of the ``index``-th streamed boundary into its slot."""
        slot, boundary = index % SLOTS, self._order[index]
        source = self._buffers[boundary]
        self._copies.wait(self._device.compute.mark())  # the slot's last readers, or its memory's last owner
        for start in range(0, len(source), self._chunk):
            piece = source[start : start + self._chunk]
            self._copies.copy(self._slots[slot][start : start + len(piece)], piece)
        self._held[slot] = boundary
        self.bytes_sent += source.nbytes
        return self._copies.mark()
