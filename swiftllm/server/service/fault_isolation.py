"""Finds the request that makes steps fail, by bisection, so that all others continue.

After a step that raised, all requests are removed from the engine. The requests of that step (the suspects) run again
without the others. Mostly this succeeds: the fault was transient, and no request is blamed. If they fail again, halves
of them are tried, down to single requests. A request is blamed if it fails alone, a harmless request of our own then
passes, and it fails alone again. If the harmless request keeps failing, the engine itself is broken.

A trial lasts until each of its requests has been computed as a prompt and as a decode, in the tier of its failure. Each
gets two tokens by then, so there is progress even if the search finds nothing.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swiftllm.core.request import Request, RequestRefused, SamplingParams, Tier
from swiftllm.engine.engine import Engine

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
        suspects = self._engine.at_work()
        tiers = {request: request.tier for request in suspects}
        self._hold_all()
        failed, self._trial = self._trial, None
        blamed = None if culprit is None else self.held.pop(culprit, None)
        if blamed is not None:
            self._to_try += [] if failed is None else [failed]
        elif failed is None:
            self._num_unexplained += 1
            if self._num_unexplained > MAX_FAILURES:
                raise EngineBroken(f"{MAX_FAILURES} steps in a row failed, though none of their requests fails alone")
            self._to_try = [_trial(suspects, tiers)]
        elif len(failed.requests) > 1:
            self._to_try += _halves([request for request in failed.requests if request in tiers], tiers)
        else:
            failed.num_failures += 1
            if failed is self._harmless:
                if failed.num_failures == MAX_FAILURES:
                    raise EngineBroken("even a harmless request fails")
                self._to_try.append(failed)
            elif failed.num_failures < FAILURES_TO_BLAME:
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
