"""A timeline in the trace event format that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from apex.timeline.spans import Iteration, Kind, Poll, Span, Timeline, span_name

PROCESSES = {Kind.CPU_ATTENTION: "CPU attention worker", Kind.TO_HOST: "PCIe", Kind.TO_GPU: "PCIe"}
ITERATIONS_ROW = ("lane", "iterations")

Event = dict[str, Any]


def trace_json(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline as JSON values.

    It has complete events in microseconds from the first iteration's start, and a thread for each row. Arrows go from a
    boundary to its ticket, and from a ticket to the boundary that used its result.
    """
    trace = _Trace(timeline)
    events = [
        *trace.labels(),
        *map(trace.iteration_event, timeline.iterations),
        *map(trace.span_event, timeline.spans),
        *map(trace.poll_event, timeline.polls),
        *trace.arrows(),
    ]
    facts = {"system": timeline.system, "setting": timeline.setting, "simulated": timeline.simulated}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


class _Trace:
    """Makes events. A row is a pair of names: a process and one of its threads."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.zero_s = timeline.iterations[0].start_s if timeline.iterations else 0.0
        self.strategies = {iteration.index: iteration.strategy for iteration in timeline.iterations}
        rows = [ITERATIONS_ROW]
        for kind in Kind:
            rows += sorted({_row(span) for span in timeline.spans if span.kind is kind})
        processes = list(dict.fromkeys(process for process, _ in rows))
        self.places = {row: (processes.index(row[0]) + 1, thread + 1) for thread, row in enumerate(rows)}

    def us(self, time_s: float) -> float:
        return round((time_s - self.zero_s) * 1e6, 3)

    def place(self, row: tuple[str, str]) -> dict[str, int]:
        pid, tid = self.places[row]
        return {"pid": pid, "tid": tid}

    def labels(self) -> Iterator[Event]:
        for (process, name), (pid, tid) in self.places.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": process}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}

    def iteration_event(self, iteration: Iteration) -> Event:
        return {
            "ph": "X", "cat": "iteration", "name": f"{iteration.index}: {iteration.title}",
            "ts": self.us(iteration.start_s), "dur": self.us(iteration.end_s) - self.us(iteration.start_s),
            **self.place(ITERATIONS_ROW),
            "args": {
                "lane_busy_ms": iteration.lane_busy_s * 1e3,
                "cpu_busy_ms": iteration.cpu_busy_s * 1e3,
                "predicted_ms": None if iteration.predicted_s is None else iteration.predicted_s * 1e3,
            },
        }  # fmt: skip

    def span_event(self, span: Span) -> Event:
        return {
            "ph": "X", "cat": span.kind.value, "name": span_name(span, self.timeline.num_layers),
            "ts": self.us(span.start_s), "dur": max(0.0, self.us(span.end_s) - self.us(span.start_s)),
            **self.place(_row(span)),
            "args": {
                "iteration": span.iteration,
                "strategy": self.strategies.get(span.iteration, "before this window"),
                "layer": span.layer,
                "tokens": span.work.tokens,
                "requests": span.work.requests,
                "context_tokens": span.work.context_tokens,
                "cohorts": [f"{tag.letter} (number {tag.number})" for tag in span.cohorts],
                "span": span.index,
                "after": list(span.after),
            },
        }  # fmt: skip

    def poll_event(self, poll: Poll) -> Event:
        return {
            "ph": "i", "s": "t", "cat": "poll", "name": f"{poll.cohort.letter} not ready at {poll.layer}",
            "ts": self.us(poll.time_s), **self.place(ITERATIONS_ROW),
            "args": {"iteration": poll.iteration, "layer": poll.layer},
        }  # fmt: skip

    def arrows(self) -> Iterator[Event]:
        spans = {span.index: span for span in self.timeline.spans}
        links = ((spans[index], span) for span in self.timeline.spans for index in span.after)
        for number, (source, target) in enumerate(links):
            common = {"cat": "dependency", "name": "needs", "id": number}
            yield {"ph": "s", "ts": self.us(source.start_s), **common, **self.place(_row(source))}
            yield {"ph": "f", "bp": "e", "ts": self.us(target.start_s), **common, **self.place(_row(target))}


def _row(span: Span) -> tuple[str, str]:
    own = f" {span.cohorts[0].letter}" if span.kind is Kind.STEP and len(span.cohorts) == 1 else ""
    return PROCESSES.get(span.kind, "lane"), f"{span.kind.value}{own}"
