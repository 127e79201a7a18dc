"""The one registry of named systems, and how one becomes an engine. Loads neither torch nor a backend."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine, HostWatch
from swiftllm.engine.executor import Executor
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.scheduler import Scheduler, SwiftLLM, Vllm
from swiftllm.scheduling.state import SchedulerState
from swiftllm.scheduling.validation import SchedulerLimits

if TYPE_CHECKING:
    from swiftllm.config import EngineConfig
    from swiftllm.engine.backend import Backend
    from swiftllm.model.tokenizer import Tokenizer

PLUGINS = ("apex.systems",)
"""Modules that register systems on import, where they are installed. ``$APEX_PLUGINS`` names more, with commas."""


@dataclass(frozen=True)
class System:
    """A named system.

    ``scheduler`` makes it, from nothing. One that ``needs_predictions`` is given a performance model and a
    :class:`apex.strategy.StrategyConfig`: those of :mod:`apex.schedulers`.
    """

    name: str
    summary: str
    scheduler: Callable[..., Scheduler]
    needs_predictions: bool = False
    cached_tiers: tuple[Tier, ...] = tuple(Tier)
    """Where prefixes are cached by default; nowhere in the papers' baselines, which had no prefix cache."""

    def caching_tiers(self, config: EngineConfig) -> tuple[Tier, ...]:
        """Where prefixes are cached with these options."""
        tiers = {"auto": self.cached_tiers, "gpu": (Tier.GPU,), "both": tuple(Tier)}[config.prefix_cache_tiers]
        return tiers if config.enable_prefix_caching else ()

    def resolved(self, config: EngineConfig) -> EngineConfig:
        """The options of an engine of this system: without a prefix cache, if it has none by default."""
        return config if self.caching_tiers(config) else replace(config, enable_prefix_caching=False)


@dataclass(frozen=True)
class Platform:
    """What a system runs on, real or simulated: a backend, the blocks of its two pools, and what it serves."""

    backend: Backend
    limits: SchedulerLimits
    kv: KVCacheManager
    description: Mapping[str, Any]
    vocab_size: int
    eos_token_ids: Sequence[int] = ()
    tokenizer: Tokenizer | None = None
    hosts: HostWatch | None = None


def build(
    system: System, platform: Platform, predictions: Sequence[Any] = (), details: Mapping[str, Any] | None = None
) -> Engine:
    """An engine of a system. ``predictions``: what it needs, if any; ``details`` are part of its description."""
    backend, scheduler = platform.backend, system.scheduler(*predictions)
    return Engine(
        SchedulerState(platform.limits, platform.kv, backend.now, scheduler.rules),
        scheduler,
        Executor(backend, backend.holds_weights),
        backend,
        vocab_size=platform.vocab_size,
        eos_token_ids=platform.eos_token_ids,
        tokenizer=platform.tokenizer,
        description={"system": system.name, **platform.description, **(details or {})},
        hosts=platform.hosts,
    )


# -- the registry -----------------------------------------------------------------------------------------------------

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


register_system(
    System("vllm", "GPU only, as vLLM V1 schedules (SOSP'23): preemption by recompute", Vllm, cached_tiers=(Tier.GPU,))
)
register_system(
    System("swiftllm", "GPU only (SwiftLLM): the CPU tier stores what is swapped out", SwiftLLM, cached_tiers=())
)


# -- what builds them on this machine ---------------------------------------------------------------------------------

Builder = Callable[[System, "EngineConfig", Mapping[str, Any]], Engine]
_builder: Builder | None = None


def use_builder(builder: Builder) -> None:
    """Build all engines on this machine with a plugin's function, which also predicts times and places weights.

    It is called with the system, the configuration, and fields of the system's strategy.
    """
    global _builder
    _builder = builder


def plugin_builder() -> Builder | None:
    """What a plugin builds engines with, if one does."""
    _load_plugins()
    return _builder
