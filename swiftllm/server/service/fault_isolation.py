"""Finds the request that makes steps fail, so that all others go on.

After a step that raised, everything is taken out of the engine. The requests it was working on are tried again by
themselves: mostly that works, the fault has passed, and nobody is to blame. If they fail again, halves of them are
tried, down to single requests. One that fails alone, and again after a harmless request of our own has passed, is to
blame. If the harmless one keeps failing, the engine itself is broken.

A trial goes on until each of its requests has been computed as a prompt and as a decode, in the tier in which it was
when the fault came up. That gives each of them two tokens: there is progress even if the search finds nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swiftllm.core.request import Request, RequestRefused, SamplingParams, Tier
from swiftllm.engine.engine import Engine

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 2  # one that the prompt leads to, one decoded
FAILURES_TO_BLAME = 2
MAX_FAILURES = 5  # in a row, and no request to blame for them


class EngineBroken(RuntimeError):
    """Steps fail whatever they work on."""


@dataclass(eq=False)
class Trial:
    """Requests to run by themselves. ``tier`` is where they stood when they failed, if all in one."""

    requests: Sequence[Request]
    tier: Tier | None = None
    num_failures: int = 0
    wanted_tokens: dict[Request, int] = field(default_factory=dict)

    @property
    def is_passed(self) -> bool:
        return all(request.is_finished or request.output_len >= n for request, n in self.wanted_tokens.items())


class Isolation:
    """The search, from one step to the next. ``held`` are the unfinished requests kept out of the engine meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.held: dict[str, Request] = {}
        self._engine = engine
        self._usual_tiers = engine.scheduler.decode_tiers
        self._trial: Trial | None = None
        self._harmless: Trial | None = None
        self._to_try: list[Trial] = []  # the next one last
        self._num_unexplained = 0

    @property
    def is_under_way(self) -> bool:
        return self._trial is not None

    def bring_back(self, request_id: str) -> None:
        """Give a request to the engine if it is held, so that it can be aborted there."""
        request = self.held.pop(request_id, None)
        if request is not None:
            self._engine.queue_request(request)

    def step_failed(self) -> Request | None:
        """Make the engine whole again and begin the next trial.

        Returns the request that is to blame, once that is clear: neither the engine nor ``held`` has it any more.

        Raises:
            EngineBroken: it is the engine's own fault.
        """
        suspects = self._engine.at_work()
        tiers = {request: request.tier for request in suspects}
        self._hold_all()
        failed, self._trial = self._trial, None
        blamed = None
        if failed is None:
            self._num_unexplained += 1
            if self._num_unexplained > MAX_FAILURES:
                raise EngineBroken(f"{MAX_FAILURES} steps in a row failed, though none of their requests does alone")
            self._to_try = [_trial(suspects, tiers)]
        elif len(failed.requests) > 1:
            self._to_try += _halves([request for request in failed.requests if request in tiers], tiers)
        else:
            failed.num_failures += 1
            if failed is self._harmless:
                if failed.num_failures == MAX_FAILURES:
                    raise EngineBroken("even a request that can do no harm fails")
                self._to_try.append(failed)
            elif failed.num_failures < FAILURES_TO_BLAME:
                self._to_try += [failed, self._make_harmless(failed.tier)]
            else:
                blamed = self.held.pop(failed.requests[0].request_id, None)  # None: it has got to its end all the same
                self._num_unexplained = 0
        self._begin_next()
        return blamed

    def step_done(self) -> None:
        """A step has worked: if that ends the trial under way, begin the next."""
        if self._trial is None:
            self._num_unexplained = 0
        elif self._trial.is_passed:
            if self._to_try:
                self._hold_all()
            self._begin_next()

    def _hold_all(self) -> None:
        self.held.update((request.request_id, request) for request in self._engine.recover())

    def _make_harmless(self, tier: Tier | None) -> Trial:
        sampling = SamplingParams(max_tokens=TRIAL_TOKENS, ignore_eos=True)
        try:
            request = self._engine.make_request(f"harmless-{uuid.uuid4().hex}", [0], sampling)
        except RequestRefused:  # pools too small for anything else: the accused has to do without
            return Trial([])
        self.held[request.request_id] = request
        self._harmless = Trial([request], tier)
        return self._harmless

    def _begin_next(self) -> None:
        self._trial = None
        while self._to_try and self._trial is None:
            trial = self._to_try.pop()
            trial.requests = [request for request in trial.requests if request.request_id in self.held]
            if trial.requests:  # else all have been aborted
                self._trial = trial
        released = list(self.held.values())
        tiers = self._usual_tiers
        if self._trial is not None:
            released = self._trial.requests
            self._trial.wanted_tokens = {request: request.output_len + TRIAL_TOKENS for request in released}
            if self._trial.tier is Tier.CPU and Tier.CPU in tiers:
                tiers = (Tier.CPU,)
        self._engine.scheduler.decode_tiers = tiers
        for request in released:
            self.bring_back(request.request_id)


def _trial(requests: Sequence[Request], tiers: Mapping[Request, Tier | None]) -> Trial:
    found = {tiers[request] for request in requests}
    return Trial(requests, found.pop() if len(found) == 1 else None)


def _halves(requests: Sequence[Request], tiers: Mapping[Request, Tier | None]) -> list[Trial]:
    """Two parts, by tier if they stand in both."""
    parts = [[request for request in requests if (tiers[request] is Tier.CPU) is in_cpu] for in_cpu in (True, False)]
    if not all(parts):
        middle = len(requests) // 2
        parts = [requests[:middle], requests[middle:]]
    return [_trial(part, tiers) for part in parts if part]
