"""Records single iterations of a serving engine for the status page.

A request for the last recording starts the next one. Between recordings nothing is wrapped and nothing costs time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from apex.timeline.recording_backend import RecordingBackend, attach, detach
from apex.timeline.spans import Kind, Span, span_name
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import RequestOutput
from swiftllm.engine.engine import Engine

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
