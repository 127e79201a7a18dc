"""An engine on its own thread, for a front end at the other end of a connection."""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from swiftllm.core.sampling_params import FIELD_NAMES, SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.sampling.grammar import CompiledGrammar, GrammarCompiler
from swiftllm.server.service.engine_loop import EngineLoop, Observer
from swiftllm.server.service.front_end_link import FrontEndLink
from swiftllm.server.service.histograms import EngineHistograms
from swiftllm.server.service.limits import ServiceLimits
from swiftllm.server.service.messages import (
    Ask,
    End,
    Ready,
    Report,
    ResetPrefixCache,
    Step,
    Submit,
    Submitted,
    ToEngine,
)
from swiftllm.server.service.open_requests import OpenRequest
from swiftllm.server.service.snapshot import Health, Snapshot
from swiftllm.server.service.token_streams import Delta, Failure
from swiftllm.server.service.watchdog import watch_engine
from swiftllm.threads import DeviceThread

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
            engine.admission,
            engine.state.limits.max_num_seqs,
            sorted(engine.eos_token_ids),
            None if tokenizer is None else tokenizer.folder,
            engine.kv.names is not None,
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
