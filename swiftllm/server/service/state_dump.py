"""The state of an engine as text, for the log after a failure or a stall."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator, Sequence

from swiftllm.core.request import Request
from swiftllm.engine.engine import Engine

MAX_REQUESTS = 50


def dump_state(engine: Engine) -> str:
    """Queues, CPU batches and the stack of every thread. From any thread; never raises."""
    try:
        return "\n".join([*_engine_lines(engine), *_thread_lines()])
    except Exception as error:  # the engine's thread may be changing what is read here
        return f"no report could be made of the engine's state: {error!r}"


def _engine_lines(engine: Engine) -> Iterator[str]:
    yield f"engine: {engine.status()}"
    state = engine.state
    yield f"waiting: {_requests(state.waiting)}"
    for tier, queue in state.running.items():
        yield f"running in the {tier.value.upper()} tier: {_requests(queue)}"
    yield f"leaving: {_requests([request for request in state.requests.values() if request.is_finished])}"
    for cpu_batch in engine.executor.cpu_batches:
        future = cpu_batch.future
        attention = "no" if future is None else "finished" if future.ready() else "unfinished"
        members = ", ".join(cpu_batch.request_ids)
        yield f"CPU batch before stage {cpu_batch.stage}, {attention} attention: {members}"
    yield f"at work: {_requests(engine.at_work())}"


def _requests(requests: Sequence[Request]) -> str:
    shown = [f"{r.request_id} ({r.num_computed_tokens}/{r.num_tokens} tokens)" for r in requests[:MAX_REQUESTS]]
    more = [f"and {len(requests) - MAX_REQUESTS} more"] if len(requests) > MAX_REQUESTS else []
    return ", ".join(shown + more) or "none"


def _thread_lines() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}:"
        yield "".join(traceback.format_stack(frame)).rstrip()
