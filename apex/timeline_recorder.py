"""Records timelines: stands between engine and executor, and between executor and hardware, so that neither knows.

Whatever is not recorded goes past all this: without a recorder nothing is wrapped and nothing costs time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from apex.executor import OverlapExecutor
from apex.timeline import CohortTag, Iteration, Kind, Load, Poll, Span, Timeline
from swiftllm.backend import Backend, Batch, Ticket
from swiftllm.engine import Engine
from swiftllm.executor import LaneExecutor
from swiftllm.plan import IterationPlan, LaneItem, StepResult, Swap
from swiftllm.request import Request


@dataclass(eq=False)
class RecordedBatch:
    """A lane (no ``tag``) or a cohort of the backend behind, and the indexes of the spans that last moved it."""

    inner: Batch
    load: Load
    requests: tuple[Request, ...] = ()
    tag: CohortTag | None = None
    boundary: int | None = None
    ticket: int | None = None

    @property
    def num_rows(self) -> int:
        return self.inner.num_rows


@dataclass(eq=False)
class RecordedTicket:
    """A ticket that notes failed polls and waiting. Its spans are made at the end: until then it may be delayed."""

    backend: RecordingBackend
    inner: Ticket
    index: int
    iteration: int
    layer: int
    batch_load: Load
    tag: CohortTag
    after: tuple[int, ...]

    def ready(self) -> bool:
        is_ready = self.inner.ready()
        if not is_ready:
            now_s, notes = self.backend.now(), self.backend.notes
            notes.polls.append(Poll(now_s, notes.iteration, self.layer, self.tag))
        return is_ready

    def wait(self) -> float:
        start_s = self.backend.now()
        seconds = self.inner.wait()
        self.backend.note(Kind.WAIT, start_s, self.layer, self.batch_load, (self.tag,))
        self.backend.outstanding.pop(self.index, None)
        return seconds

    def spans(self, indexes: Iterator[int]) -> Iterator[Span]:
        times = self.inner.times()
        where = {"layer": self.layer, "load": self.batch_load, "cohorts": (self.tag,)}
        if times.to_host is not None:
            yield Span(next(indexes), Kind.TO_HOST, *times.to_host, self.iteration, **where, after=self.after)
        yield Span(
            self.index, Kind.CPU_ATTENTION, times.start_s, times.done_s, self.iteration, **where, after=self.after
        )
        if times.to_gpu is not None:
            yield Span(next(indexes), Kind.TO_GPU, *times.to_gpu, self.iteration, **where, after=(self.index,))


@dataclass
class Notes:
    """What was noted in one iteration; ``carried`` are the tickets under way when it began."""

    iteration: int
    carried: tuple[RecordedTicket, ...] = ()
    spans: list[Span] = field(default_factory=list)
    tickets: list[RecordedTicket] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    summary: Iteration | None = None
    uses_cpu: bool = False
    is_steady: bool = False  # decodes alone: no prefills, no swaps


class RecordingBackend:
    """Any backend, with notes of what it is asked and how long that takes."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.notes = Notes(0)
        self.outstanding: dict[int, RecordedTicket] = {}
        self.indexes = itertools.count()
        self._cohort_numbers = itertools.count()
        self._slots: WeakValueDictionary[int, RecordedBatch] = WeakValueDictionary()

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def now(self) -> float:
        return self.inner.now()

    def note(
        self, kind: Kind, start_s: float, layer: int | None, load: Load, cohorts: tuple[CohortTag, ...] = (),
        after: tuple[int, ...] = (),
    ) -> int | None:  # fmt: skip
        """A span from ``start_s`` to now; returns its index. What takes no time at all leaves none."""
        end_s = self.inner.now()
        if end_s <= start_s:
            return None
        index = next(self.indexes)
        self.notes.spans.append(Span(index, kind, start_s, end_s, self.notes.iteration, layer, load, cohorts, after))
        return index

    def swap(self, swaps: Sequence[Swap]) -> None:
        start_s = self.now()
        self.inner.swap(swaps)
        tokens = sum(swap.request.num_computed_tokens for swap in swaps)
        self.note(Kind.SWAP if swaps else Kind.OTHER, start_s, None, Load(0, len(swaps), tokens))

    def open_lane(self, items: Sequence[LaneItem]) -> RecordedBatch:
        start_s = self.now()
        batch = self.inner.open_lane(items)
        load = Load(batch.num_rows, len(items), sum(item.context_len for item in items))
        self.note(Kind.OTHER, start_s, None, load)
        return RecordedBatch(batch, load)

    def open_cohort(self, requests: Sequence[Request]) -> RecordedBatch:
        start_s = self.now()
        batch = self.inner.open_cohort(requests)
        load = _cohort_load(requests)
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        tag = CohortTag(next(self._cohort_numbers), slot)
        self.note(Kind.OTHER, start_s, None, load, (tag,))
        return self._keep(RecordedBatch(batch, load, tuple(requests), tag))

    def drop_rows(self, cohort: RecordedBatch, request_ids: frozenset[str]) -> RecordedBatch:
        batch = self.inner.drop_rows(cohort.inner, request_ids)
        staying = tuple(request for request in cohort.requests if request.request_id not in request_ids)
        return self._keep(replace(cohort, inner=batch, load=_cohort_load(staying), requests=staying))

    def _keep(self, cohort: RecordedBatch) -> RecordedBatch:
        self._slots[cohort.tag.slot] = cohort  # until the executor lets go of it
        return cohort

    def boundary(self, layer: int, batches: Sequence[RecordedBatch]) -> Mapping[str, int]:
        start_s = self.now()
        tokens = self.inner.boundary(layer, [batch.inner for batch in batches])
        cohorts = [batch for batch in batches if batch.tag is not None]
        kind = Kind.LINEAR if len(cohorts) < len(batches) else Kind.STEP
        tickets = tuple(cohort.ticket for cohort in cohorts if cohort.ticket is not None)
        load = sum((batch.load for batch in batches), Load())
        index = self.note(kind, start_s, layer, load, tuple(cohort.tag for cohort in cohorts), tickets)
        for cohort in cohorts:
            cohort.boundary, cohort.ticket = index, None
        return tokens

    def gpu_attention(self, layer: int, lane: RecordedBatch) -> None:
        start_s = self.now()
        self.inner.gpu_attention(layer, lane.inner)
        self.note(Kind.ATTENTION, start_s, layer, lane.load)

    def submit_cpu_attention(self, layer: int, cohort: RecordedBatch) -> RecordedTicket:
        start_s = self.now()
        inner = self.inner.submit_cpu_attention(layer, cohort.inner)
        self.note(Kind.OTHER, start_s, layer, cohort.load, (cohort.tag,))
        cohort.ticket = next(self.indexes)
        after = () if cohort.boundary is None else (cohort.boundary,)
        ticket = RecordedTicket(self, inner, cohort.ticket, self.notes.iteration, layer, cohort.load, cohort.tag, after)
        self.notes.tickets.append(ticket)
        self.outstanding[ticket.index] = ticket
        return ticket

    def forget(self, request_ids: Sequence[str]) -> None:
        self.inner.forget(request_ids)

    def close(self) -> None:
        self.inner.close()


def _cohort_load(requests: Sequence[Request]) -> Load:
    return Load(len(requests), len(requests), sum(request.num_tokens for request in requests))


# -- which iterations -------------------------------------------------------------------------------------------------


class TimelineRecorder:
    """An executor that keeps a window of ``num_iterations`` consecutive iterations of the one it wraps.

    Which: those from iteration ``start``, counted from 0 when recording began. Without it the window with the most
    iterations that use the CPU and neither prefill nor swap; among those, one strategy rather than several, and what is
    nearest the middle of the run, which ``progress`` (0 to 1) tells.
    """

    def __init__(
        self,
        executor: LaneExecutor | OverlapExecutor,
        num_iterations: int,
        start: int | None,
        progress: Callable[[], float],
    ) -> None:
        self.executor = executor
        self.backend = RecordingBackend(executor.backend)
        self._start = start
        self._progress = progress
        self._recent: deque[Notes] = deque(maxlen=num_iterations)
        self._chosen: tuple[Notes, ...] = ()
        self._chosen_worth: tuple[float, ...] = ()
        self._count = 0

    @property
    def is_idle(self) -> bool:
        return self.executor.is_idle

    def run(self, plan: IterationPlan) -> StepResult:
        backend = self.backend
        notes = backend.notes = Notes(self._count, tuple(backend.outstanding.values()))
        start_s = backend.now()
        result = self.executor.run(plan)
        busy = result.lane_busy_s, result.cpu_busy_s
        strategy, predicted_s = plan.strategy.value, plan.predicted.get("iteration_s")
        notes.summary = Iteration(self._count, strategy, start_s, start_s + result.duration_s, *busy, predicted_s)
        notes.is_steady = not plan.swaps and not plan.prefills
        # A ticket that goes on to the next iteration counts; one that was just collected does not.
        notes.uses_cpu = bool(notes.tickets) or any(ticket.index in backend.outstanding for ticket in notes.carried)
        self._count += 1
        self._recent.append(notes)
        if len(self._recent) == self._recent.maxlen:
            self._consider()
        return result

    def _consider(self) -> None:
        if self._start is not None:
            if self._recent[0].iteration == self._start:
                self._chosen = tuple(self._recent)
            return
        window = self._recent
        worth = (
            sum(notes.uses_cpu and notes.is_steady for notes in window),
            sum(notes.uses_cpu for notes in window),
            -len({notes.summary.strategy for notes in window}),
            -abs(self._progress() - 0.5),
        )
        if not self._chosen or worth > self._chosen_worth:
            self._chosen, self._chosen_worth = tuple(window), worth

    def timeline(self, system: str, setting: str, *, simulated: bool) -> Timeline:
        """What was recorded; call once the run is over. A run shorter than the window is there as a whole.

        Raises:
            ValueError: the run ended before the window that was asked for.
        """
        if self._start is not None and not self._chosen:
            raise ValueError(
                f"the run had {self._count} iterations: {self._recent.maxlen} from iteration {self._start} on are not "
                "among them; start earlier"
            )
        window = self._chosen or tuple(self._recent)
        indexes = self.backend.indexes
        tickets = [*(window[0].carried if window else ()), *(ticket for notes in window for ticket in notes.tickets)]
        spans = [span for notes in window for span in notes.spans]
        spans += [span for ticket in tickets for span in ticket.spans(indexes)]
        there = {span.index for span in spans}
        spans = [replace(span, after=tuple(i for i in span.after if i in there)) for span in spans]
        return Timeline(
            system,
            setting,
            simulated,
            self.backend.num_layers,
            tuple(notes.summary for notes in window),
            tuple(sorted(spans, key=lambda span: (span.start_s, span.index))),
            tuple(poll for notes in window for poll in notes.polls),
        )


@contextmanager
def recording(
    engine: Engine,
    *,
    num_iterations: int = 3,
    start: int | None = None,
    progress: Callable[[], float] = lambda: 0.5,
) -> Iterator[TimelineRecorder]:
    """Record what the engine does meanwhile, see :class:`TimelineRecorder`.

    Raises:
        ValueError: cohorts are under way, whose beginning nobody saw.
    """
    executor = engine.executor
    if not executor.is_idle:
        raise ValueError("cohorts are under way: begin to record before the first request, or when all are done")
    recorder = TimelineRecorder(executor, num_iterations, start, progress)
    engine.executor, executor.backend = recorder, recorder.backend
    try:
        yield recorder
    finally:
        engine.executor, executor.backend = executor, recorder.backend.inner
