"""Records timelines of an engine, of a run or of single iterations for the status page, and writes those of runs."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from apex.timeline.spans import CpuBatchTag, Iteration, Kind, Poll, Span, SpanWork, Timeline, span_name, trace_json
from swiftllm.core.plan import GpuBatchItem, IterationPlan, StateCopy, StepResult, Swap
from swiftllm.core.request import Request, RequestOutput
from swiftllm.engine.backend import AttentionFuture, AttentionTimes, Batch, ExecutorBackend, SwapTimes
from swiftllm.engine.engine import Engine
from swiftllm.engine.executor import CpuBatchRun, Executor

# -- the backend that records ------------------------------------------------------------------------------------------
# A backend that records what an executor asks of it: each operation's times, and what had to end before it.
#
# It replaces the real backend only while a recording runs. CPU batches under way are wrapped at its start and unwrapped
# at its end.


@dataclass(eq=False)
class RecordedBatch:
    """A GPU batch of the wrapped backend, and its size."""

    inner: Batch
    work: SpanWork

    @property
    def num_rows(self) -> int:
        return self.inner.num_rows


@dataclass(eq=False)
class RecordedCpuBatch(RecordedBatch):
    """A CPU batch of the wrapped backend, and the indexes of the spans that last moved it."""

    requests: tuple[Request, ...]
    tag: CpuBatchTag
    stage: int | None = None
    future: int | None = None


@dataclass(eq=False)
class RecordedFuture:
    """An attention task that records waiting, and failed polls at the GPU batch's layer.

    Its spans are made at the end, when its times are final.
    """

    backend: RecordingBackend
    inner: AttentionFuture
    index: int
    iteration: int
    layer: int
    batch_work: SpanWork
    tag: CpuBatchTag
    after: tuple[int, ...]

    def ready(self) -> bool:
        is_ready = self.inner.ready()
        if not is_ready and self.layer == self.backend.gpu_batch_layer:
            now_s, notes = self.backend.now(), self.backend.notes
            notes.polls.append(Poll(now_s, notes.iteration, self.layer, self.tag))
        return is_ready

    def wait(self) -> float:
        start_s = self.backend.now()
        seconds = self.inner.wait()
        self.backend.record_span(Kind.WAIT, start_s, self.layer, self.batch_work, (self.tag,))
        self.backend.outstanding.pop(self.index, None)
        return seconds

    def times(self) -> AttentionTimes:
        return self.inner.times()

    def spans(self, indexes: Iterator[int]) -> Iterator[Span]:
        times = self.times()
        where = {"layer": self.layer, "work": self.batch_work, "cpu_batches": (self.tag,)}
        if times.to_host is not None:
            yield Span(next(indexes), Kind.TO_HOST, *times.to_host, self.iteration, **where, after=self.after)
        yield Span(
            self.index, Kind.CPU_ATTENTION, times.start_s, times.done_s, self.iteration, **where, after=self.after
        )
        if times.to_gpu is not None:
            yield Span(next(indexes), Kind.TO_GPU, *times.to_gpu, self.iteration, **where, after=(self.index,))


@dataclass
class Notes:
    """The record of one iteration; ``carried`` are the attention tasks under way when it began.

    ``outcome``, its plan and result, and ``uses_cpu`` are set once it is over.
    """

    iteration: int
    start_s: float = 0.0
    carried: tuple[RecordedFuture, ...] = ()
    spans: list[Span] = field(default_factory=list)
    futures: list[RecordedFuture] = field(default_factory=list)
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
            result.gpu_batch_busy_s,
            result.cpu_busy_s,
            plan.predicted.get("iteration_s"),
            any(cpu_batch.mode.runs_alone and not cpu_batch.mode.waits for cpu_batch in plan.cpu_batches),
        )


class RecordingBackend:
    """Wraps any backend and records its operations and their times. It has what an executor calls, and no more."""

    def __init__(self, inner: ExecutorBackend) -> None:
        self.inner = inner
        self.notes = Notes(0)
        self.outstanding: dict[int, RecordedFuture] = {}
        self.gpu_batch_layer = -1  # the stage that the GPU batch runs next
        self.indexes = itertools.count()
        self._swaps: SwapTimes | None = None  # those that the GPU batch may have to wait for
        self._cpu_batch_numbers = itertools.count()
        self._slots: WeakValueDictionary[int, RecordedCpuBatch] = WeakValueDictionary()

    @property
    def num_layers(self) -> int:
        return self.inner.num_layers

    def now(self) -> float:
        return self.inner.now()

    def record_span(
        self, kind: Kind, start_s: float, layer: int | None, work: SpanWork, cpu_batches: tuple[CpuBatchTag, ...] = (),
        after: tuple[int, ...] = (), end_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """Record a span from ``start_s`` to ``end_s``, by default now; returns its index, or None for one of no
        duration."""
        end_s = self.inner.now() if end_s is None else end_s
        if end_s <= start_s:
            return None
        index = next(self.indexes)
        self.notes.spans.append(
            Span(index, kind, start_s, end_s, self.notes.iteration, layer, work, cpu_batches, after)
        )
        return index

    def swap(self, swaps: Sequence[Swap]) -> None:
        start_s = self.now()
        self._swaps = times = self.inner.swap(swaps)
        end_s, tokens = self.now(), sum(swap.request.num_computed_tokens for swap in swaps if swap.request is not None)
        self.record_span(Kind.OTHER, start_s, None, work := SpanWork(0, len(swaps), tokens))
        if swaps:
            copied = (start_s, end_s) if times is None else (times.start_s, times.end_s)
            self.record_span(Kind.SWAP, copied[0], None, work, end_s=copied[1])

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        start_s = self.now()
        self.inner.copy_states(copies)
        self.record_span(Kind.OTHER, start_s, None, SpanWork(0, len(copies)))

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> RecordedBatch:
        start_s = self.now()
        batch = self.inner.open_gpu_batch(items)
        work = SpanWork(batch.num_rows, len(items), sum(item.context_len for item in items))
        self.record_span(Kind.OTHER, start_s, None, work)
        return RecordedBatch(batch, work)

    def open_cpu_batch(self, requests: Sequence[Request]) -> RecordedCpuBatch:
        start_s = self.now()
        cpu_batch = self._tagged(self.inner.open_cpu_batch(requests), requests)
        self.record_span(Kind.OTHER, start_s, None, cpu_batch.work, (cpu_batch.tag,))
        return cpu_batch

    def drop_rows(self, cpu_batch: RecordedCpuBatch, request_ids: frozenset[str]) -> RecordedCpuBatch:
        batch = self.inner.drop_rows(cpu_batch.inner, request_ids)
        staying = tuple(request for request in cpu_batch.requests if request.request_id not in request_ids)
        return self._hold_slot(replace(cpu_batch, inner=batch, work=_cpu_batch_work(staying), requests=staying))

    def _tagged(self, batch: Batch, requests: Sequence[Request]) -> RecordedCpuBatch:
        slot = next(slot for slot in itertools.count() if slot not in self._slots)
        tag = CpuBatchTag(next(self._cpu_batch_numbers), slot)
        return self._hold_slot(RecordedCpuBatch(batch, _cpu_batch_work(requests), tuple(requests), tag))

    def _hold_slot(self, cpu_batch: RecordedCpuBatch) -> RecordedCpuBatch:
        self._slots[cpu_batch.tag.slot] = (
            cpu_batch  # a weak reference: free again once the executor drops the CPU batch
        )
        return cpu_batch

    def run_stage(self, layer: int, batches: Sequence[RecordedBatch]) -> Mapping[str, int]:
        start_s = self.now()
        tokens = self.inner.run_stage(layer, [batch.inner for batch in batches])
        cpu_batches = [batch for batch in batches if isinstance(batch, RecordedCpuBatch)]
        if len(cpu_batches) < len(batches):
            self.gpu_batch_layer = layer + 1
        kind = Kind.LINEAR if len(cpu_batches) < len(batches) else Kind.STEP
        futures = tuple(cpu_batch.future for cpu_batch in cpu_batches if cpu_batch.future is not None)
        work = sum((batch.work for batch in batches), SpanWork())
        index = self.record_span(kind, start_s, layer, work, tuple(cpu_batch.tag for cpu_batch in cpu_batches), futures)
        for cpu_batch in cpu_batches:
            cpu_batch.stage, cpu_batch.future = index, None
        return tokens

    def gpu_attention(self, layer: int, gpu_batch: RecordedBatch) -> None:
        start_s = self.now()
        ready_s = start_s if self._swaps is None else self._swaps.ready_s(layer)
        self.inner.gpu_attention(layer, gpu_batch.inner)
        self.record_span(Kind.SWAP_WAIT, start_s, layer, gpu_batch.work, end_s=ready_s)
        self.record_span(Kind.ATTENTION, max(start_s, ready_s), layer, gpu_batch.work)

    def run_full_graph(self, gpu_batch: RecordedBatch) -> None:
        """Declined, so that the executor goes layer by layer and each operation is recorded."""

    def submit_cpu_attention(self, layer: int, cpu_batch: RecordedCpuBatch) -> RecordedFuture:
        start_s = self.now()
        inner = self.inner.submit_cpu_attention(layer, cpu_batch.inner)
        self.record_span(Kind.OTHER, start_s, layer, cpu_batch.work, (cpu_batch.tag,))
        future = self._recorded(inner, layer, cpu_batch)
        self.notes.futures.append(future)
        return future

    def _recorded(self, inner: AttentionFuture, layer: int, cpu_batch: RecordedCpuBatch) -> RecordedFuture:
        index = cpu_batch.future = next(self.indexes)
        after = () if cpu_batch.stage is None else (cpu_batch.stage,)
        future = RecordedFuture(self, inner, index, self.notes.iteration, layer, cpu_batch.work, cpu_batch.tag, after)
        self.outstanding[index] = future
        return future

    def adopt_cpu_batch(self, cpu_batch: CpuBatchRun, requests: Sequence[Request]) -> None:
        """Wrap a CPU batch that was opened before recording began, and its attention task."""
        cpu_batch.batch = batch = self._tagged(cpu_batch.batch, requests)
        if cpu_batch.future is not None:
            cpu_batch.future = self._recorded(cpu_batch.future, cpu_batch.stage, batch)

    def begin_notes(self, iteration: int) -> Notes:
        """Begin the record of an iteration."""
        self.notes = Notes(iteration, self.now(), tuple(self.outstanding.values()))
        return self.notes

    def spans_of(self, window: Sequence[Notes]) -> list[Span]:
        """All spans of consecutive iterations that are over, and those of their attention tasks."""
        futures = [future for notes in window[:1] for future in notes.carried]
        futures += [future for notes in window for future in notes.futures]
        spans = [span for notes in window for span in notes.spans]
        return spans + [span for future in futures for span in future.spans(self.indexes)]


def _cpu_batch_work(requests: Sequence[Request]) -> SpanWork:
    return SpanWork(len(requests), len(requests), sum(request.num_tokens for request in requests))


# -- begin and end ----------------------------------------------------------------------------------------------------


def attach(executor: Executor, requests: Mapping[str, Request]) -> RecordingBackend:
    """Record the executor from its next iteration on. ``requests`` are those of the scheduler state, by id."""
    executor.backend = backend = RecordingBackend(executor.backend)
    for cpu_batch in executor.cpu_batches:
        backend.adopt_cpu_batch(cpu_batch, [requests[i] for i in cpu_batch.request_ids if i in requests])
    return backend


def detach(executor: Executor, backend: RecordingBackend) -> None:
    """Give the executor its own backend back; does nothing if its backend was replaced since."""
    if executor.backend is not backend:
        return
    executor.backend = backend.inner
    for cpu_batch in executor.cpu_batches:
        if isinstance(cpu_batch.batch, RecordedCpuBatch):
            cpu_batch.batch = cpu_batch.batch.inner
        if isinstance(cpu_batch.future, RecordedFuture):
            cpu_batch.future = cpu_batch.future.inner


# -- the recorder ------------------------------------------------------------------------------------------------------
# Records the timeline of a run: runs of the engine's executor, over a recording backend.
#
# Without a recorder nothing is wrapped and nothing costs time.


class TimelineRecorder:
    """Keeps a window of ``num_iterations`` consecutive iterations.

    The window begins at iteration ``start``, counted from 0 when recording began. Without ``start`` it is the window
    with the most iterations that use the CPU and neither prefill nor swap. Ties go to the window with fewer strategies,
    then to the one nearest the middle of the run; ``progress`` returns how far the run is, 0 to 1.
    """

    def __init__(
        self,
        backend: RecordingBackend,
        run: Callable[[IterationPlan], StepResult],
        num_iterations: int,
        start: int | None,
        progress: Callable[[], float],
    ) -> None:
        """``run`` carries out a plan on ``backend``."""
        self._backend = backend
        self._run = run
        self._start = start
        self._progress = progress
        self._recent: deque[Notes] = deque(maxlen=num_iterations)
        self._chosen: tuple[Notes, ...] = ()
        self._chosen_worth: tuple[float, ...] = ()
        self._count = 0

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out the plan, and record what happened."""
        notes = self._backend.begin_notes(self._count)
        result = self._run(plan)
        notes.outcome = plan, result
        # An attention task that outlasts the iteration counts; one that was only collected does not.
        notes.uses_cpu = bool(notes.futures) or any(t.index in self._backend.outstanding for t in notes.carried)
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
            -len({notes.plan.strategy for notes in window}),
            -abs(self._progress() - 0.5),
        )
        if not self._chosen or worth > self._chosen_worth:
            self._chosen, self._chosen_worth = tuple(window), worth

    def timeline(self, system: str, setting: str, *, simulated: bool) -> Timeline:
        """What was recorded; call once the run is over. A run shorter than the window is recorded whole.

        Raises:
            ValueError: the run ended before the window that was asked for.
        """
        if self._start is not None and not self._chosen:
            raise ValueError(
                f"the run had {self._count} iterations: {self._recent.maxlen} from iteration {self._start} on are not "
                "among them; start earlier"
            )
        window = self._chosen or tuple(self._recent)
        spans = self._backend.spans_of(window)
        there = {span.index for span in spans}
        spans = [replace(span, after=tuple(i for i in span.after if i in there)) for span in spans]
        return Timeline(
            system,
            setting,
            simulated,
            self._backend.num_layers,
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
    """Record what the engine does inside the block, see :class:`TimelineRecorder`."""
    executor, run = engine.executor, engine.executor.run
    backend = attach(executor, engine.state.requests)
    recorder = TimelineRecorder(backend, run, num_iterations, start, progress)
    executor.run = recorder.run
    try:
        yield recorder
    finally:
        executor.run = run
        detach(executor, backend)


# -- single iterations -------------------------------------------------------------------------------------------------
# Records single iterations of a serving engine for the status page.
#
# A request for the last recording starts the next one. Between recordings nothing is wrapped and nothing costs time.

ROWS = (
    ("GPU batch: linear layers", (Kind.LINEAR, Kind.WAIT, Kind.SWAP_WAIT, Kind.OTHER)),
    ("GPU batch: attention", (Kind.ATTENTION,)),
    ("CPU requests: linear layers", (Kind.STEP,)),
    ("CPU worker: attention", (Kind.CPU_ATTENTION,)),
    ("PCIe to host", (Kind.TO_HOST,)),
    ("PCIe to GPU", (Kind.TO_GPU,)),
    ("Swaps between the tiers", (Kind.SWAP,)),
)


class LiveTimeline:
    """An observer of the engine's service. All methods but :meth:`latest` run on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_iterations = 0
        self._wanted = False
        self._backend: RecordingBackend | None = None  # until the CPU attention of its iteration is done too
        self._latest: dict[str, Any] | None = None

    def latest(self) -> dict[str, Any] | None:
        """The last recorded iteration, see :func:`iteration_json`, or None; requests the next one. Any thread."""
        self._wanted = True
        return self._latest

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        self._num_iterations += 1
        if self._backend is None:
            if self._wanted:
                self._backend = attach(self._engine.executor, self._engine.state.requests)
                self._backend.begin_notes(self._num_iterations)
            return
        backend, notes = self._backend, self._backend.notes
        if notes.outcome is None:
            detach(self._engine.executor, backend)
            notes.outcome = plan, result
        # CPU attention may outlast the iteration, and until it is done its times may change.
        if all(future.inner.ready() for future in (*notes.carried, *notes.futures)):
            self._backend, gpu_batch = None, notes.spans
            # Not if there was no work, or if an iteration that failed has left spans before these.
            if gpu_batch and gpu_batch[-1].end_s - gpu_batch[0].start_s <= notes.result.duration_s:
                self._latest, self._wanted = iteration_json(backend), False

    def on_finish(self, request: object, reason: str) -> None:
        pass


def iteration_json(backend: RecordingBackend) -> dict[str, Any]:
    """The iteration in a backend's notes as JSON: its totals, and rows of spans in the order of a page.

    A span is [start, duration, kind, CPU batch letters, text], in milliseconds from the start of the iteration. It may
    begin before the iteration and end after it.
    """
    notes, num_layers = backend.notes, backend.num_layers
    plan, result, spans = notes.plan, notes.result, backend.spans_of([notes])
    zero_s = min(span.start_s for span in spans if span.kind.is_gpu_batch)
    return {
        "iteration": notes.iteration,
        "strategy": plan.strategy.value,
        "num_layers": num_layers,
        "duration_ms": milliseconds(result.duration_s),
        "predicted_ms": milliseconds(plan.predicted.get("iteration_s", 0.0)) or None,
        "gpu_batch_busy_ms": milliseconds(result.gpu_batch_busy_s),
        "gpu_batch_decodes": len(plan.decodes),
        "prefill_tokens": sum(item.num_tokens for item in plan.prefills),
        "cpu_requests": sum(len(cpu_batch.requests) for cpu_batch in plan.cpu_batches),
        "rows": [
            {"title": title, "spans": list(span_rows(spans, kinds, zero_s, num_layers))}
            for title, kinds in ROWS
            if any(span.kind in kinds for span in spans)
        ],
    }


def span_rows(spans: Sequence[Span], kinds: Sequence[Kind], zero_s: float, num_layers: int) -> Iterator[list[Any]]:
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.kind in kinds:
            start_ms, duration_ms = milliseconds(span.start_s - zero_s), milliseconds(span.duration_s)
            letters = "".join(tag.letter for tag in span.cpu_batches)
            text = f"{span_name(span, num_layers)}; {span.work.requests} requests, {span.work.tokens} tokens"
            yield [start_ms, duration_ms, span.kind.name.lower(), letters, text]


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


# -- files -------------------------------------------------------------------------------------------------------------
# A timeline as two files in one folder: a trace for viewers and a picture.


def names_file(target: Path) -> bool:
    """Whether ``target`` names one of the two files; otherwise it is a folder for both."""
    return target.suffix in (".json", ".png")


def write_timeline(timeline: Timeline, target: Path) -> tuple[Path, Path]:
    """Write trace and picture in one folder, see :func:`names_file`; returns their paths.

    Raises:
        OSError: the files cannot be written.
    """
    import apex.environment  # noqa: F401  before matplotlib
    from apex.timeline.figure import draw_timeline  # here, because matplotlib loads slowly

    stem = target.with_suffix("") if names_file(target) else target / f"{timeline.system}-timeline"
    trace, picture = Path(f"{stem}.json"), Path(f"{stem}.png")
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_text(json.dumps(trace_json(timeline)) + "\n")
    draw_timeline(timeline).savefig(picture, dpi=160)
    return trace, picture
