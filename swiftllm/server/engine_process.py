"""The engine's process: an engine on its own thread, and the connection to its front end."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from swiftllm.core.request import FIELD_NAMES, SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.processes import DeviceThread
from swiftllm.runtime.execution_context import serve_from_here
from swiftllm.sampling.grammar import CompiledGrammar, GrammarCompiler
from swiftllm.server.client import EngineClient, EngineGone
from swiftllm.server.engine_loop import EngineLoop, Observer, OpenRequest, watch_engine
from swiftllm.server.engine_status import EngineHistograms, Health, Snapshot
from swiftllm.server.messages import (
    Ask,
    Delta,
    End,
    Ends,
    Failure,
    FrontEndLink,
    NotBuilt,
    Ready,
    Report,
    ResetPrefixCache,
    ServiceLimits,
    Step,
    Submit,
    Submitted,
    ToEngine,
    make_ends,
)

# -- the engine on its thread ------------------------------------------------------------------------------------------
# An engine on its own thread, for a front end at the other end of a connection.

OWN = {"max_tokens", "seed"}  # what outputs of one body differ in

logger = logging.getLogger(__name__)


class IterationRecorder(Observer, Protocol):
    """Records single iterations of the engine. Another package implements it."""

    def latest(self) -> Mapping[str, Any] | None:
        """The last recorded iteration, in the status page's format; requests the next one. Never blocks; any thread."""


class EngineService:
    """One engine for one front end.

    ``engine`` belongs to the engine's thread from :meth:`start` to :meth:`close`.
    """

    def __init__(
        self,
        engine: Engine,
        limits: ServiceLimits = ServiceLimits(),  # noqa: B008  frozen
        recorder: IterationRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``recorder`` gives the status page its timeline. ``clock`` (seconds) measures deadlines and stalls."""
        self.engine = engine
        self.limits = limits
        self._clock = clock
        self._recorder = recorder
        self._histograms = EngineHistograms(engine.state.limits.max_model_len, engine.scheduler.slo)
        self._loop = EngineLoop(engine, clock, limits.stall_timeout_s)
        self._loop.observers += [self._histograms, *([] if recorder is None else [recorder])]
        self._open_requests = self._loop.open_requests
        self._stop_watch = threading.Event()
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._awaited: set[int] = set()  # numbers of requests whose grammars are being compiled
        self._threads = [
            DeviceThread(self._loop.run, name="engine"),
            DeviceThread(watch_engine, self._loop, self._stop_watch, name="watchdog"),
        ]
        self._listener = DeviceThread(self._listen, name="front end")

    def add_observer(self, observer: Observer) -> None:
        """Have ``observer`` called after every step and every end of a request."""
        self._loop.observers.append(observer)

    def ready(self) -> Ready:
        """What the front end must know of the engine."""
        engine, tokenizer = self.engine, self.engine.tokenizer
        return Ready(
            engine.describe(),
            self.limits,
            engine.request_limits,
            engine.state.limits.max_num_seqs,
            sorted(engine.eos_token_ids),
            None if tokenizer is None else tokenizer.folder,
            engine.kv.hashes is not None,
            engine.scheduler.slo,
            self._recorder is not None,
        )

    def start(self, link: FrontEndLink) -> None:
        """Serve the front end at the other end of ``link``."""
        self._loop.link = link
        link.send(self.ready())
        for thread in (*self._threads, self._listener):
            thread.start()

    def wait_until_left(self) -> None:
        """Wait until the front end has closed the connection, or has ended."""
        self._listener.join()

    def snapshot(self) -> Snapshot:
        """The state after the last step. From any thread."""
        return self._loop.snapshot()

    @property
    def health(self) -> Health:
        return self._open_requests.health

    # -- the front end's messages, on the listener's thread ----------------------------------------------------------

    def _listen(self) -> None:
        for message in self._loop.link.messages():
            self._handle(message)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit() if message.grammar is not None:
                with self._open_requests.lock:
                    self._awaited.update(submitted.number for submitted in message.requests)
                self._compiling.submit(self._accept_compiled, message)
                return
            case Submit():
                self._accept(message, message.requests, None)
            case End():
                self._end(message)
            case ResetPrefixCache():
                self._open_requests.reset_prefix_cache()
            case Ask():
                self._loop.link.send(self._report(message.wants_timeline))
        self._count_taken()

    def _count_taken(self) -> None:
        """A message has been passed on. The front end is told with the next sign of life."""
        with self._open_requests.lock:
            self._loop.num_taken += 1

    def _accept_compiled(self, message: Submit) -> None:
        """Accept requests with a grammar, as far as they have not been aborted meanwhile."""
        try:
            assert message.grammar is not None
            grammar, error = self._compile(*message.grammar), None
        except Exception as raised:  # the front end has compiled it before
            logger.exception("a grammar of request %s cannot be compiled here", message.requests[0].request_id)
            grammar, error = None, raised
        self._count_taken()
        with self._open_requests.lock:
            requests = [submitted for submitted in message.requests if submitted.number in self._awaited]
            self._awaited.difference_update(submitted.number for submitted in requests)
            if error is None:
                self._accept(message, requests, grammar)
            else:
                self._refuse(requests, str(error))

    def _compile(self, kind: str, text: str) -> CompiledGrammar:
        engine = self.engine
        if self._compiler is None:
            self._compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size, engine.eos_token_ids)
        return self._compiler.compile(kind, text)

    def _accept(self, message: Submit, requests: Sequence[Submitted], grammar: CompiledGrammar | None) -> None:
        """Queue these requests of a message."""
        prompts = [array("i", prompt) for prompt in message.prompts]
        shared = SamplingParams(**message.sampling, grammar=grammar)
        if not self._open_requests.add([self._entry(submitted, prompts, shared) for submitted in requests]):
            self._refuse(requests, self.health.reason)

    def _entry(self, submitted: Submitted, prompts: Sequence[array], shared: SamplingParams) -> OpenRequest:
        engine, request_id = self.engine, submitted.request_id
        if request_id in engine.state.requests:  # aborted, but CPU attention still uses its blocks
            request_id = f"{request_id} ({submitted.number})"
        changes = submitted.changes
        if changes.keys() <= OWN:
            sampling = shared.varied(**changes)
        else:
            sampling = SamplingParams(**{name: getattr(shared, name) for name in FIELD_NAMES} | changes)
        request = engine.make_request(
            request_id,
            prompts[submitted.prompt],
            sampling,
            service_class=submitted.service_class,
            cache_salt=submitted.cache_salt,
            is_checked=True,
        )
        deadline_s = None if submitted.timeout_s is None else self._clock() + submitted.timeout_s
        return OpenRequest(request, submitted.number, deadline_s)

    def _refuse(self, requests: Iterable[Submitted], reason: str) -> None:
        failure = Failure("engine_error", reason)
        self._loop.link.post_step(Step([Delta(failure=failure, number=submitted.number) for submitted in requests]))

    def _end(self, message: End) -> None:
        there = self._open_requests
        with there.lock:
            for number in message.numbers:
                entry = there.numbered(number)
                if number in self._awaited:
                    self._awaited.remove(number)
                    there.finished[message.reason or "abort"] += 1
                    if message.reason is None:
                        self._loop.link.post_step(Step([Delta(finish_reason="abort", number=number)]))
                elif entry is not None and (message.reason is None or there.end_request(entry, message.reason)):
                    there.abort_requests([entry.request.request_id])

    def _report(self, wants_timeline: bool) -> Report:
        timeline = self._recorder.latest() if wants_timeline and self._recorder is not None else None
        with self._histograms.lock:
            outcomes = [(*key, count) for key, count in self._histograms.slo_outcomes.items()]
            return Report(self.snapshot(), self._histograms.all, outcomes, timeline)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort all open requests, end the engine's thread and close the engine.

        Waits ``drain_timeout_s`` for a step that hangs; then the thread is left running and the engine open.
        """
        self._compiling.shutdown(wait=False, cancel_futures=True)
        if self._loop.has_link:
            with self._open_requests.lock:
                entries = list(self._open_requests.entries.values())
                self._loop.fail_requests(entries, "shutdown", "the server shut down before the request was done")
        self._open_requests.close()
        self._stop_watch.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self.limits.drain_timeout_s)
        if self._threads[0].is_alive():
            logger.critical("the engine's thread hangs and is left running")
        else:
            self.engine.close()


# -- the process -------------------------------------------------------------------------------------------------------
# The engine in a process of its own, whose parent is the front end.
#
# The parent keeps signals, logs and the exit status. The engine's process ignores the signals of a terminal; it ends
# when the connection closes, however the parent has ended.

LOOK_EVERY_S = 0.2
END_GRACE_S = 5.0
EXIT_ALONE = 1
YOUNG_OBJECTS = 20_000  # net of those freed, before Python looks for garbage; a step of 64 streams has some 700


class EngineProcess:
    """Starts the process. ``build`` makes the service there, so it must be importable; it may raise ValueError or
    OSError for what the user can mend."""

    def __init__(self, build: Callable[[], EngineService]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._ends, theirs = make_ends()
        # A fresh Python: CUDA does not survive a fork.
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(self._build, theirs.messages, theirs.served), name="engine"
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> EngineClient:
        """Wait until the engine is ready.

        Raises:
            EngineNotBuilt, EngineGone: it never will be.
        """
        return EngineClient(self._ends, self._how_it_ended, self._start_again)

    def _start_again(self) -> Ends:
        """Start another process, when this one has ended or has failed. From any thread."""
        with self._lock:
            if self._is_closed:
                raise EngineGone("the server ends")
            self._end(END_GRACE_S)
            self._start()
            return self._ends

    def _how_it_ended(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        if status is None:
            return "it has closed the connection"
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it exited with {status}"

    def close(self, timeout_s: float) -> None:
        """Wait until the process has ended, at most ``timeout_s``; then kill it. The connection is closed first."""
        with self._lock:
            self._is_closed = True
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._ends.close()
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def run_engine(build: Callable[[], EngineService], *sockets: object) -> None:
    """The engine's process: serve until the front end has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the front end drains, and then closes the connection
        signal.signal(ignored, signal.SIG_IGN)
    link = FrontEndLink(Ends(*sockets))
    is_built = threading.Event()
    DeviceThread(end_if_alone, link, is_built, name="while building").start()
    serve_from_here()
    try:
        service = build()
    except (ValueError, OSError) as error:
        is_built.set()
        link.send(NotBuilt(str(error)))
        return
    calm_garbage_collection()
    is_built.set()
    service.start(link)
    service.wait_until_left()
    DeviceThread(exit_after, service.limits.drain_timeout_s + END_GRACE_S, name="end").start()
    service.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(0)  # Python's own clean-up takes a second, and waits for what hangs


def calm_garbage_collection() -> None:
    """Call it once all is built: what there is now is never looked at again, and what is new seldom. Otherwise one step
    of thirty waits 1 to 2 ms for a collection, and some wait 100 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(EXIT_ALONE)


def end_if_alone(link: FrontEndLink, is_built: threading.Event) -> None:
    """End this process if the front end ends before the engine is built."""
    while not is_built.is_set():
        if link.has_hung_up(LOOK_EVERY_S) and not is_built.is_set():  # once built, the service ends it
            os._exit(EXIT_ALONE)
