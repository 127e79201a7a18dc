"""The engine's thread: takes orders, steps, hands out tokens, and goes on after whatever a step raises."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput
from swiftllm.engine.engine import Engine, EngineStalled
from swiftllm.scheduling.arrival_queue import arrival_order
from swiftllm.server.service.fault_isolation import Isolation
from swiftllm.server.service.open_requests import Entry, Ledger, Order
from swiftllm.server.service.snapshot import Health, Snapshot, take_snapshot
from swiftllm.server.service.state_dump import report
from swiftllm.server.service.token_streams import Delta, Mailbox, Parcel, RequestFailed

logger = logging.getLogger(__name__)

PAST_DEADLINE = ("deadline", "the request was not done by its deadline")


class Observer(Protocol):
    """Told of everything on the engine's thread, so it must be quick. What it raises is logged once and ignored."""

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """After every iteration."""

    def on_finish(self, request: Request, reason: str) -> None:
        """A request has ended: stop, length, abort, or a reason of :class:`RequestFailed`."""


class EngineLoop:
    """Owns the engine: no other thread may touch what changes in it.

    Attributes:
        observers: whom to tell.
        busy_since_s: when the turn under way began, by the service's clock; None while there is nothing to do.
    """

    def __init__(self, engine: Engine, ledger: Ledger, clock: Callable[[], float], stall_timeout_s: float) -> None:
        self.observers: list[Observer] = []
        self.busy_since_s: float | None = None
        self._engine = engine
        self._ledger = ledger
        self._clock = clock
        self._stall_timeout_s = stall_timeout_s
        self._isolation = Isolation(engine)
        self._orders: deque[Order] = deque()
        self._next_deadline_s = math.inf
        self._done, self._done_s = (0, 0.0), clock()  # how far the engine has got, and when it last got further
        self._num_failures = 0
        self._complaints: set[tuple[Observer, str]] = set()
        self._is_broken = False
        self._start_s = clock()
        self._snapshot = self._take_snapshot()

    def run(self) -> None:
        """The engine's thread."""
        while (orders := self._ledger.wait_for_orders(self._has_work)) is not None:
            self.busy_since_s = self._clock()
            self._orders += orders
            try:
                self._take_turn()
                self._snapshot = self._take_snapshot()
            except BaseException as error:
                self._give_up(error)
            for ended in self._ledger.take_ended():
                self._tell("on_finish", *ended)
            self.busy_since_s = None
            self._ledger.set_health("stalled", Health())  # if it was, it is over

    def _has_work(self) -> bool:
        return not self._is_broken and self._engine.has_unfinished()

    def _take_turn(self) -> None:
        """Carry out orders and step once. Raises only what there is no way back from."""
        if self._is_broken:
            self._orders.clear()
            return
        self._fail_overdue()
        if not self._engine.has_unfinished():
            self._done_s = self._clock()
        try:
            self._carry_out_orders()
            if not self._has_work():
                return
            outputs = self._engine.step()
        except EngineStalled as error:
            if self._isolation.is_under_way:
                self._recover(error)
            else:
                self._break_stall(str(error))
        except BaseException as error:  # a step that wants to end its thread has no right to this one
            self._recover(error)
        else:
            self._deliver(output.request_id for output in outputs)
            self._isolation.step_done()
            self._watch_progress(bool(outputs))
            if self._engine.last_iteration is not None:
                self._tell("on_step", *self._engine.last_iteration, outputs)

    # -- orders -----------------------------------------------------------------------------------------------------

    def _carry_out_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, str):
                self._isolation.bring_back(order)
                self._engine.abort(order)
                continue
            if order.deadline_s is not None:
                self._next_deadline_s = min(self._next_deadline_s, order.deadline_s)
            if self._isolation.is_under_way:
                self._isolation.held[order.request.request_id] = order.request
                continue
            try:
                self._engine.queue_request(order.request)
            except BaseException as error:
                self.fail([order], "engine_error", f"{type(error).__name__}: {error}")
                raise

    def _fail_overdue(self) -> None:
        now_s = self._clock()
        if now_s < self._next_deadline_s:
            return
        with self._ledger.lock:
            entries = [entry for entry in self._ledger.entries.values() if entry.deadline_s is not None]
            self.fail([entry for entry in entries if entry.deadline_s <= now_s], *PAST_DEADLINE)
        self._next_deadline_s = min([e.deadline_s for e in entries if e.deadline_s > now_s], default=math.inf)

    # -- after a step -----------------------------------------------------------------------------------------------

    def _deliver(self, request_ids: Iterable[str]) -> None:
        """Hand out what is new of these requests: their own state tells, so that no failure between loses a token."""
        parcels: dict[Mailbox, list[Parcel]] = {}
        with self._ledger.lock:
            for request_id in request_ids:
                entry = self._ledger.entries.get(request_id)
                if entry is None:
                    continue
                request, start = entry.request, entry.num_delivered
                reason = request.finish_reason.value if request.finish_reason else None
                delta = Delta(request.output_token_ids[start:], request.logprobs[start:], reason)
                entry.num_delivered = request.output_len
                parcels.setdefault(entry.stream.mailbox, []).append((entry.stream, delta))
                if reason is not None:
                    self._ledger.end(entry, reason)
            self._post(parcels)
        for mailbox in parcels:
            mailbox.keep_pace()

    def fail(self, entries: Iterable[Entry], reason: str, message: str) -> None:
        """End the streams of these requests with an error and have the engine drop them. From any thread."""
        parcels: dict[Mailbox, list[Parcel]] = {}
        with self._ledger.lock:
            for entry in entries:
                if self._ledger.end(entry, reason):
                    self._ledger.abort([entry.request.request_id])
                    delta = Delta(error=RequestFailed(reason, message))
                    parcels.setdefault(entry.stream.mailbox, []).append((entry.stream, delta))
            self._post(parcels)

    def _post(self, parcels: dict[Mailbox, list[Parcel]]) -> None:
        for mailbox, of_mailbox in parcels.items():
            if not mailbox.post(of_mailbox):  # the event loop is closed: nobody will ever read them
                self._ledger.abort([stream.request_id for stream, _ in of_mailbox])

    def _tell(self, what: str, *event: Any) -> None:
        for observer in self.observers:
            try:
                getattr(observer, what)(*event)
            except Exception:
                if (observer, what) not in self._complaints:
                    self._complaints.add((observer, what))
                    logger.exception("%s.%s raised; it will not be reported again", observer, what)

    # -- when something goes wrong ----------------------------------------------------------------------------------

    def _recover(self, error: BaseException) -> None:
        self._num_failures += 1
        logger.error("a step failed; its requests are computed again", exc_info=error)
        blamed = self._isolation.step_failed()
        self._deliver(list(self._ledger.entries))  # what the step gave before it raised
        if blamed is not None:
            logger.error("request %s makes steps fail and is given up", blamed.request_id)
            self._fail_request(blamed, "engine_error", f"{type(error).__name__}: {error}")

    def _fail_request(self, request: Request, reason: str, message: str) -> None:
        with self._ledger.lock:
            entry = self._ledger.entries.get(request.request_id)
            if entry is not None:
                self.fail([entry], reason, message)

    def _give_up(self, error: BaseException) -> None:
        """There is no way to go on: nobody shall wait for what never comes."""
        self._is_broken = True
        reason = f"the engine has failed: {error}"
        logger.critical("%s\n%s", reason, report(self._engine), exc_info=error)
        with self._ledger.lock:
            self._ledger.health = Health("failed", reason)
            self.fail(list(self._ledger.entries.values()), "engine_error", reason)

    def _watch_progress(self, has_outputs: bool) -> None:
        stats, now_s = self._engine.stats(), self._clock()
        done = (stats.prefill_tokens, stats.cpu_busy_s)
        if has_outputs or done != self._done or not self._engine.has_unfinished():
            self._done, self._done_s = done, now_s
        elif now_s - self._done_s > self._stall_timeout_s:
            self._done_s = now_s
            self._break_stall(f"no progress for {self._stall_timeout_s:g} s")

    def _break_stall(self, why: str) -> None:
        """Steps work and nothing comes of them: give up the request that seems to be in the way of the others."""
        logger.error("%s\n%s", why, report(self._engine))
        scheduler = self._engine.scheduler
        plan = self._engine.last_iteration[0] if self._engine.last_iteration else IterationPlan()
        stuck = [request for request in plan.requests() if not request.is_finished]
        if len(stuck) != 1:
            unfinished = [request for request in scheduler.requests.values() if not request.is_finished]
            stuck = scheduler.waiting[:1] or sorted(unfinished, key=arrival_order)[:1]
        if stuck:
            self._ledger.abort([stuck[0].request_id])
            self._fail_request(stuck[0], "stalled", f"the engine could not go on with this request: {why}")
        else:  # what is left has been aborted and does not leave
            self._recover(RuntimeError(why))

    # -- snapshots --------------------------------------------------------------------------------------------------

    def _take_snapshot(self) -> Snapshot:
        return take_snapshot(self._engine, num_held=len(self._isolation.held), step_failures=self._num_failures)

    def snapshot(self) -> Snapshot:
        """From any thread: the state after the last turn, and what other threads have changed since."""
        ledger = self._ledger
        with ledger.lock:
            changes = {"health": ledger.health, "finished": dict(ledger.finished), "refused": ledger.num_refused}
        return replace(self._snapshot, uptime_s=self._clock() - self._start_s, **changes)
