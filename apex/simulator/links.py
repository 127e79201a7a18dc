"""Simulated links and CPU workers: CPU attention, streamed weights, several hosts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from apex.perf.model import Curve, PerfModel, ProfileTable, SharedContext, saved_tokens
from swiftllm.core.request import Tier
from swiftllm.engine.backend import AttentionTimes
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.model.placement import SLOTS, Place, Placement

# -- CPU attention -----------------------------------------------------------------------------------------------------
# The simulated path of CPU attention: PCIe to the host, the worker, PCIe back, and the DRAM bandwidth they share.
#
# Transfers and tasks are booked ahead in virtual seconds, in the order of their requests. A transfer that starts while
# a task computes delays that task and all after it.

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


# -- weights that are not on the GPU -----------------------------------------------------------------------------------
# The simulated path of weights that are not on the GPU: copies over PCIe in chunks, two slots, and CPU stages.
#
# Copies share the link with attention outputs and swaps. These go first: they wait for one chunk at most.

CHUNK_BYTES = 8e6
"""A copy is divided into pieces of this size, so that it delays other transfers by a third of a millisecond."""


@dataclass(frozen=True)
class SimulatedStates:
    """Of a model with linear attention.

    ``copy_s``: seconds in which PCIe copies a request's state, in all layers, one way. ``num_snapshots``: states that
    host memory holds, so that prefixes can be cached.
    """

    copy_s: float
    num_snapshots: int = 0


@dataclass(frozen=True)
class SimulatedExperts:
    """What it takes to run experts in host memory. ``hop_s``: waking the CPU, beside transfers."""

    stage_bytes: tuple[float, ...]
    """Of each stage's experts, from stage -1 on."""
    gpu: Curve
    """Seconds over rows in which a layer's experts are computed by the GPU, and ``cpu`` by the CPU."""
    cpu: Curve
    hidden_bytes_per_row: int
    hop_s: float


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
    experts: SimulatedExperts | None = None
    """Of a model that has some."""

    @property
    def copied(self) -> Place:
        """The place of the stages of which some is copied to the GPU: one of two, as placements have it."""
        return Place.EXPERTS if self.placement.count(Place.EXPERTS) else Place.STREAMED

    @property
    def copied_bytes(self) -> Sequence[float]:
        """Of each stage, where it is at that place."""
        return self.experts.stage_bytes if self.experts and self.copied is Place.EXPERTS else self.stage_bytes

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
        order = [layer for layer in layers if weights.placement.at(layer) is weights.copied]
        self._after = dict(pairwise([*order, *order[:1]]))
        self._slots: deque[_Copy] = deque()
        self._current: int | None = None
        self._left_s = 0.0
        if order:
            self._fill_from(order[0], 0.0)

    def holds(self, layer: int) -> bool:
        """Whether stage ``layer`` needs no copy now: it is not streamed, or was entered last. Experts of few rows need
        none."""
        return self.weights.copied is Place.EXPERTS or layer not in self._after or layer == self._current

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
        copy = _Copy(layer, earliest_s, self.weights.copied_bytes[layer + 1])
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


# -- several hosts -----------------------------------------------------------------------------------------------------
# CPU attention on several hosts: which of them holds how much of the CPU tier, and how long an attention task takes.
#
# As in OmniServe's section 4, requests go to the GPUs' own host while its memory has room, then evenly to remote hosts.
# Each attention task is taken to be divided among the hosts as the tier is; a request stays whole. The hosts compute at
# the same time, so an attention task takes as long as the slowest of them. What goes to remote hosts and back shares
# the network of the GPUs' host. Left out: moving KV cache to remote hosts, which takes place beside the work of the GPU
# batch.


@dataclass(frozen=True)
class RemoteHosts:
    """CPU hosts across a network, each equal to the GPUs' own host in memory and speed."""

    count: int
    bytes_per_s: float
    """Network bandwidth of the GPUs' host, in each direction."""
    latency_s: float
    """Of a round trip."""
    bytes_per_row: int
    """Q, K, V and attention output of one request in one layer."""


def host_shares(used_blocks: int, local_blocks: int, remote_count: int) -> tuple[float, float]:
    """Parts of the used blocks in the local host and in each remote one (section 4): local first, then evenly."""
    if used_blocks <= local_blocks:
        return 1.0, 0.0
    local = local_blocks / used_blocks
    return local, (1.0 - local) / remote_count


def network_s(hosts: RemoteHosts, remote_rows: float) -> float:
    """An attention task's way to remote hosts and back, in one layer."""
    return hosts.latency_s + remote_rows * hosts.bytes_per_row / hosts.bytes_per_s


class SeveralHostsModel(PerfModel):
    """Predicts CPU attention on several hosts from the profile table of one, by how full the CPU tier is now."""

    def __init__(self, table: ProfileTable, num_layers: int, hosts: RemoteHosts, kv: KVCacheManager) -> None:
        super().__init__(table, num_layers)
        self._hosts = hosts
        self._kv = kv

    def with_table(self, table: ProfileTable) -> SeveralHostsModel:
        model = SeveralHostsModel(table, self.num_layers, self._hosts, self._kv)
        model.extrapolated = self.extrapolated
        return model

    def cpu_attention_s(self, requests: float, context_tokens: float, shared: Sequence[SharedContext] = ()) -> float:
        """T_c of the whole: the slowest host's. What shared blocks save is counted as on one host."""
        if requests <= 0:
            return 0.0
        context_tokens -= saved_tokens(shared, self.table.shared_row_cost, self.table.rows_per_read)
        capacity = self._kv.capacity(Tier.CPU)
        used = capacity - self._kv.num_free(Tier.CPU)
        local, remote = host_shares(used, capacity // (self._hosts.count + 1), self._hosts.count)
        local_s = self._share_s(local, requests, context_tokens)
        if not remote:
            return local_s
        remote_rows = max(1.0, requests * (1.0 - local))
        return max(local_s, self._share_s(remote, requests, context_tokens) + network_s(self._hosts, remote_rows))

    def _share_s(self, share: float, requests: float, context_tokens: float) -> float:
        """T_c of a host with this share of an attention task, of which it has one request at least."""
        rows = max(1.0, share * requests)
        return super().cpu_attention_s(rows, rows * (context_tokens / requests))
