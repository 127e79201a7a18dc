"""What an executor did and when, over a few consecutive iterations; written for trace viewers and as a picture.

``apex/timeline_recorder.py`` records a timeline, ``apex/timeline_figure.py`` draws it. Times are those of the backend's
own clock. On a GPU that works behind the host's back they are the host's: when it launched an operation and came back.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Kind(enum.Enum):
    """What a span is. The first six happen one after the other on the thread that drives the lane."""

    LINEAR = "lane: linear layers"
    ATTENTION = "lane: attention"
    STEP = "cohorts: own steps"
    WAIT = "lane waits"
    SWAP = "swaps"
    OTHER = "host work"  # of an iteration: batches are made, cohorts handed over to the CPU worker
    CPU_ATTENTION = "CPU attention"
    TO_HOST = "PCIe to host"
    TO_GPU = "PCIe to GPU"

    @property
    def is_lane(self) -> bool:
        return self not in (Kind.CPU_ATTENTION, Kind.TO_HOST, Kind.TO_GPU)


@dataclass(frozen=True)
class Load:
    """How much a lane or cohort holds; ``context_tokens`` are those attended to, summed over the requests."""

    tokens: int = 0
    requests: int = 0
    context_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(
            self.tokens + other.tokens, self.requests + other.requests, self.context_tokens + other.context_tokens
        )


@dataclass(frozen=True)
class CohortTag:
    """A cohort's number in the order of opening, and its slot: the lowest that no other cohort had at the time."""

    number: int
    slot: int

    @property
    def letter(self) -> str:
        return chr(ord("A") + self.slot) if self.slot < 26 else f"#{self.slot}"


@dataclass(frozen=True)
class Span:
    """One operation. ``layer`` is a boundary's or an attention's, as in :class:`swiftllm.backend.Backend`.

    ``cohorts`` took part: the riders of a boundary, the owner of a step or ticket. ``after`` are the ``index`` of spans
    that had to end first: a ticket's boundary, a rider's ticket; those outside the timeline are left out.
    """

    index: int
    kind: Kind
    start_s: float
    end_s: float
    iteration: int
    layer: int | None = None
    load: Load = Load()
    cohorts: tuple[CohortTag, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Poll:
    """A cohort at the lane's layer whose ticket was not ready: the lane went on without it."""

    time_s: float
    iteration: int
    layer: int
    cohort: CohortTag


@dataclass(frozen=True)
class Iteration:
    """One iteration's account; busy times as in :class:`swiftllm.plan.StepResult`, ``predicted_s`` where planned."""

    index: int
    strategy: str
    start_s: float
    end_s: float
    lane_busy_s: float
    cpu_busy_s: float
    predicted_s: float | None


@dataclass(frozen=True)
class Timeline:
    """Consecutive iterations of a run. CPU spans may begin before the first of them and end after the last.

    ``system`` and ``setting`` say in words what ran where; ``simulated`` that no time here was measured.
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
        """In the order of appearance."""
        return tuple(dict.fromkeys(iteration.strategy for iteration in self.iterations))


# -- files ------------------------------------------------------------------------------------------------------------


def names_file(target: Path) -> bool:
    """Whether ``target`` names one of the two files, rather than a folder for both."""
    return target.suffix in (".json", ".png")


def timeline_paths(target: Path, system: str) -> tuple[Path, Path]:
    """Where the trace and the picture go: beside each other, see :func:`names_file`."""
    if names_file(target):
        return target.with_suffix(".json"), target.with_suffix(".png")
    return target / f"{system}-timeline.json", target / f"{system}-timeline.png"


def write_timeline(timeline: Timeline, target: Path) -> tuple[Path, Path]:
    """Write trace and picture, see :func:`timeline_paths`.

    Raises:
        OSError: the files cannot be written.
    """
    from apex.timeline_figure import draw  # matplotlib takes a while to load: only where something is drawn

    trace, picture = timeline_paths(target, timeline.system)
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_text(json.dumps(trace_json(timeline)) + "\n")
    draw(timeline).savefig(picture, dpi=160)
    return trace, picture


# -- trace event format -----------------------------------------------------------------------------------------------

PROCESSES = {Kind.CPU_ATTENTION: "CPU attention worker", Kind.TO_HOST: "PCIe", Kind.TO_GPU: "PCIe"}
ITERATIONS_ROW = "iterations"


def trace_json(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the trace event format that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) read.

    Complete events in microseconds from the first iteration's start, a thread for each row, arrows from boundary to
    ticket and from ticket to the boundary that took its result.
    """
    zero_s = timeline.iterations[0].start_s if timeline.iterations else 0.0

    def us(time_s: float) -> float:
        return round((time_s - zero_s) * 1e6, 3)

    rows = [("lane", ITERATIONS_ROW)]
    for kind in Kind:
        in_kind = [span for span in timeline.spans if span.kind is kind]
        rows += sorted({_row(span) for span in in_kind})
    processes = list(dict.fromkeys(process for process, _ in rows))
    places = {row: (processes.index(row[0]) + 1, thread + 1) for thread, row in enumerate(rows)}

    def place(row: tuple[str, str]) -> dict[str, int]:
        pid, tid = places[row]
        return {"pid": pid, "tid": tid}

    events: list[dict[str, Any]] = []
    for (process, name), (pid, tid) in places.items():
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}},
            {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}},
            {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}},
        ]
    strategies = {iteration.index: iteration.strategy for iteration in timeline.iterations}
    for iteration in timeline.iterations:
        events.append(
            {
                "ph": "X", "cat": "iteration", "name": f"{iteration.index}: {iteration.strategy}",
                "ts": us(iteration.start_s), "dur": us(iteration.end_s) - us(iteration.start_s),
                **place(rows[0]),
                "args": {
                    "lane_busy_ms": iteration.lane_busy_s * 1e3,
                    "cpu_busy_ms": iteration.cpu_busy_s * 1e3,
                    "predicted_ms": None if iteration.predicted_s is None else iteration.predicted_s * 1e3,
                },
            }
        )  # fmt: skip
    for span in timeline.spans:
        events.append(
            {
                "ph": "X", "cat": span.kind.value, "name": span_name(span, timeline.num_layers),
                "ts": us(span.start_s), "dur": max(0.0, us(span.end_s) - us(span.start_s)),
                **place(_row(span)),
                "args": {
                    "iteration": span.iteration,
                    "strategy": strategies.get(span.iteration, "before this window"),
                    "layer": span.layer,
                    "tokens": span.load.tokens,
                    "requests": span.load.requests,
                    "context_tokens": span.load.context_tokens,
                    "cohorts": [f"{tag.letter} (number {tag.number})" for tag in span.cohorts],
                    "span": span.index,
                    "after": list(span.after),
                },
            }
        )  # fmt: skip
    for poll in timeline.polls:
        events.append(
            {
                "ph": "i", "s": "t", "cat": "poll", "name": f"{poll.cohort.letter} not ready at {poll.layer}",
                "ts": us(poll.time_s), **place(rows[0]),
                "args": {"iteration": poll.iteration, "layer": poll.layer},
            }
        )  # fmt: skip
    events += _arrows(timeline, us, place)
    facts = {"system": timeline.system, "setting": timeline.setting, "simulated": timeline.simulated}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def span_name(span: Span, num_layers: int) -> str:
    """A few words for a box: what, which layer, whose."""
    letters = "+".join(tag.letter for tag in span.cohorts)
    if span.kind in (Kind.LINEAR, Kind.STEP):
        what = {-1: "embedding", num_layers - 1: "logits"}.get(span.layer, f"linear {span.layer}")
        if span.kind is Kind.STEP:
            return f"{letters}: {what}"
        return f"{what} + {letters}" if letters else what
    if span.kind is Kind.ATTENTION:
        return f"attention {span.layer}"
    if span.kind is Kind.SWAP:
        return f"swap of {span.load.requests}"
    if span.kind is Kind.OTHER:
        return "hand-over" if span.layer is not None else "preparation"
    what = {Kind.WAIT: "waits for", Kind.CPU_ATTENTION: "attention", Kind.TO_HOST: "q, k, v", Kind.TO_GPU: "output"}
    return f"{letters}: {what[span.kind]} {span.layer}"


def _row(span: Span) -> tuple[str, str]:
    """Process and thread."""
    own = f" {span.cohorts[0].letter}" if span.kind is Kind.STEP and len(span.cohorts) == 1 else ""
    return PROCESSES.get(span.kind, "lane"), f"{span.kind.value}{own}"


def _arrows(timeline: Timeline, us, place) -> Iterator[dict[str, Any]]:
    spans = {span.index: span for span in timeline.spans}
    links = ((spans[index], span) for span in timeline.spans for index in span.after)
    for number, (source, target) in enumerate(links):
        common = {"cat": "dependency", "name": "needs", "id": number}
        yield {"ph": "s", "ts": us(source.start_s), **common, **place(_row(source))}
        yield {"ph": "f", "bp": "e", "ts": us(target.start_s), **common, **place(_row(target))}
