"""An engine on a thread of its own, served to asyncio: requests in from any event loop, streams of tokens out."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swiftllm.core.request import RequestRefused, SamplingParams, TokenLogprob
from swiftllm.engine.engine import Engine
from swiftllm.server.service.engine_loop import EngineLoop, Observer
from swiftllm.server.service.open_requests import Entry, Ledger, QueueFull, ServiceStopping
from swiftllm.server.service.snapshot import Health, Snapshot
from swiftllm.server.service.token_streams import Delta, Mailbox, RequestFailed, TokenStream
from swiftllm.server.service.watchdog import Watchdog

__all__ = [
    "Delta",
    "EngineService",
    "Health",
    "NewRequest",
    "Observer",
    "QueueFull",
    "RequestFailed",
    "ServiceLimits",
    "ServiceStopping",
    "Snapshot",
    "TokenLogprob",
    "TokenStream",
]


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceLimits:
    """What the service puts up with.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    max_queued_requests: int = 1024
    """Requests waiting or running at once; one more is refused."""
    request_timeout_s: float | None = None
    """Seconds after which a request that is not done fails, unless it brings a time of its own; by default never."""
    stall_timeout_s: float = 60.0
    """Seconds without any progress after which the watchdog reports the state of things and acts."""
    drain_timeout_s: float = 30.0
    """Seconds that requests under way are given to end when the service stops."""

    def __post_init__(self) -> None:
        if self.max_queued_requests < 1:
            raise ValueError(f"max_queued_requests={self.max_queued_requests!r} must be at least 1")
        for name in ("request_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ValueError(f"{name}={seconds!r} must be above 0")


@dataclass(frozen=True)
class NewRequest:
    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds until its deadline; None: the service's own."""


class EngineService:
    """One engine for any number of clients.

    ``engine`` belongs to the engine's thread from :meth:`start` to :meth:`close`: other threads may read only what
    never changes, which is ``tokenizer``, ``describe()`` and ``scheduler.limits``.
    """

    def __init__(
        self, engine: Engine, limits: ServiceLimits = ServiceLimits(), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` (seconds) is what deadlines and stalls are measured by."""
        self.engine = engine
        self.limits = limits
        self._clock = clock
        self._ledger = Ledger(limits.max_queued_requests, clock)
        self._loop = EngineLoop(engine, self._ledger, clock, limits.stall_timeout_s)
        self._watchdog = Watchdog(engine, self._ledger, self._loop, clock, limits.stall_timeout_s)
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._threads = [
            threading.Thread(target=self._loop.run, name="engine", daemon=True),
            threading.Thread(target=self._watchdog.run, name="watchdog", daemon=True),
        ]

    def start(self) -> None:
        """Start the engine's thread, and the one that watches it."""
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Sequence[NewRequest]) -> list[TokenStream]:
        """Take all of these requests or none; their streams belong to the running event loop.

        Reads only what never changes of the engine, and so never waits for a step.

        Raises:
            RequestRefused: one of them can never be served; the message names the limit it hits.
            QueueFull: too many are waiting or running.
            ServiceStopping: nothing new is taken any more.
        """
        try:
            mailbox = self._mailbox(asyncio.get_running_loop())
            entries = [self._entry(request, mailbox) for request in requests]
            self._ledger.take(entries)
        except (RequestRefused, QueueFull, ServiceStopping):
            with self._ledger.lock:
                self._ledger.num_refused += len(requests)
            raise
        return [entry.stream for entry in entries]

    def _mailbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._ledger.lock:
            self._mailboxes = {loop: box for loop, box in self._mailboxes.items() if not loop.is_closed()}
            return self._mailboxes.setdefault(loop, Mailbox(loop))

    def _entry(self, new: NewRequest, mailbox: Mailbox) -> Entry:
        request = self.engine.make_request(new.request_id, new.prompt_token_ids, new.sampling)
        if new.request_id in self.engine.scheduler.requests:  # aborted, and CPU attention still holds its blocks
            raise RequestRefused(f"request id {new.request_id!r} is already in use; ids must be unique")
        timeout_s = self.limits.request_timeout_s if new.timeout_s is None else new.timeout_s
        deadline_s = None if timeout_s is None else self._clock() + timeout_s
        return Entry(request, TokenStream(new.request_id, mailbox, request.prompt_logprobs), deadline_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Have these requests ended, wherever they stand; those already over are ignored. From any thread."""
        self._ledger.abort(request_ids)

    def end(self, request_id: str, reason: str) -> None:
        """What was wanted of a request is there, for ``reason``; ignored if the engine has ended it. Any thread."""
        with self._ledger.lock:
            entry = self._ledger.entries.get(request_id)
            if entry is not None and self._ledger.end(entry, reason):
                self._ledger.abort([request_id])

    def add_observer(self, observer: Observer) -> None:
        """Tell ``observer`` of every step and every end of a request."""
        self._loop.observers.append(observer)

    @property
    def is_serving(self) -> bool:
        """Tokens are on their way to an event loop, or from it to clients."""
        return any(mailbox.is_serving for mailbox in list(self._mailboxes.values()))

    def snapshot(self) -> Snapshot:
        """The state after the last step. From any thread."""
        return self._loop.snapshot()

    @property
    def health(self) -> Health:
        return self._ledger.health

    async def drain(self) -> None:
        """Take nothing new, wait for what is under way, and fail what is not done after ``drain_timeout_s``."""
        with self._ledger.lock:
            self._ledger.set_health("ok", Health("stopping", "the server is shutting down"))
        if not await asyncio.to_thread(self._ledger.wait_until_empty, self.limits.drain_timeout_s):
            self._fail_all()

    def _fail_all(self) -> None:
        with self._ledger.lock:
            entries = list(self._ledger.entries.values())
            self._loop.fail(entries, "shutdown", "the server shut down before the request was done")

    def close(self) -> None:
        """Fail what is still under way, end the engine's thread and close the engine.

        A step that hangs is waited for ``drain_timeout_s``; then engine and thread are left as they are.
        """
        with self._ledger.lock:
            self._ledger.health = Health("stopping", "the server has shut down")
            self._fail_all()
            self._ledger.close()
        self._watchdog.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(self.limits.drain_timeout_s)
        if self._threads[0].is_alive():
            logger.critical("the engine's thread hangs and is left behind")
        else:
            self.engine.close()
