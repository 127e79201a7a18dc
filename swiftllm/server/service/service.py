"""An engine on its own thread: any asyncio event loop submits requests and gets token streams."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swiftllm.core.request import RequestRefused, SamplingParams, ServiceClass
from swiftllm.engine.engine import Engine
from swiftllm.server.service.engine_loop import EngineLoop, Observer
from swiftllm.server.service.open_requests import OpenRequest, OpenRequests, QueueFull, ServiceStopping
from swiftllm.server.service.snapshot import Health, Snapshot
from swiftllm.server.service.token_streams import DeltaDispatcher, TokenStream
from swiftllm.server.service.watchdog import watch_engine
from swiftllm.threads import DeviceThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    max_queued_requests: int = 1024
    """Maximum number of latency-sensitive requests waiting or running; further ones are refused."""
    max_queued_best_effort: int = 10_000
    """Maximum number of best-effort requests waiting or running, counted apart from the others."""
    request_timeout_s: float | None = None
    """Seconds after which an unfinished request fails, unless it sets its own timeout; by default never."""
    stall_timeout_s: float = 60.0
    """Seconds without progress after which the watchdog logs the engine's state and acts."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get to finish when the service stops."""

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_best_effort"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        for name in ("request_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ValueError(f"{name}={seconds!r} must be above 0")

    def most_open(self, service_class: ServiceClass) -> int:
        """Maximum number of requests of a class waiting or running."""
        is_best_effort = service_class is ServiceClass.BEST_EFFORT
        return self.max_queued_best_effort if is_best_effort else self.max_queued_requests


@dataclass(frozen=True)
class NewRequest:
    """A request to submit to the service."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds until its deadline; None takes the service's ``request_timeout_s``."""
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes."""


class EngineService:
    """One engine for any number of clients.

    ``engine`` belongs to the engine's thread from :meth:`start` to :meth:`close`. Other threads may read only its
    constants: ``tokenizer``, ``describe()`` and ``residents.limits``.
    """

    def __init__(
        self, engine: Engine, limits: ServiceLimits = ServiceLimits(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` (seconds) measures deadlines and stalls."""
        self.engine = engine
        self.limits = limits
        self._clock = clock
        self._open_requests = OpenRequests(limits.most_open, clock)
        self._loop = EngineLoop(engine, self._open_requests, clock, limits.stall_timeout_s)
        self._stop_watch = threading.Event()
        self._dispatchers: dict[asyncio.AbstractEventLoop, DeltaDispatcher] = {}
        self._threads = [
            DeviceThread(self._loop.run, name="engine"),
            DeviceThread(watch_engine, self._loop, self._stop_watch, name="watchdog"),
        ]

    def start(self) -> None:
        """Start the engine's thread and the watchdog's."""
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Sequence[NewRequest]) -> list[TokenStream]:
        """Accept all of these requests or none; their streams belong to the running event loop.

        Reads only constants of the engine, so it never waits for a step.

        Raises:
            RequestRefused: one of them can never be served; the message names the limit it hits.
            QueueFull: too many requests of their class are waiting or running.
            ServiceStopping: the service accepts no new requests.
        """
        try:
            dispatcher = self._dispatcher_of(asyncio.get_running_loop())
            entries = [self._entry(request, dispatcher) for request in requests]
            self._open_requests.add(entries)
        except (RequestRefused, QueueFull, ServiceStopping):
            with self._open_requests.lock:
                self._open_requests.num_refused += len(requests)
            raise
        return [entry.stream for entry in entries]

    def _dispatcher_of(self, loop: asyncio.AbstractEventLoop) -> DeltaDispatcher:
        with self._open_requests.lock:
            self._dispatchers = {loop: box for loop, box in self._dispatchers.items() if not loop.is_closed()}
            return self._dispatchers.setdefault(loop, DeltaDispatcher(loop))

    def _entry(self, new: NewRequest, dispatcher: DeltaDispatcher) -> OpenRequest:
        request = self.engine.make_request(
            new.request_id,
            new.prompt_token_ids,
            new.sampling,
            service_class=new.service_class,
            cache_salt=new.cache_salt,
        )
        if new.request_id in self.engine.residents.requests:  # aborted, but CPU attention still uses its blocks
            raise RequestRefused(f"request id {new.request_id!r} is already in use; ids must be unique")
        timeout_s = self.limits.request_timeout_s if new.timeout_s is None else new.timeout_s
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        return OpenRequest(request, TokenStream(new.request_id, dispatcher, request.prompt_logprobs), deadline_s)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort these requests, waiting or running; finished ones are ignored. From any thread."""
        self._open_requests.abort_requests(request_ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes before the next step: requests submitted later find none of them. Any thread."""
        self._open_requests.reset_prefix_cache()

    def end_request(self, request_id: str, reason: str) -> None:
        """End a request whose output is complete, for ``reason``; ignored if it has ended. From any thread."""
        with self._open_requests.lock:
            entry = self._open_requests.entries.get(request_id)
            if entry is not None and self._open_requests.end_request(entry, reason):
                self._open_requests.abort_requests([request_id])

    @property
    def num_open(self) -> int:
        """Number of requests that are waiting or running."""
        return len(self._open_requests.entries)

    def add_observer(self, observer: Observer) -> None:
        """Have ``observer`` called after every step and every end of a request."""
        self._loop.observers.append(observer)

    @property
    def is_serving(self) -> bool:
        """Whether tokens are on their way to an event loop, or from it to clients."""
        return any(dispatcher.is_serving for dispatcher in list(self._dispatchers.values()))

    def has_open(self, service_class: ServiceClass) -> bool:
        """Whether requests of a class are waiting or running. From any thread."""
        return self._open_requests.has_open(service_class)

    def snapshot(self) -> Snapshot:
        """The state after the last step. From any thread."""
        return self._loop.snapshot()

    @property
    def health(self) -> Health:
        return self._open_requests.health

    async def drain(self) -> None:
        """Refuse new requests, wait for the open ones, and fail those not done after ``drain_timeout_s``."""
        with self._open_requests.lock:
            self._open_requests.set_health("ok", Health("stopping", "the server is shutting down"))
        if not await asyncio.to_thread(self._open_requests.wait_until_empty, self.limits.drain_timeout_s):
            self._fail_all()

    def _fail_all(self) -> None:
        with self._open_requests.lock:
            entries = list(self._open_requests.entries.values())
            self._loop.fail_requests(entries, "shutdown", "the server shut down before the request was done")

    def close(self) -> None:
        """Fail all open requests, end the engine's thread and close the engine.

        Waits ``drain_timeout_s`` for a step that hangs; then the thread is left running and the engine open.
        """
        with self._open_requests.lock:
            self._open_requests.health = Health("stopping", "the server has shut down")
            self._fail_all()
            self._open_requests.close()
        self._stop_watch.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self.limits.drain_timeout_s)
        if self._threads[0].is_alive():
            logger.critical("the engine's thread hangs and is left running")
        else:
            self.engine.close()
