"""Replays requests through an engine in this process.

Open loop: a request enters when the engine's clock passes its arrival, however busy the engine is. One that follows
another enters after the end of that one, as the next turn of a conversation does. Output lengths
are forced (end-of-sequence ignored) and decoding is greedy, so every system does the same work.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import threading
import time
from bisect import insort_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from apex.replay.records import REFUSED, Replay, ReplayRequest, RequestRecord, record_of
from swiftllm.core.request import Request, RequestRefused, SamplingParams

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

MOST_IDLE_S = 0.05
STALL_TIMEOUT_S = 120.0
STALL_ALARMS = 8  # in this time


class ReplayStalled(RuntimeError):
    """The engine made no progress for too long; the message holds its state."""


def replay_requests(
    engine: Engine,
    requests: Sequence[ReplayRequest],
    on_progress: Callable[[int], None] | None = None,
    *,
    stall_timeout_s: float = STALL_TIMEOUT_S,
    limit_s: float = math.inf,
    wait: Callable[[float], None] = lambda seconds: time.sleep(min(seconds, MOST_IDLE_S)),
) -> Replay:
    """Run all ``requests`` until they finish, or for ``limit_s`` seconds of the engine's clock.

    A refused request becomes a failed record with the engine's message. A request cut short by ``limit_s`` fails too;
    its record has the tokens so far.

    Args:
        on_progress: called after each step and each wait with the number of output tokens so far.
        stall_timeout_s: seconds of real time.
        wait: sleeps on the engine's clock until the next arrival, or for a shorter time, while there is nothing to do.
            A virtual clock needs its own function.

    Raises:
        ReplayStalled: no token, prefill or refusal for ``stall_timeout_s``.
    """
    waiting = [request for request in reversed(requests) if request.after is None]
    waiting.sort(key=lambda request: request.arrival_s, reverse=True)  # the next one is popped from the end
    following = {request.after: request for request in requests if request.after is not None}
    live: dict[str, Request] = {}
    failures: dict[str, str] = {}
    before = counters_of(engine)
    start_s = engine.now()
    tokens = 0

    def ended(request_id: str) -> None:
        """What follows a request waits from now on."""
        if (request := following.pop(request_id, None)) is not None:
            arrival_s = engine.now() - start_s + request.arrival_s
            if request_id in live:
                request = next_turn(request, live[request_id])
            insort_left(waiting, replace(request, arrival_s=arrival_s), key=lambda one: -one.arrival_s)

    with stall_guard(engine, stall_timeout_s) as still_alive:
        while (waiting or engine.has_unfinished()) and engine.now() - start_s < limit_s:
            while waiting and start_s + waiting[-1].arrival_s <= engine.now():
                request = waiting.pop()
                try:
                    new = engine.make_request(
                        request.request_id,
                        request.prompt_token_ids,
                        sampling_params(request),
                        arrival_s=start_s + request.arrival_s,
                        service_class=request.service_class,
                    )
                    live[request.request_id] = engine.add(new)
                except RequestRefused as refusal:
                    failures[request.request_id] = f"{REFUSED}{refusal}"
                    ended(request.request_id)
            if engine.has_unfinished():
                outputs = engine.step()
                tokens += sum(len(output.new_token_ids) for output in outputs)
                for output in outputs if following else ():
                    if live[output.request_id].is_finished:
                        ended(output.request_id)
                still_alive(progress_counters(engine))
            elif waiting:
                wait(max(0.0, start_s + min(waiting[-1].arrival_s, limit_s) - engine.now()))
                still_alive(engine.now())
            else:  # the last ones were refused
                break
            if on_progress is not None:
                on_progress(tokens)
        wall_s = engine.now() - start_s
        stats = counter_difference(counters_of(engine), before)
        failures |= {
            request.request_id: f"not sent within {limit_s:g} s" for request in (*waiting, *following.values())
        }
        abort_unfinished(engine, live.values())

    records = tuple(
        record_of(live[request.request_id], request.output_len, start_s)
        if request.request_id in live
        else failed_record(request, failures[request.request_id])
        for request in requests
    )
    return Replay(records, wall_s, stats)


def check_requests(engine: Engine, requests: Sequence[ReplayRequest]) -> None:
    """Check that the engine would serve all ``requests``. Runs none of them."""
    for request in requests:
        engine.make_request(request.request_id, request.prompt_token_ids, sampling_params(request))


def next_turn(request: ReplayRequest, before: Request) -> ReplayRequest:
    """A request whose prompt goes on from the one before, with the tokens that this one was answered with."""
    prompt, said = request.prompt_token_ids, (*before.prompt_token_ids, *before.output_token_ids)
    return replace(request, prompt_token_ids=(*said, *prompt[len(said) :])[: len(prompt)])


def sampling_params(request: ReplayRequest) -> SamplingParams:
    return SamplingParams(max_tokens=request.output_len, temperature=0.0, ignore_eos=True)


def failed_record(request: ReplayRequest, failure: str) -> RequestRecord:
    """The record of a request that never entered the engine."""
    return RequestRecord(
        request_id=request.request_id,
        arrival_s=request.arrival_s,
        prompt_len=len(request.prompt_token_ids),
        wanted_output_len=request.output_len,
        failure=failure,
        service_class=request.service_class.value,
    )


def abort_unfinished(engine: Engine, requests: Iterable[Request]) -> None:
    """Abort what is unfinished and step until the engine is empty, as the next replay expects."""
    for request in requests:
        if not request.is_finished:
            engine.abort(request.request_id)
    while engine.has_unfinished():
        engine.step()


# -- stalls -----------------------------------------------------------------------------------------------------------


def progress_counters(engine: Engine) -> tuple[float, ...]:
    """Counters of which at least one grows whenever a request makes progress."""
    stats = engine.stats()
    return (stats.output_tokens, stats.prompt_tokens, stats.cpu_busy_s)


@contextlib.contextmanager
def stall_guard(engine: Engine, timeout_s: float) -> Iterator[Callable[[object], None]]:
    """Yields a function that takes a value, and raises ReplayStalled when that stays the same for ``timeout_s``.

    Alarms count the time. They also interrupt a step that never returns, and a process that is stopped and goes on
    later (Ctrl-Z) gets only one for all of that time. Alarms work on the main thread only; elsewhere a clock counts.
    """
    last_value: object = None
    last_change_s = time.monotonic()
    alarms = 0

    def fail() -> None:
        state = {"now": engine.status(), "counters": counters_of(engine), "engine": engine.describe()}
        raise ReplayStalled(f"no progress for {timeout_s:g} s; engine state: {json.dumps(state, default=str)}")

    def count_alarm(*_: object) -> None:
        nonlocal alarms
        alarms += 1
        if alarms == STALL_ALARMS:
            fail()

    has_alarm = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def check(value: object) -> None:
        nonlocal last_value, last_change_s, alarms
        if value != last_value:
            last_value, last_change_s, alarms = value, time.monotonic(), 0
        elif not has_alarm and time.monotonic() - last_change_s > timeout_s:
            fail()

    previous = signal.signal(signal.SIGALRM, count_alarm) if has_alarm else None
    try:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, timeout_s / STALL_ALARMS, timeout_s / STALL_ALARMS)
        yield check
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)


# -- the engine's counters --------------------------------------------------------------------------------------------


def counters_of(engine: Engine) -> dict[str, Any]:
    """A copy of the engine's counters: ``engine.stats()`` returns the object that it goes on counting in."""
    counters = vars(engine.stats())
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in counters.items()}


def counter_difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Counters over an interval. Dicts of counters are subtracted entry by entry."""
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            result[name] = counter_difference(value, before.get(name, {}))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            result[name] = value - before.get(name, 0)
    return result
