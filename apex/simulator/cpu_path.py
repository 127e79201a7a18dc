"""The simulated way of CPU attention: across PCIe, through the worker, and back, with the DRAM's bandwidth shared.

Everything is booked ahead in virtual seconds: whoever asks later is served later, and a transfer that comes while a
task computes delays it and all behind it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swiftllm.engine.backend import TicketTimes


@dataclass(frozen=True)
class Interconnect:
    """PCIe and the DRAM behind it, for profiles whose CPU attention leaves the hand-over out."""

    bytes_per_s: float
    """Each way."""
    qkv_bytes_per_row: int
    """To the host for each request and layer: its new q, k and v."""
    out_bytes_per_row: int
    """Back to the GPU: its attention output."""
    latency_s: float = 0.0
    """What a transfer takes however small."""
    dram_bytes_per_s: float = float("inf")
    """Host memory, shared between PCIe and CPU attention; infinite: no contention."""

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < self.dram_bytes_per_s:
            raise ValueError(
                f"bytes_per_s={self.bytes_per_s:g} must be above 0 and below dram_bytes_per_s="
                f"{self.dram_bytes_per_s:g}: a link cannot move more than the memory behind it"
            )

    @property
    def dram_share(self) -> float:
        """The part of the DRAM's bandwidth that one moving link takes."""
        return self.bytes_per_s / self.dram_bytes_per_s

    def transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Link:
    """One way across PCIe: one transfer after the other."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._free_s = 0.0

    def book_transfer(self, earliest_s: float, seconds: float) -> tuple[float, float]:
        """When a transfer that may begin at ``earliest_s`` begins and ends."""
        start_s = max(earliest_s, self._free_s)
        self._free_s = start_s + seconds
        self.busy_s += seconds
        return start_s, self._free_s


class CpuTask:
    """One layer's CPU attention of a cohort; transfers that come while it computes delay ``done_s``."""

    __slots__ = ("done_s", "ready_s", "return_s", "start_s", "to_host")

    def __init__(self, start_s: float, done_s: float, return_s: float, to_host: tuple[float, float] | None) -> None:
        self.start_s = start_s
        self.done_s = done_s
        self.return_s = return_s
        self.ready_s: float | None = None  # once the output's way back is booked
        self.to_host = to_host

    def times(self) -> TicketTimes:
        assert self.ready_s is not None
        to_gpu = (self.ready_s - self.return_s, self.ready_s) if self.return_s else None
        return TicketTimes(self.start_s, self.done_s, self.ready_s, self.to_host, to_gpu)


class SimulatedWorker:
    """Computes tasks in the order in which they were submitted, slower by ``dram_share`` while a link moves."""

    def __init__(self, to_gpu: Link, dram_share: float) -> None:
        self._to_gpu = to_gpu
        self._dram_share = dram_share
        self._free_s = 0.0
        self._computing: deque[CpuTask] = deque()  # not done yet

    def submit(self, arrived_s: float, seconds: float, return_s: float, to_host: tuple[float, float] | None) -> CpuTask:
        """Take a task whose inputs are there at ``arrived_s``; its output takes ``return_s`` to the GPU."""
        start_s = max(arrived_s, self._free_s)
        self._free_s = start_s + seconds
        task = CpuTask(start_s, self._free_s, return_s, to_host)
        self._computing.append(task)
        return task

    def return_outputs(self, time_s: float) -> None:
        """Send back the outputs of all tasks done by ``time_s``, in the order in which they were done."""
        computing = self._computing
        while computing and computing[0].done_s <= time_s:
            task = computing.popleft()
            if not task.return_s:
                task.ready_s = task.done_s
                continue
            start_s, task.ready_s = self._to_gpu.book_transfer(task.done_s, task.return_s)
            self.slow_down(start_s, task.ready_s)

    def ready_s(self, task: CpuTask) -> float:
        """When a task's output is on the GPU, if nothing more is submitted before."""
        while task.ready_s is None:  # outputs sent back before this one may delay it
            self.return_outputs(task.done_s)
        return task.ready_s

    def slow_down(self, start_s: float, end_s: float) -> None:
        """A link moves from ``start_s`` to ``end_s``: what computes meanwhile, and what comes after it, ends later."""
        share = self._dram_share
        if not share or not self._computing:
            return
        free_s = 0.0
        for task in self._computing:
            pushed_s = max(task.start_s, free_s) - task.start_s
            task.start_s += pushed_s
            task.done_s += pushed_s
            begin_s = max(task.start_s, start_s)
            left_s = task.done_s - begin_s  # what is left of the task when the link begins to move
            if begin_s < end_s and left_s > 0.0:
                task.done_s += share * min(end_s - begin_s, left_s / (1.0 - share))
            free_s = task.done_s
        self._free_s = max(self._free_s, free_s)
