"""The front end's end of the connection to the engine's process."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from swiftllm.core.request import RequestRefused, ServiceClass
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.engine_loop import MAX_INTERVAL_S, PAST_DEADLINE, PATIENCE
from swiftllm.server.engine_status import Health, Snapshot
from swiftllm.server.messages import (
    SERVED,
    Alive,
    Ask,
    Delta,
    End,
    Ends,
    Failure,
    Frames,
    Message,
    NewRequest,
    NotBuilt,
    Ready,
    Report,
    ResetPrefixCache,
    ServiceLimits,
    Step,
    Submit,
    TokenStream,
    checked,
    decode_to_front_end,
    frame,
    receive_one,
)

# -- how many requests are open ----------------------------------------------------------------------------------------
# How many requests of each class are open, and how many may be.

MAX_RETRY_AFTER_S = 60


class QueueFull(RuntimeError):
    """As many requests of a class as allowed are waiting or running.

    ``retry_after_s`` estimates when there is room, from the rate at which the last ones of the class ended.
    """

    def __init__(
        self, limit: int, retry_after_s: int, service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    ) -> None:
        kind = "best-effort requests" if service_class is ServiceClass.BEST_EFFORT else "requests"
        super().__init__(f"{limit} {kind} are waiting or running and no more are accepted: try again later")
        self.limit = limit
        self.retry_after_s = retry_after_s


class ServiceStopping(RuntimeError):
    """The service accepts no new requests: it stops, or its engine is stalled or has failed. The message says which."""


class Places:
    """The places of open requests."""

    def __init__(self, most_open: Callable[[ServiceClass], int], clock: Callable[[], float]) -> None:
        """``most_open`` is the maximum number of open requests of a class."""
        self._most_open = most_open
        self._clock = clock
        self._num_open: Counter[ServiceClass] = Counter()
        self._end_times_s = {service_class: deque[float](maxlen=64) for service_class in ServiceClass}

    def check(self, classes: Iterable[ServiceClass]) -> None:
        """Check that there is a place for each of these requests."""
        for service_class, count in Counter(classes).items():
            limit = self._most_open(service_class)
            too_many = self._num_open[service_class] + count - limit
            if too_many > 0:
                raise QueueFull(limit, self._retry_after_s(too_many, service_class), service_class)

    def take(self, classes: Iterable[ServiceClass]) -> None:
        """Requests have begun; :meth:`check` has let them pass."""
        self._num_open.update(classes)

    def free(self, service_class: ServiceClass) -> None:
        """A request has ended."""
        self._num_open[service_class] -= 1
        self._end_times_s[service_class].append(self._clock())

    def _retry_after_s(self, num_requests: int, service_class: ServiceClass) -> int:
        """Seconds that so many requests take to end at the rate of the last of their class; 1 before any has ended."""
        end_times_s = self._end_times_s[service_class]
        if not end_times_s:
            return 1
        elapsed_s = self._clock() - end_times_s[0]
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_requests * elapsed_s / len(end_times_s))))


# -- the client --------------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 1.0
"""After it the last report stands for a new one: an engine that hangs does not hold up who watches it."""


class EngineNotBuilt(ValueError):
    """The engine could not be built, for a reason that the user can do something about."""


class EngineGone(RuntimeError):
    """The engine's process has ended before the engine was ready. Its standard error says why."""


class EngineClient(asyncio.Protocol):
    """The engine as the front end sees it. Everything but the constructor belongs to one event loop.

    Attributes:
        ready: what never changes about the engine.
        observers: called on the event loop, so quick ones, with the streams that have new tokens and the time (s).
    """

    def __init__(
        self,
        ends: Ends,
        why_gone: Callable[[], str] = lambda: "it has closed the connection",
        start_again: Callable[[], Ends] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Waits until the engine is ready. ``why_gone`` says how its process ended, once it has. ``start_again``
        starts another one.

        Raises:
            EngineNotBuilt, EngineGone: it never will be.
        """
        self._ends = ends
        self._frames = Frames()
        self.ready = self._wait_until_ready(ends, why_gone)
        self.observers: list[Callable[[Iterable[TokenStream], float], object]] = []
        self._why_gone = why_gone
        self._start_again = start_again
        self._restarts_left = self.limits.restart_engine if start_again is not None else 0
        self._restarting: asyncio.Task[None] | None = None
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._places = Places(self.limits.most_open, clock)
        self._open: dict[int, TokenStream] = {}
        self._numbers: dict[str, int] = {}
        self._num_submitted = self._num_refused = 0
        self._num_steps = 0
        self._all_ended = asyncio.Event()
        self._told = Health()
        self._silence = ""  # for how long nothing has come from the engine's process, if that is too long
        self._is_stopping = self._is_closed = False
        self._num_silent = 0  # looks since something has come from the engine
        self._num_sent = self._num_taken = 0  # messages to the engine, and those of them that it says it has taken
        self._num_untaken = 0  # looks since it has taken one, while there is one to take
        self._report = Report(Snapshot(), [], [], None)
        self._asked: deque[asyncio.Future[None]] = deque()
        self._watching: asyncio.Task[None] | None = None

    @staticmethod
    def _wait_until_ready(ends: Ends, why_gone: Callable[[], str]) -> Ready:
        first = receive_one(ends.messages)
        ready = decode_to_front_end(first) if first else None
        if isinstance(ready, NotBuilt):
            raise EngineNotBuilt(ready.reason)
        if not isinstance(ready, Ready):
            raise EngineGone(f"the engine's process is gone: {why_gone()}")
        return ready

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if it has one; the engine has another copy."""
        folder = self.ready.tokenizer_folder
        return None if folder is None else Tokenizer.from_folder(folder, self.ready.request_limits.vocab_size)

    @property
    def limits(self) -> ServiceLimits:
        return self.ready.limits

    async def connect(self) -> None:
        """Belong to the running event loop from now on, until :meth:`close`."""
        loop = asyncio.get_running_loop()
        self._ends.messages.setblocking(False)
        self._ends.served.setblocking(False)
        await loop.create_unix_connection(lambda: self, sock=self._ends.messages)
        self._watching = loop.create_task(self._watch())

    def close(self) -> None:
        """Close the connection; the engine's process then ends."""
        self._is_closed = True
        for task in (self._watching, self._restarting):
            if task is not None:
                task.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._ends.close()

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[NewRequest]) -> list[TokenStream]:
        """Accept all of these requests or none.

        All is checked here, so it never waits for the engine.

        Raises:
            RequestRefused: one of them can never be served; the message names the limit it hits.
            QueueFull: too many requests of their class are waiting or running.
            ServiceStopping: the service accepts no new requests.
        """
        classes = [request.service_class for request in requests]
        self.check_places(classes)
        try:
            requests = checked(requests, self.ready.request_limits)
            ids = [request.request_id for request in requests]
            times = Counter(ids)
            taken = next((i for i in ids if i in self._numbers or times[i] > 1), None)
            if taken is not None:
                raise RequestRefused(f"request id {taken!r} is already in use; ids must be unique")
        except Exception:
            self._num_refused += len(requests)
            raise
        self._places.take(classes)
        timeouts_s = [self.limits.request_timeout_s if r.timeout_s is None else r.timeout_s for r in requests]
        streams = [self._open_stream(*pair) for pair in zip(requests, timeouts_s, strict=True)]
        if requests:
            self._send(Submit.of(requests, [stream.number for stream in streams], timeouts_s))
        return streams

    def check_places(self, classes: Sequence[ServiceClass]) -> None:
        """Check that requests of these classes are accepted now, before their tokens are looked at: refusing many must
        cost little."""
        try:
            if self.health.status != "ok":
                raise ServiceStopping(self.health.reason)
            self._places.check(classes)
        except Exception:
            self._num_refused += len(classes)
            raise

    def _open_stream(self, new: NewRequest, timeout_s: float | None) -> TokenStream:
        now_s, number = self._clock(), self._num_submitted
        self._num_submitted += 1
        stream = TokenStream(new, number, now_s, None if timeout_s is None else now_s + timeout_s)
        self._open[number], self._numbers[new.request_id] = stream, number
        return stream

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Abort these requests, waiting or running; finished ones are ignored."""
        numbers = [self._numbers[request_id] for request_id in request_ids if request_id in self._numbers]
        if numbers:
            self._send(End(numbers))

    def end_request(self, request_id: str, reason: str) -> None:
        """End a request whose output is complete, for ``reason``; ignored if it has ended."""
        number = self._numbers.get(request_id)
        if number is not None:
            self._ended(self._open[number])
            self._send(End([number], reason))

    def _ended(self, stream: TokenStream) -> None:
        del self._open[stream.number], self._numbers[stream.request_id]
        self._places.free(stream.service_class)
        if not self._open:
            self._all_ended.set()

    def _fail(self, streams: Iterable[TokenStream], reason: str, message: str) -> None:
        """End these requests with an error, without waiting for the engine."""
        for stream in streams:
            self.end_request(stream.request_id, reason)
            stream.push_delta(Delta(failure=Failure(reason, message)))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: requests submitted later find none of them."""
        self._send(ResetPrefixCache())

    @property
    def num_open(self) -> int:
        """Number of requests that are waiting or running."""
        return len(self._open)

    async def drain(self) -> None:
        """Refuse new requests, wait for the open ones, and fail those not done after ``drain_timeout_s``."""
        self._is_stopping = True
        self._all_ended.clear()
        if self._open:
            try:
                await asyncio.wait_for(self._all_ended.wait(), self.limits.drain_timeout_s)
            except TimeoutError:
                why = "the server shut down before the request was done"
                self._fail(list(self._open.values()), "shutdown", why)

    # -- the engine's state -----------------------------------------------------------------------------------------

    @property
    def health(self) -> Health:
        """Whether new requests are accepted, and why not."""
        if self._told.status == "failed":
            return self._told
        if self._is_stopping:
            return Health("stopping", "the server is shutting down")
        return Health("stalled", self._silence) if self._silence else self._told

    async def report(self, wants_timeline: bool = False) -> Report:
        """The engine after its last step; after ``REPORT_TIMEOUT_S`` without an answer, as it was last told of."""
        if self._transport is not None and not self._silence:
            answered = asyncio.get_running_loop().create_future()
            self._asked.append(answered)
            self._send(Ask(wants_timeline))
            await asyncio.wait([answered], timeout=REPORT_TIMEOUT_S)
        snapshot = replace(self._report.snapshot, health=self.health, refused=self._num_refused)
        return Report(snapshot, self._report.histograms, self._report.slo_outcomes, self._report.timeline)

    async def snapshot(self) -> Snapshot:
        """The state of :meth:`report`."""
        return (await self.report()).snapshot

    async def _watch(self) -> None:
        """Fail requests in time while nothing comes from the engine's process, which speaks at least once a second, or
        while it takes none of the messages to it.

        Looks are counted, and not seconds: this process may have been stopped itself.
        """
        timeout_s = self.limits.stall_timeout_s
        interval_s = min(MAX_INTERVAL_S, timeout_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            self._num_silent += 1
            self._num_untaken = self._num_untaken + 1 if self._num_sent > self._num_taken else 0
            silent_s, untaken_s = self._num_silent * interval_s, self._num_untaken * interval_s
            streams, limit_s = list(self._open.values()), timeout_s + interval_s
            if silent_s >= limit_s:  # first: a silent process takes nothing either
                stalled_s, why = silent_s, f"the engine's process has said nothing for {silent_s:.0f} s"
            elif untaken_s >= limit_s:
                streams = [stream for stream in streams if stream.is_new]  # it goes on with the others
                what = "taken none of what was sent to it"
                stalled_s, why = untaken_s, f"the engine's process has {what} for {untaken_s:.0f} s"
            else:
                self._silence = ""
                continue
            if not self._silence:
                logger.critical(why)
            self._silence = why
            now_s = self._clock()
            overdue = [stream for stream in streams if stream.deadline_s is not None and stream.deadline_s <= now_s]
            self._fail(overdue, *PAST_DEADLINE)
            if stalled_s >= PATIENCE * timeout_s:
                self._fail([stream for stream in streams if stream.deadline_s is None], "stalled", why)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        if self._transport is not None:
            self._num_sent += 1
            self._transport.write(frame(message))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._told = Health()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._watching is not None:
            self._watching.cancel()
        if self._is_closed:
            return
        has_failed = self._told.status == "failed"
        self._lose_engine(self._told.reason if has_failed else f"the engine's process is gone: {self._why_gone()}")
        while self._asked:
            self._answered()

    def _lose_engine(self, reason: str) -> None:
        """Fail the open requests, and start the engine again if that is still allowed."""
        self._silence = ""
        is_restarted = self._restarts_left > 0 and not self._is_stopping
        if self._open or is_restarted:
            logger.critical(reason)
        self._told = Health("failed", reason)
        if is_restarted:
            self._restarts_left -= 1
            self._told = Health("restarting", f"the engine is being started again, as {reason}")
            self._restarting = asyncio.get_running_loop().create_task(self._restart())
        self._fail(list(self._open.values()), "engine_error", reason)

    async def _restart(self) -> None:
        """Start the engine again, in a thread that does not hold up the end of the server."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def start() -> None:
            outcome: tuple[Ends, Ready] | Exception
            try:
                assert self._start_again is not None  # else no restarts are left
                ends = self._start_again()
                outcome = ends, self._wait_until_ready(ends, self._why_gone)
            except Exception as error:
                outcome = error
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(lambda: done.cancelled() or done.set_result(outcome))

        threading.Thread(target=start, name="restart", daemon=True).start()
        outcome = await done
        if isinstance(outcome, Exception):
            self._lose_engine(f"it could not be started again: {outcome}")
            return
        self._ends, self.ready = outcome
        self._frames, self._num_steps, self._num_silent = Frames(), 0, 0
        self._num_sent = self._num_taken = self._num_untaken = 0
        await self.connect()
        logger.warning("the engine serves again")

    def data_received(self, data: bytes) -> None:
        self._num_silent = 0
        start_s = time.perf_counter()
        deltas: dict[TokenStream, Delta] = {}
        num_steps = self._num_steps
        for message in map(decode_to_front_end, self._frames.feed(data)):
            match message:
                case Step():
                    self._num_steps += 1
                    self._take_step(message, deltas)
                case Alive():
                    self._told = message.health
                    if message.num_taken > self._num_taken:
                        self._num_taken, self._num_untaken = message.num_taken, 0
                    if self._told.status == "failed" and self._restarts_left and self._transport is not None:
                        self._transport.abort()
                case Report():
                    self._report = message
                    self._answered()
        if self._num_steps == num_steps:
            return
        for observer in self.observers:
            observer([stream for stream, delta in deltas.items() if delta.token_ids], self._clock())
        for stream, delta in deltas.items():
            if delta.is_last and stream.number in self._open:
                self._ended(stream)
            stream.push_delta(delta)
        # After the callbacks that the listeners have scheduled.
        asyncio.get_running_loop().call_soon(self._tell_served, self._num_steps, start_s)

    def _answered(self) -> None:
        answered = self._asked.popleft()
        if not answered.done():
            answered.set_result(None)

    def _take_step(self, step: Step, deltas: dict[TokenStream, Delta]) -> None:
        """Add what a step has brought. What has ended here meanwhile gets nothing."""
        for delta in step.deltas:
            stream = self._open.get(delta.number)
            if stream is None:
                continue
            stream.num_cached_tokens = delta.num_cached_tokens
            if delta.prompt_logprobs:
                stream.prompt_logprobs = delta.prompt_logprobs
            if stream in deltas:
                deltas[stream].append(delta)
            else:
                deltas[stream] = delta

    def _tell_served(self, num_steps: int, start_s: float) -> None:
        with suppress(OSError):  # the engine's process has ended, or reads nothing
            self._ends.served.send(SERVED.pack(num_steps, time.perf_counter() - start_s))
