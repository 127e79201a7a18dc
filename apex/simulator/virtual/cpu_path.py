"""The simulated path of CPU attention: PCIe to the host, the worker, PCIe back, and the DRAM bandwidth they share.

Transfers and tasks are booked ahead in virtual seconds, in the order of their requests. A transfer that starts while a
task computes delays that task and all after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swiftllm.engine.backend import AttentionTimes

RESOLUTION_S = 1e-9
"""Delays below this are ignored."""


@dataclass(frozen=True)
class Interconnect:
    """PCIe and host DRAM, for profiles whose CPU attention leaves the transfers out."""

    bytes_per_s: float
    """PCIe bandwidth in each direction."""
    qkv_bytes_per_row: int
    """New q, k and v of one request in one layer, sent to the host."""
    out_bytes_per_row: int
    """Attention output of one request in one layer, sent back to the GPU."""
    latency_s: float = 0.0
    """Fixed time of a transfer."""
    dram_bytes_per_s: float = float("inf")
    """DRAM bandwidth, shared by PCIe and CPU attention; infinite: no contention."""

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < self.dram_bytes_per_s:
            raise ValueError(
                f"bytes_per_s={self.bytes_per_s:g} must be above 0 and below dram_bytes_per_s="
                f"{self.dram_bytes_per_s:g}: a link cannot move more than the memory behind it"
            )

    @property
    def dram_share(self) -> float:
        """The fraction of DRAM bandwidth that one busy link takes."""
        return self.bytes_per_s / self.dram_bytes_per_s

    def transfer_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class Link:
    """One direction of PCIe: one transfer after the other."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._free_s = 0.0

    def book_transfer(self, earliest_s: float, seconds: float) -> tuple[float, float]:
        """Book a transfer that may begin at ``earliest_s``; returns when it begins and ends."""
        start_s = max(earliest_s, self._free_s)
        self._free_s = start_s + seconds
        self.busy_s += seconds
        return start_s, self._free_s

    def advance(self, time_s: float) -> None:
        """Begin what the link does by itself before ``time_s``: nothing, unless weights are streamed over it."""


@dataclass(eq=False, slots=True)
class CpuTask:
    """One layer's CPU attention of a CPU batch; transfers while it computes delay ``done_s``.

    ``ready_s`` is set once the output's transfer is booked. ``to_host`` is when the inputs' began and ended.
    """

    start_s: float
    done_s: float
    return_s: float
    to_host: tuple[float, float] | None
    ready_s: float | None = None

    def times(self) -> AttentionTimes:
        assert self.ready_s is not None
        to_gpu = (self.ready_s - self.return_s, self.ready_s) if self.return_s else None
        return AttentionTimes(self.start_s, self.done_s, self.ready_s, self.to_host, to_gpu)


class SimulatedWorker:
    """Computes tasks in the order of submission, slower by ``dram_share`` while a link is busy."""

    def __init__(self, to_gpu: Link, dram_share: float) -> None:
        self._to_gpu = to_gpu
        self._dram_share = dram_share
        self._free_s = 0.0
        self._computing: deque[CpuTask] = deque()  # not done yet

    def submit(self, arrived_s: float, seconds: float, return_s: float, to_host: tuple[float, float] | None) -> CpuTask:
        """Queue a task whose inputs arrive at ``arrived_s``; its output takes ``return_s`` to reach the GPU."""
        start_s = max(arrived_s, self._free_s)
        self._free_s = start_s + seconds
        task = CpuTask(start_s, self._free_s, return_s, to_host)
        self._computing.append(task)
        return task

    def return_outputs(self, time_s: float) -> None:
        """Send back the outputs of all tasks done by ``time_s``, in the order of completion."""
        computing = self._computing
        while computing and (done_s := computing[0].done_s) <= time_s:
            self._to_gpu.advance(done_s)
            if computing[0].done_s > done_s + RESOLUTION_S:
                continue  # copies of weights delayed the task
            task = computing.popleft()
            if not task.return_s:
                task.ready_s = task.done_s
                continue
            start_s, task.ready_s = self._to_gpu.book_transfer(task.done_s, task.return_s)
            self.slow_down(start_s, task.ready_s)

    def next_done_s(self) -> float:
        """When the task at work is done; infinite without one."""
        return self._computing[0].done_s if self._computing else float("inf")

    def ready_s(self, task: CpuTask) -> float:
        """When a task's output is on the GPU, if nothing else is submitted before."""
        while task.ready_s is None:  # outputs sent back before this one may delay it
            self.return_outputs(task.done_s)
        return task.ready_s

    def slow_down(self, start_s: float, end_s: float) -> None:
        """Delay the tasks that compute while a link is busy from ``start_s`` to ``end_s``, and those after them."""
        share = self._dram_share
        if not share or not self._computing:
            return
        free_s = 0.0
        for task in self._computing:
            pushed_s = max(task.start_s, free_s) - task.start_s
            task.start_s += pushed_s
            task.done_s += pushed_s
            begin_s = max(task.start_s, start_s)
            left_s = task.done_s - begin_s  # the rest of the task when the link becomes busy
            if begin_s < end_s and left_s > 0.0:
                task.done_s += share * min(end_s - begin_s, left_s / (1.0 - share))
            free_s = task.done_s
        self._free_s = max(self._free_s, free_s)
