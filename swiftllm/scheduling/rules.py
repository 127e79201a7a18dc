"""Where the requests of a system decode, and who may be preempted for whom: data, which never changes."""

from __future__ import annotations

from dataclasses import dataclass

from swiftllm.core.request import ServiceClass, Tier


@dataclass(frozen=True)
class SchedulingRules:
    """What a system lets its requests do. Their order is the same in all systems: by class, then by arrival."""

    tiers: tuple[Tier, ...] = (Tier.GPU,)
    """Where requests start and decode, the preferred tier first."""
    urgent_tiers: tuple[Tier, ...] | None = None
    """Where latency-sensitive requests do; None: in all of ``tiers``."""
    spills: tuple[ServiceClass, ...] = tuple(ServiceClass)
    """Classes whose requests move to the CPU tier when they are preempted on the GPU. Others are computed again."""
    stores_by_age: bool = True
    """Whether the blocks of younger requests in the CPU tier make way for older ones; else only of less urgent ones."""
    reserve: int = 1
    """How often ``block_size`` tokens are left to each request of a tier, in all layers, when another one enters.
    Without them a decode of the next iteration could preempt the request just added."""
    withheld: float = 0.0
    """Share of a tier's blocks that best-effort requests leave free when they start."""
    by_chunk: bool = False
    """Whether prompts get blocks chunk by chunk; else for all of their tokens when they start."""
    whole_prompts: bool = False
    """With ``by_chunk``: whether a prompt starts only where all of its tokens have room. vLLM 0.19 reserves so."""
    plans_ahead: bool = False
    """Whether an iteration is planned while the one before it runs, as vLLM's asynchronous scheduler does: it starts no
    request that arrives meanwhile, and what ends meanwhile keeps its blocks and its seat."""

    def tiers_of(self, service_class: ServiceClass) -> tuple[Tier, ...]:
        is_urgent = service_class is ServiceClass.LATENCY_SENSITIVE
        return self.urgent_tiers if is_urgent and self.urgent_tiers is not None else self.tiers
