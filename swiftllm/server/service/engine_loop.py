"""The engine's thread: carries out orders, steps, delivers tokens, and recovers from steps that raise."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput, RequestRefusedForNow
from swiftllm.engine.engine import Engine, EngineStalled
from swiftllm.sampling.grammar import GrammarDeadEnd
from swiftllm.scheduling.arrival_queue import arrival_order
from swiftllm.server.service.fault_isolation import FaultIsolation
from swiftllm.server.service.front_end_link import FrontEndLink
from swiftllm.server.service.messages import Alive, Step
from swiftllm.server.service.open_requests import OpenRequest, OpenRequests, Order, ResetOrder
from swiftllm.server.service.snapshot import Health, Snapshot, take_snapshot
from swiftllm.server.service.state_dump import dump_state
from swiftllm.server.service.token_streams import Delta, Failure

logger = logging.getLogger(__name__)

PAST_DEADLINE = ("deadline", "the request was not done by its deadline")


class Observer(Protocol):
    """Is called on the engine's thread, so it must be quick. What it raises is logged once and ignored."""

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """Called after every iteration."""

    def on_finish(self, request: Request, reason: str) -> None:
        """Called when a request has ended. ``reason``: stop, length, abort, or one of
        :class:`~swiftllm.server.service.token_streams.RequestFailed`."""


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
        if not self.engine.has_unfinished():
            self._done_s = self.clock()
        try:
            self._carry_out_orders()
            if not self._has_work():
                return False
            outputs = self.engine.step()
        except EngineStalled as error:
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
            if self._isolation.is_under_way:
                self._isolation.held[order.request.request_id] = order.request
                continue
            try:
                self.engine.add(order.request)
            except RequestRefusedForNow as refusal:
                self.fail_requests([order], "slo_unattainable", str(refusal), refusal.retry_after_s)
            except BaseException as error:
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
        done = (stats.prefill_tokens, stats.cpu_busy_s)
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
