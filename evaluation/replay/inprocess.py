"""Replays a workload against an engine in this process.

Open loop: a request enters when the engine's clock passes its arrival, however busy the engine is. Output
lengths are forced (end-of-sequence ignored) and decoding is greedy, so every system does the same work.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from evaluation.results.progress import TokenProgress
from evaluation.results.records import RequestRecord, record_of
from evaluation.traces.workloads import Workload, WorkloadRequest
from swiftllm.core.request import Request, RequestRefused, SamplingParams

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

IDLE_WAIT_S = 0.05


class ReplayStalled(RuntimeError):
    """The engine made no progress for too long; the message holds its state."""


@dataclass(frozen=True)
class Replay:
    """What came of a replay: a record per request in the workload's order, how long it took by the
    engine's clock in seconds, and the engine's counters over it."""

    records: tuple[RequestRecord, ...]
    wall_s: float
    stats: Mapping[str, Any]


def replay(
    engine: Engine,
    workload: Workload,
    progress: TokenProgress | None = None,
    stall_timeout_s: float = 120.0,
    wait: Callable[[float], None] = time.sleep,
) -> Replay:
    """Run all requests of ``workload`` to their end.

    A refused request becomes a failed record with the engine's message. ``wait`` lets the engine's clock pass
    while nothing is to be done (an engine on a virtual clock gives its own).

    Raises:
        ValueError: the workload is a closed loop, which only servers are sent.
        ReplayStalled: no token, prefill or refusal for ``stall_timeout_s`` seconds of real time.
    """
    if workload.lengths.spec.concurrency is not None:
        raise ValueError("a closed loop is for servers; in this process requests come at their arrivals")
    waiting = sorted(workload.requests, key=lambda request: request.arrival_s)
    waiting.reverse()  # the next one is popped from the end
    live: dict[str, Request] = {}
    refused: dict[str, str] = {}
    before = snapshot(engine)
    start_s = engine.now()
    tokens = 0

    with stall_guard(engine, stall_timeout_s) as still_alive:
        while waiting or engine.has_unfinished():
            while waiting and start_s + waiting[-1].arrival_s <= engine.now():
                request = waiting.pop()
                try:
                    live[request.request_id] = submit(engine, request, start_s)
                except RequestRefused as refusal:
                    refused[request.request_id] = str(refusal)
            if engine.has_unfinished():
                outputs = engine.step()
                tokens += sum(len(output.new_token_ids) for output in outputs)
                still_alive(counts_as_progress(engine))
                if progress is not None:
                    progress.update(tokens)
            elif waiting:
                wait(min(IDLE_WAIT_S, max(0.0, start_s + waiting[-1].arrival_s - engine.now())))
                still_alive(engine.now())

    wall_s = engine.now() - start_s
    records = tuple(
        record_of(live[request.request_id], request.output_len, start_s)
        if request.request_id in live
        else refusal_record(request, refused[request.request_id])
        for request in workload.requests
    )
    return Replay(records, wall_s, difference(snapshot(engine), before))


def submit(engine: Engine, request: WorkloadRequest, start_s: float) -> Request:
    sampling = SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)
    return engine.add_request(
        request.request_id, request.prompt_token_ids, sampling, arrival_s=start_s + request.arrival_s
    )


def refusal_record(request: WorkloadRequest, message: str) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        prompt_len=len(request.prompt_token_ids),
        wanted_output_len=request.output_len,
        failure=f"refused: {message}",
    )


def counts_as_progress(engine: Engine) -> tuple[float, ...]:
    """Counters of which at least one grows whenever a request gets nearer its end."""
    stats = engine.stats()
    return (stats.output_tokens, stats.prefill_tokens, stats.cpu_busy_s)


@contextlib.contextmanager
def stall_guard(engine: Engine, timeout_s: float) -> Iterator[Callable[[object], None]]:
    """Yields a function to call with a value; raises ReplayStalled once that stays the same for too long.

    A step that never returns is interrupted too, by an alarm; that works on the main thread only.
    """
    last_value: object = None
    deadline = time.monotonic() + timeout_s

    def fail(*_: object) -> None:
        raise ReplayStalled(f"no progress for {timeout_s:g} s; engine state: {describe_state(engine)}")

    has_alarm = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def check(value: object) -> None:
        nonlocal last_value, deadline
        now = time.monotonic()
        if value != last_value:
            last_value, deadline = value, now + timeout_s
            if has_alarm:
                signal.setitimer(signal.ITIMER_REAL, timeout_s)
        elif now > deadline:
            fail()

    previous = signal.signal(signal.SIGALRM, fail) if has_alarm else None
    try:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield check
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)


def describe_state(engine: Engine) -> str:
    state = {"now": engine.state(), "counters": snapshot(engine), "engine": engine.describe()}
    return json.dumps(state, default=str)


def snapshot(engine: Engine) -> dict[str, Any]:
    """The engine's counters at this moment (the engine goes on counting in the object it hands out)."""
    stats = engine.stats()
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counters over an interval; counters inside a dict are taken one by one."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            result[name] = difference(value, before.get(name, {}))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result[name] = value - before.get(name, 0)
    return result
