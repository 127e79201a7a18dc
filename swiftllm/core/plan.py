"""The plan of one iteration, and its result: immutable values between scheduler and executor."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

from swiftllm.core.request import Request, Tier


class Strategy(enum.Enum):
    """How an iteration uses the CPU (APEX section 3)."""

    GPU_ONLY = "gpu-only"
    PIPELINING = "asymmetric-pipelining"
    OVERLAP = "asynchronous-overlap"


@dataclass(frozen=True)
class Rule:
    """How a cohort crosses the boundaries of an iteration."""

    waits: bool  # the lane waits for its tickets, so that its token is done when the iteration is
    rides: bool  # it crosses boundaries together with the lane
    steps: bool  # it crosses boundaries on its own
    most: float = math.inf  # boundaries that it crosses at most, beside a lane


RIDE = Rule(waits=True, rides=True, steps=False)  # NEO's batch-0
STEP = Rule(waits=True, rides=False, steps=True)  # NEO's batch-1
HOP = Rule(waits=False, rides=True, steps=False, most=1)  # APEX's overlap: when the ticket is ready
FREE = Rule(waits=False, rides=True, steps=True)  # free-running: as soon as the ticket is ready, riding where it can


class LaneItem(NamedTuple):
    """``num_tokens`` tokens of one request from position ``start``: a prefill chunk, or a decode of one token.

    ``tier`` is where the K and V are stored. A decode in the lane always has its cache on the GPU. A prefill for the
    CPU tier is computed in the lane, and its K and V are stored to the CPU pool layer by layer.
    """

    request: Request
    start: int
    num_tokens: int
    tier: Tier
    is_prefill: bool

    @property
    def context_len(self) -> int:
        """Tokens that the last token of the item attends to."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the item reaches the last known token, so that the next one is sampled."""
        return self.context_len == self.request.num_tokens

    @classmethod
    def decodes(cls, requests: Sequence[Request]) -> list[LaneItem]:
        """A decode item for each request. All are made at once, since a lane may have a thousand of them."""
        starts = [request.num_tokens - 1 for request in requests]
        fields = zip(requests, starts, repeat(1), repeat(Tier.GPU), repeat(False), strict=False)
        return list(map(tuple.__new__, repeat(cls), fields))


@dataclass(frozen=True)
class CohortPlan:
    """CPU requests that stand at the same boundary and move together. ``cohort_id`` stays until their token is done."""

    cohort_id: int
    requests: tuple[Request, ...]
    rule: Rule


@dataclass(frozen=True)
class Swap:
    """Copies of blocks from the tier ``source`` to the other one: ``source_blocks[i]`` goes to ``target_blocks[i]``.

    ``request`` is the one that moves there. None: cached blocks of no single request are copied.
    """

    request: Request | None
    source: Tier
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


@dataclass(frozen=True)
class IterationPlan:
    """One iteration: its swaps, its lane and its cohorts.

    ``decodes`` are the requests whose next token is decoded in the lane, beside the ``prefills``. ``leaving`` are the
    ids of requests to take out of their cohorts as soon as no ticket needs them: aborted, or called back to the GPU.
    ``predicted`` holds the predictions behind the plan, in seconds, for logs and figures.

    An iteration without a lane lasts until all its cohorts have their tokens, since waiting delays nothing. With a
    ``time_limit_s`` it ends after so many seconds, and cohorts stay where they are: a request may arrive meanwhile.
    """

    decodes: tuple[Request, ...] = ()
    prefills: tuple[LaneItem, ...] = ()
    cohorts: tuple[CohortPlan, ...] = ()
    swaps: tuple[Swap, ...] = ()
    leaving: frozenset[str] = frozenset()
    predicted: dict[str, float] = field(default_factory=dict)
    time_limit_s: float | None = None

    @property
    def strategy(self) -> Strategy:
        """What the rules of the cohorts make of the iteration."""
        if not self.cohorts:
            return Strategy.GPU_ONLY
        return Strategy.PIPELINING if all(cohort.rule.waits for cohort in self.cohorts) else Strategy.OVERLAP

    @cached_property
    def lane(self) -> tuple[LaneItem, ...]:
        """Decodes and prefills as items for the backend. First read it before the iteration moves positions."""
        return (*LaneItem.decodes(self.decodes), *self.prefills)

    def in_lane(self) -> list[Request]:
        return [*self.decodes, *(item.request for item in self.prefills)]

    def requests(self) -> list[Request]:
        """All requests that the iteration computes."""
        return [*self.in_lane(), *(request for cohort in self.cohorts for request in cohort.requests)]

    def moving(self) -> list[Request]:
        """The requests that move to the other tier."""
        return [swap.request for swap in self.swaps if swap.request is not None]

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.prefills or self.cohorts or self.swaps or self.leaving)


@dataclass(frozen=True)
class StepResult:
    """The result of one plan.

    ``tokens`` maps request ids to sampled tokens. ``boundaries`` maps each unfinished cohort to the boundary that it
    crosses next (-1 is the embedding). A finished cohort is absent and its requests are in ``tokens``.
    ``left`` has the ids of leaving requests that are now out of their cohorts; no ticket uses their blocks.
    ``lane_busy_s`` excludes the time spent waiting for tickets. ``cpu_busy_s`` sums the CPU attention finished.
    """

    tokens: dict[str, int]
    boundaries: dict[int, int]
    left: frozenset[str]
    duration_s: float
    lane_busy_s: float
    cpu_busy_s: float
