"""Records single iterations of a serving engine for the status page.

A request for the last recording starts the next one. Between recordings nothing is wrapped and nothing costs time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from apex.timeline.recording_backend import Notes, RecordingBackend, attach, detach
from apex.timeline.spans import Kind, Span, span_name
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import RequestOutput
from swiftllm.engine.engine import Engine

ROWS = (
    ("Lane: linear layers", (Kind.LINEAR, Kind.WAIT, Kind.SWAP_WAIT, Kind.OTHER)),
    ("Lane: attention", (Kind.ATTENTION,)),
    ("CPU requests: linear layers", (Kind.STEP,)),
    ("CPU worker: attention", (Kind.CPU_ATTENTION,)),
    ("PCIe to host", (Kind.TO_HOST,)),
    ("PCIe to GPU", (Kind.TO_GPU,)),
    ("Swaps between the tiers", (Kind.SWAP,)),
)


@dataclass
class Recording:
    """One iteration, under way or over; ``plan`` and ``result`` are set once it is over."""

    backend: RecordingBackend
    index: int
    plan: IterationPlan | None = None
    result: StepResult | None = None

    @property
    def notes(self) -> Notes:
        return self.backend.notes

    @property
    def is_complete(self) -> bool:
        """Whether its CPU attention is done too, which may outlast the iteration; before that, times may change."""
        tickets = (*self.notes.carried, *self.notes.tickets)
        return self.result is not None and all(ticket.inner.ready() for ticket in tickets)

    @property
    def is_whole(self) -> bool:
        """Whether the notes cover exactly one iteration with work; a failed iteration in between adds spans."""
        lane = self.notes.spans
        return bool(lane) and lane[-1].end_s - lane[0].start_s <= self.result.duration_s

    def spans(self) -> list[Span]:
        tickets = (*self.notes.carried, *self.notes.tickets)
        return [*self.notes.spans, *(span for ticket in tickets for span in ticket.spans(self.backend.indexes))]


class LiveTimeline:
    """An observer of the engine's service. All methods but :meth:`latest` run on the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_iterations = 0
        self._wanted = False
        self._recording: Recording | None = None
        self._latest: dict[str, Any] | None = None

    def latest(self) -> dict[str, Any] | None:
        """The last recorded iteration, see :func:`iteration_json`, or None; requests the next one. Any thread."""
        self._wanted = True
        return self._latest

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        self._num_iterations += 1
        if self._recording is None:
            if self._wanted:
                self._begin()
            return
        recording = self._recording
        if recording.result is None:
            detach(self._engine.executor, recording.backend)
            recording.plan, recording.result = plan, result
        if recording.is_complete:
            self._recording = None
            if recording.is_whole:
                self._latest, self._wanted = iteration_json(recording), False

    def on_finish(self, request: object, reason: str) -> None:
        pass

    def _begin(self) -> None:
        backend = attach(self._engine.executor, self._engine.residents.requests)
        backend.notes = Notes(self._num_iterations, tuple(backend.outstanding.values()))
        self._recording = Recording(backend, self._num_iterations)


def iteration_json(recording: Recording) -> dict[str, Any]:
    """An iteration as JSON: its totals, and rows of spans in the order in which a page shows them.

    A span is [start, duration, kind, cohort letters, text], in milliseconds from the start of the iteration. It may
    begin before the iteration and end after it.
    """
    plan, result, spans = recording.plan, recording.result, recording.spans()
    zero_s = min(span.start_s for span in spans if span.kind.is_lane)
    num_layers = recording.backend.num_layers
    return {
        "iteration": recording.index,
        "strategy": plan.strategy.value,
        "num_layers": num_layers,
        "duration_ms": milliseconds(result.duration_s),
        "predicted_ms": milliseconds(plan.predicted.get("iteration_s", 0.0)) or None,
        "lane_busy_ms": milliseconds(result.lane_busy_s),
        "lane_decodes": len(plan.decodes),
        "prefill_tokens": sum(item.num_tokens for item in plan.prefills),
        "cpu_requests": sum(len(cohort.requests) for cohort in plan.cohorts),
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
            letters = "".join(tag.letter for tag in span.cohorts)
            text = f"{span_name(span, num_layers)}; {span.work.requests} requests, {span.work.tokens} tokens"
            yield [start_ms, duration_ms, span.kind.name.lower(), letters, text]


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
