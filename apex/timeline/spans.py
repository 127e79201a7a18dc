"""The data of a timeline: what an executor did and when, over a few consecutive iterations.

``apex/timeline/recorder.py`` records a timeline, ``apex/timeline/files.py`` writes its trace and its picture. Times are
those of the backend's clock. A GPU runs asynchronously, so there a span is the host's: from the start of the launch to
its return.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a span is. Spans of the first six kinds follow one another on the lane's thread.

    On hardware the host does not know when swapped blocks are copied: there a swap's span is the time to begin it.
    """

    LINEAR = "lane: linear layers"
    ATTENTION = "lane: attention"
    STEP = "cohorts: own steps"
    WAIT = "lane waits"
    SWAP_WAIT = "lane waits for swapped blocks"
    OTHER = "host work"  # making batches, submitting cohorts to the CPU worker
    CPU_ATTENTION = "CPU attention"
    TO_HOST = "PCIe to host"
    TO_GPU = "PCIe to GPU"
    SWAP = "swaps"

    @property
    def is_lane(self) -> bool:
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
class CohortTag:
    """A cohort's number in the order of opening, and its slot: the lowest one free at that time."""

    number: int
    slot: int

    @property
    def letter(self) -> str:
        return chr(ord("A") + self.slot) if self.slot < 26 else f"#{self.slot}"


@dataclass(frozen=True)
class Span:
    """One operation. ``layer`` is a boundary's or an attention's, as in :class:`swiftllm.engine.backend.Backend`.

    ``cohorts`` took part: the riders of a boundary, or the owner of a step or ticket. ``after`` has the ``index`` of
    each span that had to end first: a ticket's boundary, a rider's ticket. Spans outside the timeline are left out.
    """

    index: int
    kind: Kind
    start_s: float
    end_s: float
    iteration: int
    layer: int | None = None
    work: SpanWork = SpanWork()
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
    """One iteration's times; for busy times see :class:`swiftllm.core.plan.StepResult`.

    ``free_running``: whether a cohort of its plan may step beside the lane, which never waits for it.
    """

    index: int
    strategy: str
    start_s: float
    end_s: float
    lane_busy_s: float
    cpu_busy_s: float
    predicted_s: float | None
    free_running: bool = False

    @property
    def title(self) -> str:
        """The strategy, and whether its cohorts are free-running."""
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
        """Boundaries that cohorts of a slot crossed: riding with the lane (LINEAR), or by themselves (STEP)."""
        return sum(span.kind is kind and any(tag.slot == slot for tag in span.cohorts) for span in self.spans)


def span_name(span: Span, num_layers: int) -> str:
    """A short name: operation, layer and cohorts."""
    letters = "+".join(tag.letter for tag in span.cohorts)
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
