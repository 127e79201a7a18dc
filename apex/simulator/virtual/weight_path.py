"""The simulated path of weights that are not on the GPU: copies over PCIe in chunks, two slots, and CPU stages.

Copies share the link with attention outputs and swaps. These go first: they wait for one chunk at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from apex.perf.model import Curve
from apex.simulator.virtual.cpu_path import Link, SimulatedWorker
from swiftllm.model.stages.placement import SLOTS, Place, Placement

CHUNK_BYTES = 8e6
"""A copy is divided into pieces of this size, so that it delays other transfers by a third of a millisecond."""


@dataclass(frozen=True)
class SimulatedWeights:
    """A placement and what it takes to run it."""

    placement: Placement
    stage_bytes: tuple[float, ...]
    """Of each stage's weights, from stage -1 on."""
    cpu_linear: Curve
    """Seconds over rows in which the CPU computes a layer's weights; the first and last stage are parts of one."""
    hidden_bytes_per_row: int
    """What a row takes to the CPU, and back from it."""

    def cpu_s(self, layer: int, rows: int) -> float:
        """Seconds in which the CPU computes stage ``layer``."""
        whole = max(self.stage_bytes)
        return self.cpu_linear(rows) * self.stage_bytes[layer + 1] / whole


@dataclass(eq=False, slots=True)
class _Copy:
    """Weights of a stage on their way into a slot. ``done_s`` is None until its last chunk is booked."""

    layer: int
    earliest_s: float
    bytes_left: float
    done_s: float | None = None


class StreamingLink(Link):
    """One direction of PCIe whose idle time copies weights, a chunk at a time.

    ``slow_down(start_s, end_s)`` is told when chunks cross, since they take DRAM bandwidth from the CPU.
    """

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.copied_bytes = 0.0
        self.slow_down: Callable[[float, float], None] | None = None
        self._bytes_per_s = bytes_per_s
        self._copies: deque[_Copy] = deque()
        self._chunk_ends_s = 0.0  # of the last chunk that was begun
        self._told_s = 0.0  # until when slow_down knows of it

    def queue(self, copy: _Copy) -> None:
        self._copies.append(copy)

    def cancel(self) -> None:
        """Forget the copies that are under way; the chunk that crosses now still does."""
        self._copies.clear()

    def book_transfer(self, earliest_s: float, seconds: float) -> tuple[float, float]:
        self.advance(earliest_s)
        return super().book_transfer(earliest_s, seconds)

    def next_chunk_s(self) -> float:
        """When the next chunk begins if nothing else is booked before; there must be a copy under way."""
        return max(self._free_s, self._copies[0].earliest_s)

    def complete_s(self, copy: _Copy) -> float:
        """When the copy that is next is complete if nothing else is booked before."""
        return self.next_chunk_s() + copy.bytes_left / self._bytes_per_s

    def advance(self, time_s: float) -> None:
        """Begin all chunks that can begin before ``time_s``."""
        self._tell(min(time_s, self._chunk_ends_s))
        while self._copies:
            copy = self._copies[0]
            start_s = max(self._free_s, copy.earliest_s)
            if start_s >= time_s:
                break
            chunks = int((time_s - start_s) * self._bytes_per_s / CHUNK_BYTES) + 1
            size = min(copy.bytes_left, chunks * CHUNK_BYTES)
            seconds = size / self._bytes_per_s
            self._free_s = self._chunk_ends_s = start_s + seconds
            self.busy_s += seconds
            self.copied_bytes += size
            copy.bytes_left -= size
            self._told_s = start_s
            self._tell(min(time_s, self._chunk_ends_s))
            if copy.bytes_left <= 0.0:
                copy.done_s = self._chunk_ends_s
                self._copies.popleft()

    def _tell(self, until_s: float) -> None:
        if until_s > self._told_s and self.slow_down is not None:
            begin_s, self._told_s = self._told_s, until_s
            self.slow_down(begin_s, until_s)


class WeightStream:
    """Two slots on the GPU and the order in which streamed stages come to them, again each iteration.

    A slot is free once its stage was left: when the GPU batch enters another stage. CPU batches that run the same
    stage before find the weights there. Who enters a stage out of order waits for a copy of its own.
    """

    def __init__(self, weights: SimulatedWeights, link: StreamingLink, worker: SimulatedWorker) -> None:
        self.weights = weights
        self.link = link
        self._worker = worker
        link.slow_down = worker.slow_down
        layers = range(-1, weights.placement.num_layers)
        order = [layer for layer in layers if weights.placement.at(layer) is Place.STREAMED]
        self._after = dict(pairwise([*order, *order[:1]]))
        self._slots: deque[_Copy] = deque()
        self._current: int | None = None
        self._left_s = 0.0
        if order:
            self._fill_from(order[0], 0.0)

    def holds(self, layer: int) -> bool:
        """Whether stage ``layer`` needs no copy now: it is not streamed, or was entered last."""
        return layer not in self._after or layer == self._current

    def enter(self, layer: int, time_s: float) -> float:
        """When stage ``layer`` can begin if the GPU is there at ``time_s``."""
        if self._current is not None and layer != self._current:
            self._release()
        if layer not in self._after:
            return time_s
        if self._slots[0].layer != layer:
            self.link.cancel()
            self._slots.clear()
            self._fill_from(layer, time_s)
        self._current = layer
        return max(time_s, self._arrival_s(self._slots[0]))

    def leave(self, time_s: float) -> None:
        """The GPU has done its work of the stage that was entered last."""
        self._left_s = time_s

    def _release(self) -> None:
        """The slot of the current stage takes the next but one."""
        self._slots.popleft()
        self._current = None
        last = self._slots[-1].layer if self._slots else None
        if last is not None:
            self._copy(self._after[last], self._left_s)

    def _fill_from(self, layer: int, time_s: float) -> None:
        for _ in range(SLOTS):
            self._copy(layer, time_s)
            layer = self._after[layer]

    def _copy(self, layer: int, earliest_s: float) -> None:
        copy = _Copy(layer, earliest_s, self.weights.stage_bytes[layer + 1])
        self._slots.append(copy)
        self.link.queue(copy)

    def _arrival_s(self, copy: _Copy) -> float:
        """When a copy is complete, if nothing else is submitted before; outputs of the CPU go between its chunks."""
        while copy.done_s is None:
            start_s = self.link.next_chunk_s()
            self._worker.return_outputs(start_s)
            if self.link.next_chunk_s() > start_s:
                continue  # outputs went first
            self.link.advance(min(self._worker.next_done_s(), self.link.complete_s(copy)))
        return copy.done_s
