"""A timeline in the trace event format that Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from apex.timeline.spans import Iteration, Kind, Span, Timeline, span_name

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
