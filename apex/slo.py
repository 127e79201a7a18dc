"""Targets of latency-sensitive requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """Targets of a latency-sensitive request: time to first token (S_p), time per output token (S_d), in seconds.

    ``margin`` is the share of an iteration's time that plans leave unused, since predictions have errors.
    """

    ttft_s: float
    tpot_s: float
    margin: float

    @property
    def iteration_s(self) -> float:
        """The longest iteration that may be planned beside best-effort work: each one yields a token."""
        return (1 - self.margin) * self.tpot_s
