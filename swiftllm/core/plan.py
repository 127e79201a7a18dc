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
class CpuBatchMode:
    """How a CPU batch runs the stages of an iteration."""

    waits: bool  # the GPU batch waits for its attention tasks, so that its token is done when the iteration is
    joins: bool  # it runs stages together with the GPU batch
    runs_alone: bool  # it runs stages on its own
    max_stages: float = math.inf  # stages that it runs at most, beside a GPU batch


JOINED = CpuBatchMode(waits=True, joins=True, runs_alone=False)  # NEO's batch-0
ALONE = CpuBatchMode(waits=True, joins=False, runs_alone=True)  # NEO's batch-1
# APEX's overlap: when the attention task is ready
OVERLAPPED = CpuBatchMode(waits=False, joins=True, runs_alone=False, max_stages=1)
# free-running: as soon as the attention task is ready, joining where it can
FREE_RUNNING = CpuBatchMode(waits=False, joins=True, runs_alone=True)


class GpuBatchItem(NamedTuple):
    """``num_tokens`` tokens of one request from position ``start``: a prefill chunk, or a decode of one token.

    ``tier`` is where the K and V are stored. A decode in the GPU batch always has its cache on the GPU. A prefill for
    the CPU tier is computed in the GPU batch, and its K and V are stored to the CPU pool layer by layer.
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
    def decodes(cls, requests: Sequence[Request]) -> list[GpuBatchItem]:
        """A decode item for each request. All are made at once, since a GPU batch may have a thousand of them."""
        starts = [request.num_tokens - 1 for request in requests]
        fields = zip(requests, starts, repeat(1), repeat(Tier.GPU), repeat(False), strict=False)
        return list(map(tuple.__new__, repeat(cls), fields))


@dataclass(frozen=True)
class CpuBatchPlan:
    """CPU requests that stand at the same stage and move together. ``cpu_batch_id`` stays until their token is done."""

    cpu_batch_id: int
    requests: tuple[Request, ...]
    mode: CpuBatchMode


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
class StateCopy:
    """A copy of a state of linear attention: from a request's ``slot`` on the device to the slot ``snapshot`` of host
    memory if it ``saves``, else back."""

    slot: int
    snapshot: int
    saves: bool


@dataclass(frozen=True)
class IterationPlan:
    """One iteration: its swaps, its GPU batch and its CPU batches.

    ``decodes`` are the requests whose next token is decoded in the GPU batch, beside the ``prefills``. ``leaving`` are
    the ids of requests to take out of their CPU batches as soon as no attention task needs them: aborted, or recalled
    to the GPU. ``predicted`` holds the predictions behind the plan, in seconds, for logs and figures.

    An iteration without a GPU batch lasts until all its CPU batches have their tokens, since waiting delays nothing.
    With a ``time_limit_s`` it ends after so many seconds, and CPU batches stay where they are: a request may arrive
    meanwhile.

    ``state_copies`` are made in order, before the batches change any state.
    """

    decodes: tuple[Request, ...] = ()
    prefills: tuple[GpuBatchItem, ...] = ()
    cpu_batches: tuple[CpuBatchPlan, ...] = ()
    swaps: tuple[Swap, ...] = ()
    leaving: frozenset[str] = frozenset()
    predicted: dict[str, float] = field(default_factory=dict)
    time_limit_s: float | None = None
    state_copies: tuple[StateCopy, ...] = ()

    @property
    def strategy(self) -> Strategy:
        """What the modes of the CPU batches make of the iteration."""
        if not self.cpu_batches:
            return Strategy.GPU_ONLY
        return Strategy.PIPELINING if all(cpu_batch.mode.waits for cpu_batch in self.cpu_batches) else Strategy.OVERLAP

    @cached_property
    def gpu_batch(self) -> tuple[GpuBatchItem, ...]:
        """Decodes and prefills as items for the backend. First read it before the iteration moves positions."""
        return (*GpuBatchItem.decodes(self.decodes), *self.prefills)

    def in_gpu_batch(self) -> list[Request]:
        return [*self.decodes, *(item.request for item in self.prefills)]

    def requests(self) -> list[Request]:
        """All requests that the iteration computes."""
        return [*self.in_gpu_batch(), *(request for cpu_batch in self.cpu_batches for request in cpu_batch.requests)]

    def moving(self) -> list[Request]:
        """The requests that move to the other tier."""
        return [swap.request for swap in self.swaps if swap.request is not None]

    @property
    def is_empty(self) -> bool:
        work = self.decodes or self.prefills or self.cpu_batches or self.swaps or self.leaving or self.state_copies
        return not work


@dataclass(frozen=True)
class StepResult:
    """The result of one plan.

    ``tokens`` maps request ids to sampled tokens. ``stages`` maps each unfinished CPU batch to the stage that it
    runs next (-1 is the embedding). A finished CPU batch is absent and its requests are in ``tokens``.
    ``detached`` has the ids of leaving requests that are now out of their CPU batches: no attention task uses their
    blocks.
    ``gpu_batch_busy_s`` excludes the time spent waiting for attention tasks. ``cpu_busy_s`` sums the CPU attention
    finished.
    """

    tokens: dict[str, int]
    stages: dict[int, int]
    detached: frozenset[str]
    duration_s: float
    gpu_batch_busy_s: float
    cpu_busy_s: float
