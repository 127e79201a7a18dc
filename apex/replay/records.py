"""Requests of a replay, and the records of them from which every metric is computed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swiftllm.core.request import Request, ServiceClass

LATENCY_SENSITIVE = ServiceClass.LATENCY_SENSITIVE.value
REFUSED = "refused: "
"""How the failure of a request begins that the engine did not admit."""


@dataclass(frozen=True)
class ReplayRequest:
    """A request to replay. ``arrival_s`` is seconds from the start; exactly ``output_len`` tokens are generated.

    ``after``: id of the request that must have ended before; ``arrival_s`` is then seconds from its end. The prompt
    begins with that of the other one and with ``output_len`` tokens that stand for its answer.
    """

    request_id: str
    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    output_len: int
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    after: str | None = None


@dataclass(frozen=True)
class RequestRecord:
    """One request of a replay. All times are seconds from the start of the replay.

    ``failure`` is None for a request that got all its tokens, else the reason.
    ``output_digest`` is a hash of the output tokens, to compare systems.
    """

    request_id: str
    arrival_s: float
    prompt_len: int
    wanted_output_len: int
    token_times_s: tuple[float, ...] = ()
    first_token_s: float | None = None
    finish_s: float | None = None
    tier_history: tuple[tuple[float, str], ...] = ()
    num_preemptions: int = 0
    finish_reason: str | None = None
    output_digest: str | None = None
    failure: str | None = None
    service_class: str = LATENCY_SENSITIVE

    @property
    def output_len(self) -> int:
        return len(self.token_times_s)

    @property
    def last_token_s(self) -> float | None:
        return self.token_times_s[-1] if self.token_times_s else None

    @property
    def completed(self) -> bool:
        return self.failure is None

    @property
    def refused(self) -> bool:
        return self.failure is not None and self.failure.startswith(REFUSED)


@dataclass(frozen=True)
class Replay:
    """The result of a replay: a record per request in the order given, its duration, and counters over it.

    Duration (seconds) and counters are the engine's, or the client's for a replay over HTTP."""

    records: tuple[RequestRecord, ...]
    wall_s: float
    stats: Mapping[str, Any]


@dataclass(frozen=True)
class RequestSummary:
    """A record without the times of single tokens: what distributions over requests need, in few bytes.

    Times are seconds from the start of the replay, to the microsecond.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    last_token_s: float | None
    prompt_len: int
    output_len: int
    num_preemptions: int
    last_tier: str | None
    failure: str | None
    service_class: str = LATENCY_SENSITIVE


def summary_of(record: RequestRecord) -> RequestSummary:
    """The summary of a record."""
    times = record.token_times_s
    return RequestSummary(
        request_id=record.request_id,
        arrival_s=round(record.arrival_s, 6),
        first_token_s=round(times[0], 6) if times else None,
        last_token_s=round(times[-1], 6) if times else None,
        prompt_len=record.prompt_len,
        output_len=record.output_len,
        num_preemptions=record.num_preemptions,
        last_tier=record.tier_history[-1][1] if record.tier_history else None,
        failure=record.failure,
        service_class=record.service_class,
    )


def record_values(record: RequestRecord | RequestSummary) -> dict[str, Any]:
    """The fields of a record as JSON values. The class is left out where it is the default."""
    values = asdict(record)
    if record.service_class == LATENCY_SENSITIVE:
        del values["service_class"]
    return values


def record_of(request: Request, wanted_output_len: int, start_s: float) -> RequestRecord:
    """The record of a request after its replay began at ``start_s`` of the engine's clock."""
    times = tuple(time - start_s for time in request.token_times_s)
    reason = request.finish_reason.value if request.finish_reason else None
    failure = None
    if len(times) < wanted_output_len:
        failure = f"{len(times)} of {wanted_output_len} tokens (finish reason: {reason or 'none'})"
    return RequestRecord(
        request_id=request.request_id,
        arrival_s=request.arrival_s - start_s,
        prompt_len=request.prompt_len,
        wanted_output_len=wanted_output_len,
        token_times_s=times,
        first_token_s=times[0] if times else None,
        finish_s=None if request.finish_s is None else request.finish_s - start_s,
        tier_history=tuple((time - start_s, tier) for time, tier in request.tier_history),
        num_preemptions=request.num_preemptions,
        finish_reason=reason,
        output_digest=hashlib.sha256(repr(list(request.output_token_ids)).encode()).hexdigest()[:16],
        failure=failure,
        service_class=request.service_class.value,
    )
