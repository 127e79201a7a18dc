"""What a scheduler is: a scheduler makes plans for the scheduler state, and is told what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request
from swiftllm.core.slo import Slo
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.rules import SchedulingRules
from swiftllm.scheduling.state import SchedulerState


class Scheduler:
    """Decides what the next iteration computes. It keeps what it learns, and no request: the state has those."""

    rules = SchedulingRules()

    @property
    def slo(self) -> Slo | None:
        """The targets that plans keep, in schedulers that have any."""
        return None

    def plan(self, state: SchedulerState) -> IterationPlan:
        """Plan the next iteration. Its blocks are allocated and the queues updated; the caller must run the plan."""
        raise NotImplementedError

    def manage_copies(self, kv: KVCacheManager) -> None:
        """Set which cached blocks plans copy between the tiers, if the scheduler can tell: ``kv.most_copies`` and
        ``kv.copying_pays``. Called once, by the engine."""

    def added(self, request: Request) -> None:
        """A request was queued, for the first time or after a failure."""

    def ended(self, request: Request) -> None:
        """A request has finished, or was aborted."""

    def observe(self, plan: IterationPlan, result: StepResult, stages: Mapping[int, int]) -> None:
        """A plan was carried out. Its tokens are not added yet, and ``stages`` are those that CPU batches were at
        before."""

    def emptied(self) -> None:
        """All requests were removed after a failure; they may be added again."""

    def check_targets(self, request: Request, state: SchedulerState) -> None:
        """Check that a request that arrives now can keep its targets, if the scheduler has any.

        Raises:
            RequestRefusedForNow: it cannot; the message names the target.
        """

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        """Measured seconds over profiled seconds of each operation, by name; empty for schedulers that predict
        nothing."""
        return {}
