"""The table of the papers' systems, and what `swiftllm` finds of this package where it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from apex.schedulers.adaptive import Adaptive
from apex.schedulers.apex import Apex
from apex.schedulers.hybrid import Predicting
from apex.schedulers.neo import FastDecode, Neo
from apex.schedulers.omniserve import Llumnix, OmniServe, OmniServeStepping, Sarathi
from apex.strategy import StrategyConfig
from swiftllm.core.request import Tier
from swiftllm.systems import System, register_system, use_builder

if TYPE_CHECKING:
    from swiftllm.config import EngineConfig
    from swiftllm.engine.engine import Engine

# -- the table ---------------------------------------------------------------------------------------------------------
# The papers' schedulers: scheduler state and predictions to an iteration plan. Importing this registers them.


def register_scheduler(
    name: str, summary: str, scheduler: type[Predicting], cached_tiers: tuple[Tier, ...] = tuple(Tier)
) -> None:
    """Make a scheduler that decodes on the CPU a named system, real and simulated. See
    :class:`~swiftllm.systems.System` for ``cached_tiers``.

    Raises:
        ValueError: another system has that name.
    """
    register_system(System(name, summary, scheduler, needs_predictions=True, cached_tiers=cached_tiers))


register_scheduler("neo", "NEO (MLSys'25): load-aware scheduling, asymmetric pipelining", Neo, ())
register_scheduler("fastdecode", "FastDecode+ (in NEO): all decode attention on the CPU", FastDecode, ())
register_scheduler("apex", "APEX: an inequality chooses pipelining or asynchronous overlap", Apex)
register_scheduler(
    "adaptive",
    "this project's: the fastest by prediction of GPU-only, pipelining and free-running CPU batches",
    Adaptive,
)
register_scheduler("omniserve", "OmniServe (SIGMOD'26): best-effort requests in the time that targets leave", OmniServe)
register_scheduler(
    "omniserve-stepping",
    "omniserve whose best-effort CPU batches also run stages alone (this project's)",
    OmniServeStepping,
)
register_scheduler("sarathi", "Sarathi-Serve (OSDI'24) with two classes: GPU only, within targets", Sarathi, ())
register_system(
    System("llumnix", "Llumnix (OSDI'24), one instance: GPU only, blocks reserved", Llumnix, cached_tiers=())
)


# -- engines that predict their times ----------------------------------------------------------------------------------
# What `swiftllm` finds of this package where it is installed: its systems, and engines that predict their times.


def build(system: System, config: EngineConfig, strategy: Mapping[str, Any]) -> Engine:
    """The engine of a system; ``strategy`` has fields of :class:`StrategyConfig` by name."""
    from apex.build import build_system  # loads torch

    known = {field.name for field in fields(StrategyConfig)}
    if unknown := [name for name in strategy if name not in known]:
        raise TypeError(
            f"system={system.name!r} has no option {', '.join(unknown)}: its own are {', '.join(sorted(known))}"
        )
    return build_system(system.name, config, StrategyConfig(**strategy))


use_builder(build)
