"""What the scheduler decides for one iteration: immutable values that any executor can carry out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

from swiftllm.core.request import Request, Tier


class Strategy(enum.Enum):
    """How an iteration uses the CPU (APEX section 3)."""

    GPU_ONLY = "gpu-only"
    ASYMMETRIC_PIPELINING = "asymmetric-pipelining"
    ASYNCHRONOUS_OVERLAP = "asynchronous-overlap"


class SteppingRule(enum.Enum):
    """How a cohort crosses the boundaries of an iteration."""

    RIDE_AND_WAIT = "ride-and-wait"  # rides every boundary of the lane, which waits for its ticket (NEO's batch-0)
    STEP_AND_WAIT = "step-and-wait"  # crosses every boundary on its own and is waited for (NEO's batch-1)
    RIDE_IF_READY = "ride-if-ready"  # rides at most one boundary an iteration, never waited for (APEX)


class LaneItem(NamedTuple):
    """``num_tokens`` tokens of one request from position ``start``: a prefill chunk, or a decode of one token.

    ``tier`` says where the K and V go. A decode in the lane always has its cache on the GPU; a prefill bound for
    the CPU tier computes in the lane and stores its K and V to the CPU pool layer by layer.
    """

    request: Request
    start: int
    num_tokens: int
    tier: Tier
    is_prefill: bool

    @property
    def context_len(self) -> int:
        """Tokens attended to by the last token of the item."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the item reaches the last known token, so that a next one is sampled."""
        return self.context_len == self.request.num_tokens

    @classmethod
    def decodes(cls, requests: Sequence[Request]) -> list[LaneItem]:
        """The next token of each request; a lane may have a thousand of them, so they are made all at once."""
        starts = [request.num_tokens - 1 for request in requests]
        fields = zip(requests, starts, repeat(1), repeat(Tier.GPU), repeat(False), strict=False)
        return list(map(tuple.__new__, repeat(cls), fields))


@dataclass(frozen=True)
class CohortPlan:
    """CPU requests that stand at the same layer and step together; ``cohort_id`` lives until their token is done."""

    cohort_id: int
    requests: tuple[Request, ...]
    rule: SteppingRule


@dataclass(frozen=True)
class Swap:
    """Move a request's blocks from one tier to the other. The tables pair up, block by block."""

    request: Request
    source: Tier
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


@dataclass(frozen=True)
class IterationPlan:
    """One iteration: what moves, what runs, and the predictions that led to it (seconds; kept for logs and figures).

    ``decodes`` are the requests whose next token is decoded in the lane, beside the ``prefills``. ``leaving`` are
    requests to take out of their cohorts as soon as no ticket needs them: aborted, or called back to the GPU.
    """

    strategy: Strategy = Strategy.GPU_ONLY
    decodes: tuple[Request, ...] = ()
    prefills: tuple[LaneItem, ...] = ()
    cohorts: tuple[CohortPlan, ...] = ()
    swaps: tuple[Swap, ...] = ()
    leaving: frozenset[str] = frozenset()
    predicted: dict[str, float] = field(default_factory=dict)

    @cached_property
    def lane(self) -> tuple[LaneItem, ...]:
        """Decodes and prefills spelled out for the backend, as they stand before the iteration runs."""
        return (*LaneItem.decodes(self.decodes), *self.prefills)

    def in_lane(self) -> list[Request]:
        return [*self.decodes, *(item.request for item in self.prefills)]

    def requests(self) -> list[Request]:
        """Whoever is computed."""
        return [*self.in_lane(), *(request for cohort in self.cohorts for request in cohort.requests)]

    def swapping(self) -> list[Request]:
        return [swap.request for swap in self.swaps]

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills or self.cohorts or self.swaps or self.leaving)


@dataclass(frozen=True)
class StepResult:
    """What came of a plan.

    ``tokens`` maps request ids to sampled tokens. ``cohort_layers`` maps each unfinished cohort to the layer whose
    boundary it crosses next (-1 is the embedding); a finished cohort is absent and its requests are in ``tokens``.
    ``left`` are the leaving requests that are out of their cohorts now: nothing touches their blocks any more.
    ``lane_busy_s`` leaves out the time spent waiting for tickets; ``cpu_busy_s`` sums the CPU attention finished.
    """

    tokens: dict[str, int]
    cohort_layers: dict[int, int]
    left: frozenset[str]
    duration_s: float
    lane_busy_s: float
    cpu_busy_s: float
