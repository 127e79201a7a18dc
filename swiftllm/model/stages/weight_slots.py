"""Weights that cross to the device in each iteration: two slots there, filled in the order of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from swiftllm.device.device import Device, Event
from swiftllm.model.stages.placement import SLOTS

CHUNK_BYTES = 8 << 20
"""Of one copy: other copies of the link wait for one chunk, not for a whole stage.

A power of two, since torch rounds pinned memory up to one.
"""


class WeightSlots:
    """The streamed stages of a model. Each has one fixed slot, so that captured graphs find its weights.

    An iteration enters the stages in ascending order. Once the next one is entered, whichever that is, the slot of
    the one before takes the next but one of the streamed stages. Who enters a stage out of order waits for a
    copy of its own; all others of an iteration cause one copy of each stage together.

    Attributes:
        bytes_sent: to the device so far, those of the first :data:`SLOTS` stages at the start included.
    """

    def __init__(self, device: Device, chunks: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """``chunks``: of each streamed stage its weights, uint8 ``[bytes]`` each, in :meth:`Device.pinned` memory.

        Raises:
            ValueError: there is no stage.
        """
        if not chunks:
            raise ValueError("streamed weights need at least one stage")
        self._device, self._copies, self._chunks = device, device.new_stream(), dict(chunks)
        self._order = sorted(chunks)
        self._sizes = {stage: sum(map(len, of_one)) for stage, of_one in chunks.items()}
        size = max(self._sizes.values())
        # Not Device.mirror: on a host that is the buffer itself, and the twin must copy as a GPU does.
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device.torch_device) for _ in self._order[:SLOTS]]
        self._held: list[int] = [0] * len(self._slots)
        self._arrived: list[Event] = []
        self._current: int | None = None
        self._left: Event | None = None  # by the readers of the current stage
        self.bytes_sent = 0
        for index in range(len(self._slots)):
            self._arrived.append(self._send(index))

    def slot_of(self, stage: int) -> torch.Tensor:
        """Where the weights of a stage are on the device while it is entered, uint8 ``[bytes]``."""
        return self._slots[self._order.index(stage) % SLOTS][: self._sizes[stage]]

    def enter(self, stage: int) -> None:
        """Work launched on the compute stream from now on finds this stage's weights, if it is streamed.

        Call it outside of captures, before each crossing.
        """
        if stage == self._current:
            self._left = None  # more readers come
            return
        if self._current is not None:
            self._leave(self._order.index(self._current))
        self._current = self._left = None
        if stage not in self._chunks:
            return
        index = self._order.index(stage)
        if stage not in self._held:
            self._restart(index)
        self._device.compute.wait(self._arrived[index % SLOTS])
        self._current = stage

    def launched(self) -> None:
        """All readers so far are launched: the slot is free after them. Unless told, it is free after all that is
        launched before the next stage is entered, which may be a layer's attention too."""
        if self._current is not None:
            self._left = self._device.compute.mark()

    def holds(self, stage: int) -> bool:
        """Whether a stage can be entered without a copy now: it is not streamed, or was entered last."""
        return stage not in self._chunks or stage == self._current

    def _leave(self, index: int) -> None:
        """All readers of this iteration are launched: the slot is filled anew once they are done."""
        after = index + SLOTS
        self._fill(after if after < len(self._order) else index % SLOTS)

    def _restart(self, index: int) -> None:
        """Send a stage that is not the next one, and the one that follows it, if that has the other slot."""
        self._fill(index)
        follower = (index + 1) % len(self._order)
        if follower % SLOTS != index % SLOTS and self._order[follower] not in self._held:
            self._fill(follower)

    def _fill(self, index: int) -> None:
        self._arrived[index % SLOTS] = self._send(index)

    def _send(self, index: int) -> Event:
        """Start the copy of the ``index``-th streamed stage into its slot."""
        slot, stage, start = index % SLOTS, self._order[index], 0
        # The slot's last readers, or its memory's last owner.
        self._copies.wait(self._left or self._device.compute.mark())
        for chunk in self._chunks[stage]:
            self._copies.copy(self._slots[slot][start : start + len(chunk)], chunk)
            start += len(chunk)
        self._held[slot] = stage
        self.bytes_sent += start
        return self._copies.mark()
