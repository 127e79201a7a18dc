"""The one registry of named systems: what schedules each of them. Loads neither torch nor a backend.

Three builders look systems up here: :mod:`swiftllm.runtime.build` (GPU-only, on this machine), :mod:`apex.systems`
(every system, on this machine) and :mod:`apex.simulator.build` (every system, on predicted hardware).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftllm.scheduling.gpu_only import SwiftLLM, Vllm
from swiftllm.scheduling.policy import Policy

if TYPE_CHECKING:
    from swiftllm.config import EngineConfig
    from swiftllm.engine.engine import Engine

PLUGINS = ("apex.schedulers",)
"""Modules that register systems on import, where they are installed. ``$APEX_PLUGINS`` names more, with commas."""


PLACES_WEIGHTS = "apex.systems"
"""What builds engines whose weights are placed, where it is installed."""


def _build_gpu_only(system: System, config: EngineConfig, strategy: Mapping[str, Any]) -> Engine:
    if strategy:
        raise TypeError(f"{system.name} has no option {', '.join(strategy)}: it uses the GPU only and has no strategy")
    if config.weights_gpu_memory is not None:
        if importlib.util.find_spec(PLACES_WEIGHTS.partition(".")[0]) is None:
            raise ValueError("weights_gpu_memory needs the package apex, which places weights: install it or drop it")
        return importlib.import_module(PLACES_WEIGHTS).build_system(system.name, config)
    from swiftllm.runtime.build import build_gpu_only  # loads torch

    return build_gpu_only(system.name, system.policy, config)


@dataclass(frozen=True)
class System:
    """A named system.

    ``policy`` makes its policy. One that ``offloads`` decodes on the CPU: it is made from a performance model and a
    :class:`apex.strategy.StrategyConfig`, others from nothing. ``build`` makes an engine of the system on
    this machine, from its configuration and fields of its strategy.
    """

    name: str
    summary: str
    policy: Callable[..., Policy]
    offloads: bool = False
    build: Callable[[System, EngineConfig, Mapping[str, Any]], Engine] = _build_gpu_only


_systems: dict[str, System] = {}


def register_system(system: System) -> None:
    """Make a system known by its name to every command, engine and simulation.

    Raises:
        ValueError: another system has that name.
    """
    if system.name in _systems and _systems[system.name] != system:
        raise ValueError(f"there is a system {system.name!r} already")
    _systems[system.name] = system


def systems() -> Mapping[str, System]:
    """All systems by name, in the order in which they were registered."""
    _load_plugins()
    return _systems


def find_system(name: str) -> System:
    """
    Raises:
        ValueError: no such system; the message lists those there are.
    """
    if name not in systems():
        raise ValueError(f"unknown system {name!r}; there are {', '.join(_systems)}")
    return _systems[name]


def build_engine(name: str, config: EngineConfig, strategy: Mapping[str, Any] | None = None) -> Engine:
    """An engine of the named system on this machine. ``strategy``: fields of its strategy, by default its own.

    Raises:
        ValueError: no such system; the message lists those there are. Or an option is out of its range.
        TypeError: the system's strategy has no such field.
    """
    system = find_system(name)
    return system.build(system, config, strategy or {})


class PluginNotFound(ImportError):
    """A module that ``$APEX_PLUGINS`` names, or one that it needs, cannot be found."""


@functools.cache
def _load_plugins() -> None:
    for module in PLUGINS:
        if importlib.util.find_spec(module.partition(".")[0]):
            importlib.import_module(module)
    for module in filter(None, map(str.strip, os.environ.get("APEX_PLUGINS", "").split(","))):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise PluginNotFound(f"APEX_PLUGINS names {module!r}: {error}; is it on PYTHONPATH?") from error


register_system(System("vllm", "GPU only, as vLLM V1 schedules (SOSP'23): preemption by recompute", Vllm))
register_system(System("swiftllm", "GPU only (SwiftLLM): the CPU tier stores what is swapped out", SwiftLLM))
