"""Machines like those of the papers, without their GPUs: cards that are named only, and profiles of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec
from evaluation import artifact
from evaluation.drivers import TorchTask
from evaluation.grid import simulated_hardware
from evaluation.measure import live_systems
from evaluation.measure.live_systems import ProfiledMachine
from evaluation.planning import plan as planning
from evaluation.planning import setting
from evaluation.run import Point
from evaluation.studies import figures as figure_jobs
from swiftllm.config import EngineConfig
from swiftllm.machine import GIB, Card
from swiftllm.scheduling.validation import SchedulerLimits

T4 = Card("Tesla T4", 15360 << 20, (7, 5))
A10 = Card("NVIDIA A10", 23028 << 20, (8, 6))
A10G = Card("NVIDIA A10G", 23028 << 20, (8, 6))
L4 = Card("NVIDIA L4", 23034 << 20, (8, 9))
RTX_3060 = Card("NVIDIA GeForce RTX 3060", 12288 << 20, (8, 6))
START_S = 20.0
FEW = Lengths(WorkloadSpec("few", 2), "Few", Origin("fitted", "for tests"), (TraceRow(5, 3, 0.0), TraceRow(4, 2, 0.0)))
"""Two short requests."""


def on_machine(
    patch: pytest.MonkeyPatch, cache: Path, card: Card | None, host_gib: float = 256.0, total_gib: float | None = None
) -> None:
    """Make this machine one with this card and as much available host memory, an empty cache and no checkpoints.

    ``total_gib``: of the host's memory in all, by default what is available.
    """
    for module in (figure_jobs, planning, artifact, live_systems):
        patch.setattr(module, "first_card", lambda: card)
    patch.setattr(planning, "available_host_bytes", lambda: int(host_gib * GIB))
    patch.setattr(planning, "host_memory_bytes", lambda: int((total_gib or host_gib) * GIB))
    patch.setattr(setting, "try_to_load_from_cache", lambda *_: None)
    patch.setenv("APEX_CACHE_DIR", str(cache))


def slower(table: ProfileTable, factor: float) -> ProfileTable:
    """The table of a machine on which everything takes ``factor`` as long."""

    def scaled(value: Curve | Surface | float) -> Curve | Surface | float:
        if isinstance(value, Surface):
            return Surface(value.firsts, tuple(map(scaled, value.curves)))
        return Curve(value.sizes, tuple(factor * s for s in value.seconds)) if isinstance(value, Curve) else value

    parts = {field.name: getattr(table, field.name) for field in fields(table)}
    return ProfileTable(**{name: value if name == "identity" else scaled(value) for name, value in parts.items()})


def simulated_profile(setting: PaperSetting, factor: float = 1.0) -> Callable[[EngineConfig], ProfiledMachine]:
    """What profiling gives on the paper's machine, predicted; on one that is ``factor`` times slower."""
    hardware = simulated_hardware(setting, "apex")

    def profile(config: EngineConfig) -> ProfiledMachine:
        limits = SchedulerLimits(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)
        table = slower(hardware.table, factor)
        return ProfiledMachine(table, hardware.num_layers, limits, config.dtype, hardware.gpu)

    return profile


class NamedMachine:
    """Has the profile of the machine of a paper's setting, and runs nothing. ``profiled`` are the engines asked for."""

    def __init__(self, setting: str, factor: float = 1.0) -> None:
        self.simulated = simulated_profile(load_setting(setting), factor)
        self.profiled: list[EngineConfig] = []

    def profile(self, config: EngineConfig) -> ProfiledMachine:
        self.profiled.append(config)
        return replace(self.simulated(config), dtype=config.dtype, start_s=START_S)


def live_point(system: str, engine: EngineConfig, key: str | None = None, session: Hashable = None) -> Point:
    """A measured point of few requests. By default its session is its system."""
    return Point(
        key or system, key or system, key or system, TorchTask(system, engine, FEW, {}), session=session or system
    )
