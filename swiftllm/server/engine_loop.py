"""The engine's thread: carries out orders, steps, delivers tokens, and recovers from steps that raise."""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput, RequestRefused, RequestRefusedForNow, SamplingParams, Tier
from swiftllm.engine.engine import Engine, EngineStalled
from swiftllm.sampling.grammar import GrammarDeadEnd
from swiftllm.scheduling.state import arrival_order
from swiftllm.server.engine_status import Health, Snapshot, dump_state, take_snapshot
from swiftllm.server.messages import Alive, Delta, Failure, FrontEndLink, Step

# -- open requests -----------------------------------------------------------------------------------------------------
# The open requests (accepted, not finished), and the orders of other threads to the engine's thread.


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request and its number in messages. ``deadline_s`` is a time of the service's clock."""

    request: Request
    number: int
    deadline_s: float | None
    num_delivered: int = 0

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and self.deadline_s <= now_s


class ResetOrder:
    """The order to forget all cached prefixes."""


Order = OpenRequest | str | ResetOrder
"""A new request for the engine, the id of one to abort, or a reset of the prefix cache."""


class OpenRequests:
    """Shared by all threads. Hold ``lock`` around any read that a write depends on."""

    def __init__(self, on_health: Callable[[Health], None], clock: Callable[[], float]) -> None:
        """``on_health`` is called with each new health. ``ordered_s``: since when, by ``clock``, an order waits for the
        engine's thread; None if there is none."""
        self.lock = threading.Condition(threading.RLock())
        self.entries: dict[str, OpenRequest] = {}
        self.health = Health()
        self.finished: Counter[str] = Counter()
        self.ordered_s: float | None = None
        self._clock = clock
        self._on_health = on_health
        self._ids: dict[int, str] = {}
        self._orders: list[Order] = []
        self._ended: list[tuple[Request, str]] = []
        self._is_closed = False

    # -- from any thread --------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[OpenRequest]) -> bool:
        """Order the engine to queue these requests; False if it has failed for good."""
        with self.lock:
            if self.health.status == "failed":
                return False
            for entry in entries:
                request_id = entry.request.request_id
                self.entries[request_id], self._ids[entry.number] = entry, request_id
            self._order(entries)
            return True

    def _order(self, orders: Iterable[Order]) -> None:
        with self.lock:
            self._orders += orders
            if self._orders and self.ordered_s is None:
                self.ordered_s = self._clock()
            self.lock.notify_all()

    def numbered(self, number: int) -> OpenRequest | None:
        """The open request of this number, if it is still open."""
        return self.entries.get(self._ids.get(number, ""))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Order these requests aborted; unknown and finished ones are ignored."""
        self._order(request_ids)

    def reset_prefix_cache(self) -> None:
        """Order the prefix cache emptied, before the requests that are added later."""
        self._order([ResetOrder()])

    def set_health(self, old_status: str, health: Health) -> None:
        """Change the health if its status is still ``old_status``."""
        if self.health.status == old_status:
            with self.lock:
                if self.health.status == old_status:
                    self.health = health
                    self._on_health(health)

    def end_request(self, entry: OpenRequest, reason: str) -> bool:
        """Remove an entry; False if another thread has. The caller holds the lock until it has sent what is new."""
        with self.lock:
            request_id = entry.request.request_id
            if self.entries.get(request_id) is not entry:
                return False
            del self.entries[request_id], self._ids[entry.number]
            self.finished[reason] += 1
            self._ended.append((entry.request, reason))
            return True

    def close(self) -> None:
        """End the engine's thread once all orders and other work are done."""
        with self.lock:
            self._is_closed = True
            self.lock.notify_all()

    # -- from the engine's thread -----------------------------------------------------------------------------------

    def wait_for_orders(self, has_work: Callable[[], bool]) -> list[Order] | None:
        """The orders since the last call. Blocks while there are none and ``has_work`` is false.

        Returns None after :meth:`close`, once no orders and no work are left.
        """
        with self.lock:
            self.lock.wait_for(lambda: self._orders or self._is_closed or has_work())
            if self._is_closed and not self._orders and not has_work():
                return None
            orders, self._orders, self.ordered_s = self._orders, [], None
            return orders

    def take_ended(self) -> list[tuple[Request, str]]:
        """Requests that have ended since the last call, with their reasons."""
        if not self._ended:
            return []
        with self.lock:
            ended, self._ended = self._ended, []
        return ended


# -- the request that makes steps fail ---------------------------------------------------------------------------------
# Finds the request that makes steps fail, by bisection, so that all others continue.
#
# After a step that raised, all requests are removed from the engine. The requests of that step (the suspects) run again
# without the others. Mostly this succeeds: the fault was transient, and no request is blamed. If they fail again,
# halves of them are tried, down to single requests. A request is blamed if it fails alone, a harmless request of our
# own then passes, and it fails alone again. If the harmless request keeps failing, the engine itself is broken.
#
# A trial lasts until each of its requests has been computed as a prompt and as a decode, in the tier of its failure.
# Each gets two tokens by then, so there is progress even if the search finds nothing.

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 2  # one sampled from the prompt, one decoded
FAILURES_TO_BLAME = 2
MAX_FAILURES = 5  # in a row, with no request to blame


class EngineBroken(RuntimeError):
    """Steps fail with any request."""


@dataclass(eq=False)
class Trial:
    """Requests to run without the others. ``tier`` is the one they failed in, None if they were in both."""

    requests: Sequence[Request]
    tier: Tier | None = None
    num_failures: int = 0
    wanted_tokens: dict[Request, int] = field(default_factory=dict)

    @property
    def is_passed(self) -> bool:
        return all(request.is_finished or request.output_len >= n for request, n in self.wanted_tokens.items())


class FaultIsolation:
    """State of the search. ``held`` are the unfinished requests kept out of the engine during a trial."""

    def __init__(self, engine: Engine) -> None:
        self.held: dict[str, Request] = {}
        self._engine = engine
        self._trial: Trial | None = None
        self._harmless: Trial | None = None
        self._to_try: list[Trial] = []  # a stack: the next one is last
        self._num_unexplained = 0

    @property
    def is_under_way(self) -> bool:
        return self._trial is not None

    def release_request(self, request_id: str) -> None:
        """Queue a held request in the engine; ignored if it is not held."""
        request = self.held.pop(request_id, None)
        if request is not None:
            self._engine.add(request, check_targets=False)

    def step_failed(self, culprit: str | None = None) -> Request | None:
        """Recover the engine and begin the next trial. ``culprit``: the request that the error names, if it does; it is
        blamed at once.

        Returns the blamed request once there is one; it is then neither in the engine nor in ``held``.

        Raises:
            EngineBroken: steps fail with any request.
        """
        # Before the recovery, which forgets what the step worked on and takes all requests out of their tiers.
        suspects = self._engine.at_work()
        tiers = {request: request.tier for request in suspects}
        self._hold_all()
        failed, self._trial = self._trial, None
        blamed = None if culprit is None else self.held.pop(culprit, None)
        if blamed is not None:
            # The trial that failed says nothing about its other requests, so they are tried again without this one.
            self._to_try += [] if failed is None else [failed]
        elif failed is None:
            # No trial has failed, but a step with all requests: for ever, if requests fail only together.
            self._num_unexplained += 1
            if self._num_unexplained > MAX_FAILURES:
                raise EngineBroken(f"{MAX_FAILURES} steps in a row failed, though none of their requests fails alone")
            self._to_try = [_trial(suspects, tiers)]
        elif len(failed.requests) > 1:
            # Only those that were at work, since the others of the trial had no part in the step that raised.
            self._to_try += _halves([request for request in failed.requests if request in tiers], tiers)
        else:
            failed.num_failures += 1
            if failed is self._harmless:
                if failed.num_failures == MAX_FAILURES:  # a transient fault may hit it, too
                    raise EngineBroken("even a harmless request fails")
                self._to_try.append(failed)
            elif failed.num_failures < FAILURES_TO_BLAME:
                # The harmless one, last in the stack, runs first: if it fails, too, the request is not to blame.
                self._to_try += [failed, self._make_harmless(failed)]
            else:
                blamed = self.held.pop(failed.requests[0].request_id, None)  # None: it has finished
                self._num_unexplained = 0
        self._begin_next()
        return blamed

    def step_done(self) -> None:
        """A step has succeeded: if that ends the current trial, begin the next."""
        if self._trial is None:
            self._num_unexplained = 0
        elif self._trial.is_passed:
            # The passed ones make way for the next trial. If there is none they simply go on.
            if self._to_try:
                self._hold_all()
            self._begin_next()

    def _hold_all(self) -> None:
        self.held.update((request.request_id, request) for request in self._engine.recover())

    def _make_harmless(self, failed: Trial) -> Trial:
        # Of the same class, since a tier may be closed to the other.
        service_class = failed.requests[0].service_class
        sampling = SamplingParams(max_tokens=TRIAL_TOKENS, ignore_eos=True)
        try:
            name = f"harmless-{uuid.uuid4().hex}"
            request = self._engine.make_request(name, [0], sampling, service_class=service_class)
        except RequestRefused:  # the pools are too small for it: blame without this check
            return Trial([])
        self.held[request.request_id] = request
        self._harmless = Trial([request], failed.tier)
        return self._harmless

    def _begin_next(self) -> None:
        self._trial = None
        while self._to_try and self._trial is None:
            trial = self._to_try.pop()
            trial.requests = [request for request in trial.requests if request.request_id in self.held]
            if trial.requests:  # else all of them have been aborted
                self._trial = trial
        released = list(self.held.values())
        # A fault of the CPU tier shows only there, and alone a request would find room on the GPU.
        state = self._engine.state
        state.confined_to = None
        if self._trial is not None:
            released = self._trial.requests
            self._trial.wanted_tokens = {request: request.output_len + TRIAL_TOKENS for request in released}
            if self._trial.tier is Tier.CPU and Tier.CPU in state.rules.tiers:
                state.confined_to = Tier.CPU
        for request in released:
            self.release_request(request.request_id)


def _trial(requests: Sequence[Request], tiers: Mapping[Request, Tier | None]) -> Trial:
    found = {tiers[request] for request in requests}
    return Trial(requests, found.pop() if len(found) == 1 else None)


def _halves(requests: Sequence[Request], tiers: Mapping[Request, Tier | None]) -> list[Trial]:
    """Two parts: by tier if the requests are in both, else the first and second half."""
    parts = [[request for request in requests if (tiers[request] is Tier.CPU) is in_cpu] for in_cpu in (True, False)]
    if not all(parts):
        middle = len(requests) // 2
        parts = [requests[:middle], requests[middle:]]
    return [_trial(part, tiers) for part in parts if part]


# -- the loop ----------------------------------------------------------------------------------------------------------

PAST_DEADLINE = ("deadline", "the request was not done by its deadline")


class Observer(Protocol):
    """Is called on the engine's thread, so it must be quick. What it raises is logged once and ignored."""

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """Called after every iteration."""

    def on_finish(self, request: Request, reason: str) -> None:
        """Called when a request has ended. ``reason``: stop, length, abort, or one of
        :class:`~swiftllm.server.messages.RequestFailed`."""


class EngineLoop:
    """Owns the engine: no other thread may read or write its mutable state.

    Attributes:
        observers: called after every step and every end of a request.
        link: to the front end; set before :meth:`run` begins.
        busy_since_s: start of the current pass of the loop, by ``clock``; None while the thread waits.
        num_taken: messages of the front end that have been taken.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float], stall_timeout_s: float) -> None:
        self.observers: list[Observer] = []
        self._link: FrontEndLink | None = None
        self.busy_since_s: float | None = None
        self.num_taken = 0
        self.engine = engine
        self.open_requests = OpenRequests(self.tell_health, clock)
        self.clock = clock
        self.stall_timeout_s = stall_timeout_s
        self._isolation = FaultIsolation(engine)
        self._orders: deque[Order] = deque()
        self._next_deadline_s = math.inf
        self._done, self._done_s = (0, 0.0), clock()  # progress counters, and when they last changed
        self._num_failures = 0
        self._reported_errors: set[tuple[Observer, str]] = set()
        self._is_broken = False
        self._start_s = clock()
        self._snapshot = self._take_snapshot()

    @property
    def has_link(self) -> bool:
        return self._link is not None

    @property
    def link(self) -> FrontEndLink:
        assert self._link is not None
        return self._link

    @link.setter
    def link(self, link: FrontEndLink) -> None:
        self._link = link

    def run(self) -> None:
        """Body of the engine's thread; returns after :meth:`OpenRequests.close`."""
        while (orders := self.open_requests.wait_for_orders(self._has_work)) is not None:
            self.busy_since_s = self.clock()
            self._orders += orders
            try:
                # Where tokens were delivered the snapshot went with them: who has a token may ask for its metrics.
                if not self._run_once():
                    self._snapshot = self._take_snapshot()
            except BaseException as error:
                self._fail_engine(error)
            for ended in self.open_requests.take_ended():
                self._notify_observers("on_finish", *ended)
            self.busy_since_s = None
            self.open_requests.set_health("stalled", Health())  # this pass has ended, so a stall is over

    def _has_work(self) -> bool:
        return not self._is_broken and self.engine.has_unfinished()

    def _run_once(self) -> bool:
        """Carry out orders and step once. Raises only what the engine cannot recover from.

        Returns whether tokens were delivered, and the snapshot with them.
        """
        if self._is_broken:
            self._orders.clear()
            return False
        self._fail_overdue()
        if not self.engine.has_unfinished():  # an idle engine makes no progress and is not stuck
            self._done_s = self.clock()
        try:
            self._carry_out_orders()
            if not self._has_work():
                return False
            outputs = self.engine.step()
        except EngineStalled as error:
            # In a trial other requests are held, so the stall is the trial's. Else nothing has failed: a recovery would
            # compute all requests again, only to come to the same plans.
            if self._isolation.is_under_way:
                self._recover(error)
            else:
                self._break_stall(str(error))
        except BaseException as error:  # SystemExit and the like included: a step must not end this thread
            self._recover(error)
        else:
            self._isolation.step_done()
            has_delivered = self._deliver(output.request_id for output in outputs)
            self._watch_progress(bool(outputs))
            if self.engine.last_iteration is not None:
                self._notify_observers("on_step", *self.engine.last_iteration, outputs)
            return has_delivered
        return False

    # -- orders -----------------------------------------------------------------------------------------------------

    def _carry_out_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, str):
                self._isolation.release_request(order)
                self.engine.abort(order)
                continue
            if isinstance(order, ResetOrder):
                self.engine.reset_prefix_cache()
                continue
            if order.deadline_s is not None:
                self._next_deadline_s = min(self._next_deadline_s, order.deadline_s)
            if self._isolation.is_under_way:  # who joins a trial would be taken for the culprit
                self._isolation.held[order.request.request_id] = order.request
                continue
            try:
                self.engine.add(order.request)
            except RequestRefusedForNow as refusal:
                self.fail_requests([order], "slo_unattainable", str(refusal), refusal.retry_after_s)
            except BaseException as error:  # it is in no trial yet, and must not vanish without an answer
                self.fail_requests([order], "engine_error", f"{type(error).__name__}: {error}")
                raise

    def _fail_overdue(self) -> None:
        now_s = self.clock()
        if now_s < self._next_deadline_s:
            return
        with self.open_requests.lock:
            entries = list(self.open_requests.entries.values())
            self.fail_requests([entry for entry in entries if entry.is_overdue(now_s)], *PAST_DEADLINE)
        deadlines_s = [entry.deadline_s for entry in entries if entry.deadline_s is not None]
        self._next_deadline_s = min((time_s for time_s in deadlines_s if time_s > now_s), default=math.inf)

    # -- after a step -----------------------------------------------------------------------------------------------

    def _deliver(self, request_ids: Iterable[str]) -> bool:
        """Send the new tokens of these requests, if there are any.

        The requests themselves hold the tokens, so an exception in a step loses none."""
        deltas = []
        with self.open_requests.lock:
            for request_id in request_ids:
                entry = self.open_requests.entries.get(request_id)
                if entry is None:
                    continue
                request, start = entry.request, entry.num_delivered
                delta = Delta(
                    request.output_token_ids[start:],
                    request.logprobs[start:],
                    number=entry.number,
                    num_cached_tokens=request.num_cached_tokens,
                )
                if not start:
                    delta.prompt_logprobs = request.prompt_logprobs
                entry.num_delivered += len(delta.token_ids)
                if request.finish_reason is not None:
                    delta.finish_reason = request.finish_reason.value
                    self.open_requests.end_request(entry, delta.finish_reason)
                if delta.token_ids or delta.is_last:
                    deltas.append(delta)
            if not deltas:
                return False
            self.link.post_step(Step(deltas))
            self._snapshot = self._take_snapshot()  # who has a token may ask for the metrics that count it
        self.link.apply_backpressure()
        return True

    def fail_requests(
        self, entries: Iterable[OpenRequest], reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        """End these requests with an error and abort them in the engine. From any thread."""
        with self.open_requests.lock:
            failed = [entry for entry in entries if self.open_requests.end_request(entry, reason)]
            self.open_requests.abort_requests([entry.request.request_id for entry in failed])
            if failed:
                failure = Failure(reason, message, retry_after_s)
                self.link.post_step(Step([Delta(failure=failure, number=entry.number) for entry in failed]))

    def tell_health(self, health: Health) -> None:
        """Tell the front end that this process runs, and how. From any thread."""
        self.link.send(Alive(health, self.num_taken))

    def _notify_observers(self, what: str, *event: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, what)(*event)
            except Exception:
                if (observer, what) not in self._reported_errors:
                    self._reported_errors.add((observer, what))
                    logger.exception("%s.%s raised; it will not be reported again", observer, what)

    # -- failures and stalls -----------------------------------------------------------------------------------------

    def _recover(self, error: BaseException) -> None:
        self._num_failures += 1
        logger.error("a step failed; its requests are computed again", exc_info=error)
        blamed = self._isolation.step_failed(getattr(error, "request_id", None))
        self._deliver(list(self.open_requests.entries))  # tokens sampled before the step raised
        if blamed is not None:
            logger.error("request %s makes steps fail and is given up", blamed.request_id)
            if isinstance(error, GrammarDeadEnd):  # no trial of a grammar finds what lies behind its first token
                self._fail_one(blamed, "invalid_grammar", str(error))
            else:
                self._fail_one(blamed, "engine_error", f"{type(error).__name__}: {error}")

    def _fail_one(self, request: Request, reason: str, message: str) -> None:
        with self.open_requests.lock:
            entry = self.open_requests.entries.get(request.request_id)
            if entry is not None:
                self.fail_requests([entry], reason, message)

    def _fail_engine(self, error: BaseException) -> None:
        """Fail all open requests and refuse new ones: the engine cannot recover."""
        self._is_broken = True
        reason = f"the engine has failed: {error}"
        logger.critical("%s\n%s", reason, dump_state(self.engine), exc_info=error)
        with self.open_requests.lock:
            self.open_requests.set_health(self.open_requests.health.status, Health("failed", reason))
            self.fail_requests(list(self.open_requests.entries.values()), "engine_error", reason)

    def _watch_progress(self, has_outputs: bool) -> None:
        stats, now_s = self.engine.stats(), self.clock()
        done = (stats.prompt_tokens, stats.cpu_busy_s)
        if has_outputs or done != self._done or not self.engine.has_unfinished():
            self._done, self._done_s = done, now_s
        elif now_s - self._done_s > self.stall_timeout_s:
            self._done_s = now_s
            self._break_stall(f"no progress for {self.stall_timeout_s:g} s")

    def _break_stall(self, why: str) -> None:
        """Steps return but make no progress: fail the request that appears to block the others."""
        logger.error("%s\n%s", why, dump_state(self.engine))
        state = self.engine.state
        plan = self.engine.last_iteration[0] if self.engine.last_iteration else IterationPlan()
        stuck = [request for request in plan.requests() if not request.is_finished]
        if len(stuck) != 1:
            unfinished = [request for request in state.requests.values() if not request.is_finished]
            stuck = state.waiting[:1] or sorted(unfinished, key=arrival_order)[:1]
        if stuck:
            self.open_requests.abort_requests([stuck[0].request_id])
            self._fail_one(stuck[0], "stalled", f"the engine could not go on with this request: {why}")
        else:  # only aborted requests are left, and they are not removed
            self._recover(RuntimeError(why))

    # -- snapshots --------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> Snapshot:
        return take_snapshot(self.engine, held=self._isolation.held.values(), step_failures=self._num_failures)

    def snapshot(self) -> Snapshot:
        """The state after the last pass of the loop, and what other threads have changed since. From any thread."""
        there = self.open_requests
        with there.lock:
            last, changes = self._snapshot, {"health": there.health, "finished": dict(there.finished)}
        return replace(last, uptime_s=self.clock() - self._start_s, **changes)


# -- the watchdog ------------------------------------------------------------------------------------------------------
# Watches the engine's thread from another one, and fails requests when a step hangs or requests do not reach it.
#
# A step that hangs in native code cannot be interrupted, but its clients get an error instead of waiting for ever.

MAX_INTERVAL_S = 1.0
PATIENCE = 2.0  # stall timeouts after which a hanging step fails requests without a deadline


def watch_engine(loop: EngineLoop, stop: threading.Event) -> None:
    """Body of the watchdog's thread, until ``stop`` is set.

    Tell the front end regularly that the process runs. When a pass of the engine's loop has taken its stall timeout, or
    has not begun for as long although there are orders, log the engine's state, mark the service stalled, and fail
    requests in time.
    """
    open_requests, timeout_s = loop.open_requests, loop.stall_timeout_s
    reported_s: float | None = None
    while not stop.wait(min(MAX_INTERVAL_S, timeout_s / 4)):
        loop.tell_health(open_requests.health)
        busy_s, now_s = loop.busy_since_s, loop.clock()
        since_s = open_requests.ordered_s if busy_s is None else busy_s
        if since_s is None or now_s - since_s < timeout_s:
            continue
        what = "requests do not reach the engine's thread" if busy_s is None else "a step has not come back"
        why = f"{what} for {now_s - since_s:.0f} s"
        if since_s != reported_s:
            reported_s = since_s
            logger.critical("%s\n%s", why, dump_state(loop.engine))
        open_requests.set_health("ok", Health("stalled", why))
        with open_requests.lock:
            entries = list(open_requests.entries.values())
            loop.fail_requests([entry for entry in entries if entry.is_overdue(now_s)], *PAST_DEADLINE)
            if now_s >= since_s + PATIENCE * timeout_s:
                loop.fail_requests([entry for entry in entries if entry.deadline_s is None], "stalled", why)
