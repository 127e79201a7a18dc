"""The backend that predicts: the interface of real hardware over a virtual clock, with no tensors behind it.

Scheduler, KV accounting and executor are the real ones; only the seconds are made up, from a profile table. Resources:

- GPU: boundaries and lane attention, one after the other, each as long as :class:`~apex.perf_model.PerfModel` says and
  no shorter than the host takes to launch it. The host is paced by the GPU, so the two share the clock. Boundary -1
  is what comes before a layer's attention, for all rows; boundary ``num_layers - 1`` the rest of a layer, logits and
  sampling, for the rows alone that get a token.
- Host: its own work of an iteration and of each request, and the handing over of tickets, hold up the lane.
- CPU attention worker: first come, first served. A ticket starts when the worker is free and its q, k, v are there.
- PCIe, one link each way: swaps, which the lane waits for, and q, k, v to the host and the outputs back where an
  :class:`Interconnect` tells their sizes; without one the profile's CPU attention includes the hand-over.
- DRAM bandwidth: whatever crosses PCIe is read from or written to DRAM at the link's rate, and the CPU worker has what
  is left: while a link is moving it goes at ``1 - link rate / DRAM rate`` of its speed. Transfers do not slow down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from apex.perf_model import PerfModel
from apex.planner.pipeline import LaneLoad
from swiftllm.backend import TicketTimes
from swiftllm.plan import LaneItem, Swap
from swiftllm.request import Request, Tier, TokenLogprob

PLACEHOLDER_TOKEN = 0
"""Every sampled token: nothing is computed, so requests end by ``max_tokens`` alone."""


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


@dataclass
class BusyTimes:
    """Seconds each resource has worked so far; CPU time counts when a ticket is collected."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    to_host_s: float = 0.0
    to_gpu_s: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedBatch:
    """A lane or a cohort: its size, one layer's attention in seconds, and who gets a token at the last boundary."""

    num_rows: int
    attention_s: float
    sampled: tuple[str, ...]
    requests: tuple[Request, ...] = ()


class SimulatedTicket:
    """``done_s`` is when the worker finishes, as far as known now: transfers that come meanwhile delay it."""

    __slots__ = ("backend", "done_s", "ready_s", "return_s", "start_s", "to_host")

    def __init__(
        self,
        backend: SimulatedBackend,
        start_s: float,
        done_s: float,
        return_s: float,
        to_host: tuple[float, float] | None,
    ) -> None:
        self.backend = backend
        self.start_s = start_s
        self.done_s = done_s
        self.return_s = return_s
        self.ready_s: float | None = None  # once the output's way back is booked
        self.to_host = to_host

    def ready(self) -> bool:
        self.backend.settle(self.backend.clock_s)
        return self.ready_s is not None and self.ready_s <= self.backend.clock_s

    def wait(self) -> float:
        backend = self.backend
        while self.ready_s is None:  # outputs sent back before this one may delay it
            backend.settle(self.done_s)
        backend.clock_s = max(backend.clock_s, self.ready_s)
        busy_s = self.done_s - self.start_s
        backend.busy.cpu_s += busy_s
        return busy_s

    def times(self) -> TicketTimes:
        assert self.ready_s is not None
        to_gpu = (self.ready_s - self.return_s, self.ready_s) if self.return_s else None
        return TicketTimes(self.start_s, self.done_s, self.ready_s, self.to_host, to_gpu)


class _Memo(dict[int, float]):
    """A prediction for each size, made once."""

    def __init__(self, predict: Callable[[int], float]) -> None:
        self._predict = predict

    def __missing__(self, size: int) -> float:
        seconds = self[size] = self._predict(size)
        return seconds


class SimulatedBackend:
    """See :class:`swiftllm.backend.Backend` for the interface and the module's text for the model.

    Attributes:
        clock_s: the virtual time; starts at 0.
        busy: what each resource has worked.
    """

    worker_restarts = 0

    def __init__(self, model: PerfModel, *, launch_s: float = 0.0, interconnect: Interconnect | None = None) -> None:
        """``launch_s``: what the host takes to launch a boundary or a layer's attention, for profiles without it."""
        self.num_layers = model.num_layers
        self.clock_s = 0.0
        self.busy = BusyTimes()
        self._model = model
        self._launch_s = launch_s
        self._interconnect = interconnect
        self._last = model.num_layers - 1
        self._linear_s = _Memo(model.linear_s)
        self._first_s = _Memo(model.first_s)
        self._last_s = _Memo(model.last_s)
        self._hand_over_s = _Memo(model.hand_over_s)
        self._iteration_s = model.iteration_s(0)
        self._requests_s = _Memo(lambda requests: model.iteration_s(requests) - self._iteration_s)
        self._worker_free_s = 0.0
        self._to_host_free_s = 0.0
        self._to_gpu_free_s = 0.0
        self._computing: deque[SimulatedTicket] = deque()  # not done yet, in the worker's order

    @property
    def extrapolated(self) -> frozenset[str]:
        """Operations that ran at sizes outside the profile table."""
        return frozenset(self._model.extrapolated)

    def now(self) -> float:
        return self.clock_s

    def sleep(self, seconds: float) -> None:
        """Let time pass while there is nothing to do."""
        self.clock_s += seconds

    # -- the GPU ----------------------------------------------------------------------------------------------------

    def open_lane(self, items: Sequence[LaneItem]) -> SimulatedBatch:
        self.clock_s += self._requests_s[len(items)]
        load = LaneLoad.of(items)
        sampled = tuple(item.request.request_id for item in items if not item.is_prefill or item.samples)
        return SimulatedBatch(load.tokens, load.gpu_attention_s(self._model), sampled)

    def open_cohort(self, requests: Sequence[Request]) -> SimulatedBatch:
        self.clock_s += self._requests_s[len(requests)]
        return self._cohort(requests)

    def _cohort(self, requests: Sequence[Request]) -> SimulatedBatch:
        context_tokens = sum(request.num_tokens for request in requests)
        attention_s = self._model.cpu_attention_s(len(requests), context_tokens)
        return SimulatedBatch(len(requests), attention_s, tuple(r.request_id for r in requests), tuple(requests))

    def drop_rows(self, cohort: SimulatedBatch, request_ids: frozenset[str]) -> SimulatedBatch:
        return self._cohort([r for r in cohort.requests if r.request_id not in request_ids])

    def boundary(self, layer: int, batches: Sequence[SimulatedBatch]) -> Mapping[str, int]:
        num_rows = 0
        for batch in batches:
            num_rows += batch.num_rows
        if 0 <= layer < self._last:
            self._run(self._linear_s[num_rows])
            return {}
        if layer < 0:
            self._run(self._first_s[num_rows])
            return {}
        self._run(self._last_s[sum(len(batch.sampled) for batch in batches)])
        return {request_id: PLACEHOLDER_TOKEN for batch in batches for request_id in batch.sampled}

    def gpu_attention(self, layer: int, lane: SimulatedBatch) -> None:
        self._run(lane.attention_s)

    def whole_iteration(self, lane: SimulatedBatch) -> None:
        """Operations are timed one by one, so a simulated device gets them one by one."""

    def _run(self, seconds: float) -> None:
        self.busy.gpu_s += seconds
        self.clock_s += seconds if seconds > self._launch_s else self._launch_s

    # -- the CPU worker ---------------------------------------------------------------------------------------------

    def submit_cpu_attention(self, layer: int, cohort: SimulatedBatch) -> SimulatedTicket:
        self.clock_s += self._hand_over_s[cohort.num_rows]
        arrived_s, return_s, to_host = self.clock_s, 0.0, None
        if self._interconnect is not None:
            link = self._interconnect
            self.settle(arrived_s)
            start_s = max(arrived_s, self._to_host_free_s)
            arrived_s = self._to_host_free_s = start_s + link.transfer_s(cohort.num_rows * link.qkv_bytes_per_row)
            to_host = (start_s, arrived_s)
            self.busy.to_host_s += arrived_s - start_s
            self._slow_worker(start_s, arrived_s)
            return_s = link.transfer_s(cohort.num_rows * link.out_bytes_per_row)
        start_s = max(arrived_s, self._worker_free_s)
        done_s = self._worker_free_s = start_s + cohort.attention_s
        ticket = SimulatedTicket(self, start_s, done_s, return_s, to_host)
        self._computing.append(ticket)
        return ticket

    def settle(self, time_s: float) -> None:
        """Send back the outputs of all tickets done by ``time_s``, in the order in which they were done."""
        computing = self._computing
        while computing and computing[0].done_s <= time_s:
            ticket = computing.popleft()
            if not ticket.return_s:
                ticket.ready_s = ticket.done_s
                continue
            start_s = max(ticket.done_s, self._to_gpu_free_s)
            ticket.ready_s = self._to_gpu_free_s = start_s + ticket.return_s
            self.busy.to_gpu_s += ticket.return_s
            self._slow_worker(start_s, ticket.ready_s)

    # -- PCIe and DRAM ----------------------------------------------------------------------------------------------

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Every iteration begins here, be there anything to move or not."""
        self.clock_s += self._iteration_s
        if not swaps:
            return
        self.settle(self.clock_s)
        for source in (Tier.GPU, Tier.CPU):
            blocks = sum(len(swap.source_blocks) for swap in swaps if swap.source is source)
            if not blocks:
                continue
            seconds = self._model.swap_s(blocks)
            if source is Tier.GPU:
                start_s = max(self.clock_s, self._to_host_free_s)
                self.clock_s = self._to_host_free_s = start_s + seconds
                self.busy.to_host_s += seconds
            else:
                start_s = max(self.clock_s, self._to_gpu_free_s)
                self.clock_s = self._to_gpu_free_s = start_s + seconds
                self.busy.to_gpu_s += seconds
            self._slow_worker(start_s, self.clock_s)

    def _slow_worker(self, start_s: float, end_s: float) -> None:
        """A link moves from ``start_s`` to ``end_s``: what computes meanwhile, and what comes after it, ends later."""
        share = self._interconnect.dram_share if self._interconnect is not None else 0.0
        if not share or not self._computing:
            return
        free_s = 0.0
        for ticket in self._computing:
            # What is left of the ticket when the link begins to move, and how far it gets beside it.
            pushed_s = max(ticket.start_s, free_s) - ticket.start_s
            ticket.start_s += pushed_s
            ticket.done_s += pushed_s
            begin_s = max(ticket.start_s, start_s)
            left_s = ticket.done_s - begin_s
            if begin_s < end_s and left_s > 0.0:
                ticket.done_s += share * min(end_s - begin_s, left_s / (1.0 - share))
            free_s = ticket.done_s
        self._worker_free_s = max(self._worker_free_s, free_s)

    # -- nothing is kept --------------------------------------------------------------------------------------------

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return {}

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass
