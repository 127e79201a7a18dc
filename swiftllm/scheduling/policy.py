"""What a scheduler is: a policy makes plans for the residents, and is told what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request
from swiftllm.core.slo import Slo
from swiftllm.kv.blocks import KVCacheManager
from swiftllm.scheduling.residents import Residents
from swiftllm.scheduling.rules import Rules


class Policy:
    """Decides what the next iteration computes. It keeps what it learns, and no request: those are the residents'."""

    rules = Rules()

    @property
    def slo(self) -> Slo | None:
        """The targets that plans keep, in policies that have any."""
        return None

    def plan(self, residents: Residents) -> IterationPlan:
        """Plan the next iteration. Its blocks are allocated and the queues updated; the caller must run the plan."""
        raise NotImplementedError

    def manage_copies(self, kv: KVCacheManager) -> None:
        """Set which cached blocks plans copy between the tiers, if the policy can tell: ``kv.most_copies`` and
        ``kv.copying_pays``. Called once, by the engine."""

    def added(self, request: Request) -> None:
        """A request was queued, for the first time or after a failure."""

    def ended(self, request: Request) -> None:
        """A request has finished, or was aborted."""

    def observe(self, plan: IterationPlan, result: StepResult, boundaries: Mapping[int, int]) -> None:
        """A plan was carried out. Its tokens are not added yet, and ``boundaries`` are those of cohorts before it."""

    def emptied(self) -> None:
        """All requests were removed after a failure; they may be added again."""

    def check_targets(self, request: Request, residents: Residents) -> None:
        """Check that a request that arrives now can keep its targets, if the policy has any.

        Raises:
            RequestRefusedForNow: it cannot; the message names the target.
        """

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        """Measured over profiled time of each operation, by name; empty for policies that predict nothing."""
        return {}
