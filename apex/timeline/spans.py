"""The data of a timeline: what an executor did and when, over a few consecutive iterations.

``apex/timeline/recorder.py`` records a timeline and writes its trace and its picture. Times are
those of the backend's clock. A GPU runs asynchronously, so there a span is the host's: from the start of the launch to
its return.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# -- the data ----------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    """What a span is. Spans of the first six kinds follow one another on the GPU batch's thread.

    On hardware the host does not know when swapped blocks are copied: there a swap's span is the time to begin it.
    """

    LINEAR = "GPU batch: linear layers"
    ATTENTION = "GPU batch: attention"
    STEP = "CPU batches: own stages"
    WAIT = "GPU batch waits"
    SWAP_WAIT = "GPU batch waits for swapped blocks"
    OTHER = "host work"  # making batches, submitting CPU batches to the CPU worker
    CPU_ATTENTION = "CPU attention"
    TO_HOST = "PCIe to host"
    TO_GPU = "PCIe to GPU"
    SWAP = "swaps"

    @property
    def is_gpu_batch(self) -> bool:
        return self not in (Kind.CPU_ATTENTION, Kind.TO_HOST, Kind.TO_GPU, Kind.SWAP)


@dataclass(frozen=True)
class SpanWork:
    """What a span worked on: tokens, requests, and the context attended to, summed over the requests."""

    tokens: int = 0
    requests: int = 0
    context_tokens: int = 0

    def __add__(self, other: SpanWork) -> SpanWork:
        return SpanWork(
            self.tokens + other.tokens, self.requests + other.requests, self.context_tokens + other.context_tokens
        )


@dataclass(frozen=True)
class CpuBatchTag:
    """A CPU batch's number in the order of opening, and its slot: the lowest one free at that time."""

    number: int
    slot: int

    @property
    def letter(self) -> str:
        return chr(ord("A") + self.slot) if self.slot < 26 else f"#{self.slot}"


@dataclass(frozen=True)
class Span:
    """One operation. ``layer`` is a stage's or an attention's, as in :class:`swiftllm.engine.backend.Backend`.

    ``cpu_batches`` took part: the joined CPU batches of a stage, or the owner of a stage alone or of an attention task.
    ``after`` has the ``index`` of each span that had to end first: an attention task's stage, a joined CPU batch's
    attention task. Spans outside the timeline are left out.
    """

    index: int
    kind: Kind
    start_s: float
    end_s: float
    iteration: int
    layer: int | None = None
    work: SpanWork = SpanWork()
    cpu_batches: tuple[CpuBatchTag, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Poll:
    """A CPU batch at the GPU batch's layer whose attention task was not ready: the GPU batch went on without it."""

    time_s: float
    iteration: int
    layer: int
    cpu_batch: CpuBatchTag


@dataclass(frozen=True)
class Iteration:
    """One iteration's times; for busy times see :class:`swiftllm.core.plan.StepResult`.

    ``free_running``: whether a CPU batch of its plan may run a stage alone beside the GPU batch, which never waits for
    it.
    """

    index: int
    strategy: str
    start_s: float
    end_s: float
    gpu_batch_busy_s: float
    cpu_busy_s: float
    predicted_s: float | None
    free_running: bool = False

    @property
    def title(self) -> str:
        """The strategy, and whether its CPU batches are free-running."""
        return self.strategy + (" (free-running)" if self.free_running else "")


@dataclass(frozen=True)
class Timeline:
    """Consecutive iterations of a run. CPU spans may begin before the first of them and end after the last.

    ``system`` and ``setting`` describe what ran where; ``simulated`` means that all times are predicted.
    """

    system: str
    setting: str
    simulated: bool
    num_layers: int
    iterations: tuple[Iteration, ...]
    spans: tuple[Span, ...]
    polls: tuple[Poll, ...]

    @property
    def strategies(self) -> tuple[str, ...]:
        """The iterations' titles, in the order of appearance."""
        return tuple(dict.fromkeys(iteration.title for iteration in self.iterations))

    def crossings(self, slot: int, kind: Kind) -> int:
        """Stages that CPU batches of a slot ran: joining with the GPU batch (LINEAR), or by themselves (ALONE)."""
        return sum(span.kind is kind and any(tag.slot == slot for tag in span.cpu_batches) for span in self.spans)


def span_name(span: Span, num_layers: int) -> str:
    """A short name: operation, layer and CPU batches."""
    letters = "+".join(tag.letter for tag in span.cpu_batches)
    if span.kind in (Kind.LINEAR, Kind.STEP):
        ends: dict[int | None, str] = {-1: "embedding", num_layers - 1: "logits"}
        what = ends.get(span.layer, f"linear {span.layer}")
        if span.kind is Kind.STEP:
            return f"{letters}: {what}"
        return f"{what} + {letters}" if letters else what
    if span.kind is Kind.OTHER:
        return "hand-over" if span.layer is not None else "preparation"
    what = {
        Kind.ATTENTION: f"attention {span.layer}",
        Kind.SWAP: f"swap of {span.work.requests}",
        Kind.SWAP_WAIT: f"waits for swapped blocks of layer {span.layer}",
        Kind.WAIT: f"{letters}: waits for {span.layer}",
        Kind.CPU_ATTENTION: f"{letters}: attention {span.layer}",
        Kind.TO_HOST: f"{letters}: q, k, v {span.layer}",
        Kind.TO_GPU: f"{letters}: output {span.layer}",
    }
    return what[span.kind]


# -- the trace event format --------------------------------------------------------------------------------------------
# A timeline in the trace event format that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) read.

PROCESSES = {Kind.CPU_ATTENTION: "CPU attention worker", Kind.TO_HOST: "PCIe", Kind.TO_GPU: "PCIe"}
ITERATIONS = ("GPU batch", "iterations")

Event = dict[str, Any]
Track = tuple[str, str]  # a process and one of its threads


def trace_json(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline as JSON values.

    It has complete events in microseconds from the first iteration's start, and a thread for each track. Arrows go from
    a stage to its attention task, and from an attention task to the stage that used its result.
    """
    zero_s = timeline.iterations[0].start_s if timeline.iterations else 0.0
    strategies = {iteration.index: iteration.strategy for iteration in timeline.iterations}
    spans = {span.index: span for span in timeline.spans}
    tracks = [ITERATIONS]
    for kind in Kind:
        tracks += sorted({track_of(span) for span in timeline.spans if span.kind is kind})
    processes = list(dict.fromkeys(process for process, _ in tracks))
    places = {track: {"pid": processes.index(track[0]) + 1, "tid": thread} for thread, track in enumerate(tracks, 1)}

    def us(time_s: float) -> float:
        return round((time_s - zero_s) * 1e6, 3)

    def event(phase: str, category: str, name: str, start_s: float, track: Track, **others: Any) -> Event:
        return {"ph": phase, "cat": category, "name": name, "ts": us(start_s), **places[track], **others}

    def complete(category: str, name: str, span: Span | Iteration, track: Track, args: Mapping[str, Any]) -> Event:
        duration_us = us(span.end_s) - us(span.start_s)
        return event("X", category, name, span.start_s, track, dur=max(0.0, duration_us), args=args)

    events: list[Event] = []
    for (process, name), place in places.items():
        pid, tid = place["pid"], place["tid"]
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
            {"ph": "M", "name": "thread_name", **place, "args": {"name": name}},
            {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}},
        ]
    for iteration in timeline.iterations:
        args = {
            "gpu_batch_busy_ms": iteration.gpu_batch_busy_s * 1e3,
            "cpu_busy_ms": iteration.cpu_busy_s * 1e3,
            "predicted_ms": None if iteration.predicted_s is None else iteration.predicted_s * 1e3,
        }
        events.append(complete("iteration", f"{iteration.index}: {iteration.title}", iteration, ITERATIONS, args))
    for span in timeline.spans:
        args = {
            "iteration": span.iteration,
            "strategy": strategies.get(span.iteration, "before this window"),
            "layer": span.layer,
            **asdict(span.work),
            "cpu_batches": [f"{tag.letter} (number {tag.number})" for tag in span.cpu_batches],
            "span": span.index,
            "after": list(span.after),
        }
        events.append(complete(span.kind.value, span_name(span, timeline.num_layers), span, track_of(span), args))
    for poll in timeline.polls:
        name = f"{poll.cpu_batch.letter} not ready at {poll.layer}"
        args = {"iteration": poll.iteration, "layer": poll.layer}
        events.append(event("i", "poll", name, poll.time_s, ITERATIONS, s="t", args=args))
    arrows = ((spans[index], span) for span in timeline.spans for index in span.after)
    for number, (source, target) in enumerate(arrows):
        events.append(event("s", "dependency", "needs", source.start_s, track_of(source), id=number))
        events.append(event("f", "dependency", "needs", target.start_s, track_of(target), id=number, bp="e"))
    facts = {"system": timeline.system, "setting": timeline.setting, "simulated": timeline.simulated}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def track_of(span: Span) -> Track:
    own = f" {span.cpu_batches[0].letter}" if span.kind is Kind.STEP and len(span.cpu_batches) == 1 else ""
    return PROCESSES.get(span.kind, "GPU batch"), f"{span.kind.value}{own}"
