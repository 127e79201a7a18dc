"""Targets of latency-sensitive requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swiftllm.core.request import Request


@dataclass(frozen=True)
class Slo:
    """Targets of a latency-sensitive request: time to first token (S_p), time per output token (S_d), in seconds.

    ``margin`` is the share of both targets that predictions must leave unused, since they have errors.
    """

    ttft_s: float
    tpot_s: float
    margin: float

    @property
    def iteration_s(self) -> float:
        """The longest iteration that may be planned beside best-effort work: each one yields a token."""
        return (1 - self.margin) * self.tpot_s

    @property
    def first_token_s(self) -> float:
        """The longest predicted time to the first token with which a request is admitted."""
        return (1 - self.margin) * self.ttft_s

    def met_by(self, request: Request) -> Mapping[str, bool]:
        """Whether a request kept each target that its tokens so far can tell of, by name: ``ttft`` and ``tpot``."""
        times_s = request.token_times_s
        met = {}
        if times_s:
            met["ttft"] = times_s[0] - request.arrival_s <= self.ttft_s
        if len(times_s) > 1:
            met["tpot"] = (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= self.tpot_s
        return met
