"""A backend that records what an executor asks of it: each operation's times, and what had to end before it.

It replaces the real backend only while a recording runs. Cohorts under way are wrapped at its start and unwrapped at
its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from apex.timeline.spans import CohortTag, Iteration, Kind, Poll, Span, SpanWork
from swiftllm.core.plan import IterationPlan, LaneItem, StepResult, Swap
from swiftllm.core.request import Request
from swiftllm.engine.backend import Batch, ExecutorBackend, SwapTimes, Ticket, TicketTimes
from swiftllm.engine.executor import CohortRun, Executor


@dataclass(eq=False)
class RecordedBatch:
    """A lane of the wrapped backend, and its size."""

    inner: Batch
    work: SpanWork

    @property
    def num_rows(self) -> int:
        return self.inner.num_rows


@dataclass(eq=False)
class RecordedCohort(RecordedBatch):
    """A cohort of the wrapped backend, and the indexes of the spans that last moved it."""

    requests: tuple[Request, ...]
    tag: CohortTag
    boundary: int | None = None
    ticket: int | None = None


@dataclass(eq=False)
class RecordedTicket:
    """A ticket that records waiting, and failed polls at the lane's layer.

    Its spans are made at the end, when its times are final.
    """

    backend: RecordingBackend
    inner: Ticket
    index: int
    iteration: int
    layer: int
    batch_work: SpanWork
    tag: CohortTag
    after: tuple[int, ...]

    def ready(self) -> bool:
        is_ready = self.inner.ready()
        if not is_ready and self.layer == self.backend.lane_layer:
            now_s, notes = self.backend.now(), self.backend.notes
            notes.polls.append(Poll(now_s, notes.iteration, self.layer, self.tag))
        return is_ready

    def wait(self) -> float:
        start_s = self.backend.now()
        seconds = self.inner.wait()
        self.backend.record_span(Kind.WAIT, start_s, self.layer, self.batch_work, (self.tag,))
        self.backend.outstanding.pop(self.index, None)
        return seconds

    def times(self) -> TicketTimes:
        return self.inner.times()

    def spans(self, indexes: Iterator[int]) -> Iterator[Span]:
        times = self.times()
        where = {"layer": self.layer, "work": self.batch_work, "cohorts": (self.tag,)}
        if times.to_host is not None:
            yield Span(next(indexes), Kind.TO_HOST, *times.to_host, self.iteration, **where, after=self.after)
        yield Span(
            self.index, Kind.CPU_ATTENTION, times.start_s, times.done_s, self.iteration, **where, after=self.after
        )
        if times.to_gpu is not None:
            yield Span(next(indexes), Kind.TO_GPU, *times.to_gpu, self.iteration, **where, after=(self.index,))


@dataclass
class Notes:
    """The record of one iteration; ``carried`` are the tickets under way when it began.

    ``outcome``, its plan and result, and ``uses_cpu`` are set once it is over.
    """

    iteration: int
    start_s: float = 0.0
    carried: tuple[RecordedTicket, ...] = ()
    spans: list[Span] = field(default_factory=list)
    tickets: list[RecordedTicket] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    outcome: tuple[IterationPlan, StepResult] | None = None
    uses_cpu: bool = False

    @property
    def plan(self) -> IterationPlan:
        assert self.outcome is not None, "the iteration is not over"
        return self.outcome[0]

    @property
    def result(self) -> StepResult:
        assert self.outcome is not None, "the iteration is not over"
        return self.outcome[1]

    @property
    def is_steady(self) -> bool:
        """Whether the iteration only decodes: it neither prefills nor swaps."""
        return not self.plan.swaps and not self.plan.prefills

    @property
    def summary(self) -> Iteration:
        plan, result = self.plan, self.result
        return Iteration(
            self.iteration,
            plan.strategy.value,
            self.start_s,
            self.start_s + result.duration_s,
            result.lane_busy_s,
            result.cpu_busy_s,
            plan.predicted.get("iteration_s"),
            any(cohort.rule.steps and not cohort.rule.waits for cohort in plan.cohorts),
        )


class RecordingBackend:
    """Wraps any backend and records its operations and their times. It has what an executor calls, and no more."""

    def __init__(self, inner: ExecutorBackend) -> None:
        self.inner = inner
        self.notes = Notes(0)
        self.outstanding: dict[int, RecordedTicket] = {}
        self.lane_layer = -1  # the boundary that the lane crosses next
        self.indexes = itertools.count()
        self._swaps: SwapTimes | None = None  # those that the lane may have to wait for
        self._cohort_numbers = itertools.count()
        self._slots: WeakValueDictionary[int, RecordedCohort] = WeakValueDictionary()

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def now(self) -> float:
        return self.inner.now()

    def record_span(
        self, kind: Kind, start_s: float, layer: int | None, work: SpanWork, cohorts: tuple[CohortTag, ...] = (),
        after: tuple[int, ...] = (), end_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """Record a span from ``start_s`` to ``end_s``, by default now; returns its index, or None for one of no
        duration."""
        end_s = self.inner.now() if end_s is None else end_s
        if end_s <= start_s:
            return None
        index = next(self.indexes)
        self.notes.spans.append(Span(index, kind, start_s, end_s, self.notes.iteration, layer, work, cohorts, after))
        return index

    def swap(self, swaps: Sequence[Swap]) -> None:
        start_s = self.now()
        self._swaps = times = self.inner.swap(swaps)
        end_s, tokens = self.now(), sum(swap.request.num_computed_tokens for swap in swaps if swap.request is not None)
        self.record_span(Kind.OTHER, start_s, None, work := SpanWork(0, len(swaps), tokens))
        if swaps:
            copied = (start_s, end_s) if times is None else (times.start_s, times.end_s)
            self.record_span(Kind.SWAP, copied[0], None, work, end_s=copied[1])

    def open_lane(self, items: Sequence[LaneItem]) -> RecordedBatch:
        start_s = self.now()
        batch = self.inner.open_lane(items)
        work = SpanWork(batch.num_rows, len(items), sum(item.context_len for item in items))
        self.record_span(Kind.OTHER, start_s, None, work)
        return RecordedBatch(batch, work)

    def open_cohort(self, requests: Sequence[Request]) -> RecordedCohort:
        start_s = self.now()
        cohort = self._tagged(self.inner.open_cohort(requests), requests)
        self.record_span(Kind.OTHER, start_s, None, cohort.work, (cohort.tag,))
        return cohort

    def drop_rows(self, cohort: RecordedCohort, request_ids: frozenset[str]) -> RecordedCohort:
        batch = self.inner.drop_rows(cohort.inner, request_ids)
        staying = tuple(request for request in cohort.requests if request.request_id not in request_ids)
        return self._hold_slot(replace(cohort, inner=batch, work=_cohort_work(staying), requests=staying))

    def _tagged(self, batch: Batch, requests: Sequence[Request]) -> RecordedCohort:
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        tag = CohortTag(next(self._cohort_numbers), slot)
        return self._hold_slot(RecordedCohort(batch, _cohort_work(requests), tuple(requests), tag))

    def _hold_slot(self, cohort: RecordedCohort) -> RecordedCohort:
        self._slots[cohort.tag.slot] = cohort  # a weak reference: free again once the executor drops the cohort
        return cohort

    def boundary(self, layer: int, batches: Sequence[RecordedBatch]) -> Mapping[str, int]:
        start_s = self.now()
        tokens = self.inner.boundary(layer, [batch.inner for batch in batches])
        cohorts = [batch for batch in batches if isinstance(batch, RecordedCohort)]
        if len(cohorts) < len(batches):
            self.lane_layer = layer + 1
        kind = Kind.LINEAR if len(cohorts) < len(batches) else Kind.STEP
        tickets = tuple(cohort.ticket for cohort in cohorts if cohort.ticket is not None)
        work = sum((batch.work for batch in batches), SpanWork())
        index = self.record_span(kind, start_s, layer, work, tuple(cohort.tag for cohort in cohorts), tickets)
        for cohort in cohorts:
            cohort.boundary, cohort.ticket = index, None
        return tokens

    def gpu_attention(self, layer: int, lane: RecordedBatch) -> None:
        start_s = self.now()
        ready_s = start_s if self._swaps is None else self._swaps.ready_s(layer)
        self.inner.gpu_attention(layer, lane.inner)
        self.record_span(Kind.SWAP_WAIT, start_s, layer, lane.work, end_s=ready_s)
        self.record_span(Kind.ATTENTION, max(start_s, ready_s), layer, lane.work)

    def whole_iteration(self, lane: RecordedBatch) -> None:
        """Declined, so that the executor goes layer by layer and each operation is recorded."""

    def submit_cpu_attention(self, layer: int, cohort: RecordedCohort) -> RecordedTicket:
        start_s = self.now()
        inner = self.inner.submit_cpu_attention(layer, cohort.inner)
        self.record_span(Kind.OTHER, start_s, layer, cohort.work, (cohort.tag,))
        ticket = self._recorded(inner, layer, cohort)
        self.notes.tickets.append(ticket)
        return ticket

    def _recorded(self, inner: Ticket, layer: int, cohort: RecordedCohort) -> RecordedTicket:
        index = cohort.ticket = next(self.indexes)
        after = () if cohort.boundary is None else (cohort.boundary,)
        ticket = RecordedTicket(self, inner, index, self.notes.iteration, layer, cohort.work, cohort.tag, after)
        self.outstanding[index] = ticket
        return ticket

    def adopt_cohort(self, cohort: CohortRun, requests: Sequence[Request]) -> None:
        """Wrap a cohort that was opened before recording began, and its ticket."""
        cohort.batch = batch = self._tagged(cohort.batch, requests)
        if cohort.ticket is not None:
            cohort.ticket = self._recorded(cohort.ticket, cohort.boundary, batch)

    def begin_notes(self, iteration: int) -> Notes:
        """Begin the record of an iteration."""
        self.notes = Notes(iteration, self.now(), tuple(self.outstanding.values()))
        return self.notes

    def spans_of(self, window: Sequence[Notes]) -> list[Span]:
        """All spans of consecutive iterations that are over, and those of their tickets."""
        tickets = [ticket for notes in window[:1] for ticket in notes.carried]
        tickets += [ticket for notes in window for ticket in notes.tickets]
        spans = [span for notes in window for span in notes.spans]
        return spans + [span for ticket in tickets for span in ticket.spans(self.indexes)]


def _cohort_work(requests: Sequence[Request]) -> SpanWork:
    return SpanWork(len(requests), len(requests), sum(request.num_tokens for request in requests))


# -- begin and end ----------------------------------------------------------------------------------------------------


def attach(executor: Executor, requests: Mapping[str, Request]) -> RecordingBackend:
    """Record the executor from its next iteration on. ``requests`` are the residents', by id."""
    executor.backend = backend = RecordingBackend(executor.backend)
    for cohort in executor.cohorts:
        backend.adopt_cohort(cohort, [requests[i] for i in cohort.request_ids if i in requests])
    return backend


def detach(executor: Executor, backend: RecordingBackend) -> None:
    """Give the executor its own backend back; does nothing if its backend was replaced since."""
    if executor.backend is not backend:
        return
    executor.backend = backend.inner
    for cohort in executor.cohorts:
        if isinstance(cohort.batch, RecordedCohort):
            cohort.batch = cohort.batch.inner
        if isinstance(cohort.ticket, RecordedTicket):
            cohort.ticket = cohort.ticket.inner
