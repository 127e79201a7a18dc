"""What `swiftllm` finds of this package where it is installed: its systems, and engines that predict their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import apex.schedulers  # noqa: F401  registers its systems
from apex.strategy import StrategyConfig
from swiftllm.systems import System, use_builder

if TYPE_CHECKING:
    from swiftllm.config import EngineConfig
    from swiftllm.engine.engine import Engine


def build(system: System, config: EngineConfig, strategy: Mapping[str, Any]) -> Engine:
    """
    Raises:
        TypeError: a name is no field of :class:`StrategyConfig`.
    """
    from apex.systems import build_system  # loads torch

    known = {field.name for field in fields(StrategyConfig)}
    if unknown := [name for name in strategy if name not in known]:
        raise TypeError(
            f"system={system.name!r} has no option {', '.join(unknown)}: its own are {', '.join(sorted(known))}"
        )
    return build_system(system.name, config, StrategyConfig(**strategy))


use_builder(build)
