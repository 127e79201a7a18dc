"""The simulated points of the claims map: every panel of a claim, once for each machine of a plane.

A machine of the plane is a setting with another speed of CPU attention and another number of KV blocks on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apex.simulator.paper_settings import PaperSetting
from evaluation.experiments.neo_points import neo_sweep
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.papers.sensitivity import with_cpu_bandwidth
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_sweeps import Panel, Sweep, make_sweep_points, point_names
from evaluation.results.claims import Claim
from evaluation.traces.workloads import Lengths
from swiftllm.systems import systems

METRIC = "output_tokens_per_s"
REFERENCE = "neo"
"""The system whose CPU attention gives a cell its speed."""


@dataclass(frozen=True)
class Machine:
    """A cell of a setting's plane: GB/s of CPU attention with the ``REFERENCE``'s kernel, and KV blocks on the GPU."""

    cpu_gb_s: float
    gpu_blocks: int

    @classmethod
    def of(cls, setting: PaperSetting) -> Machine:
        """The setting as it is."""
        return cls(setting.cpu_attention_gb_s(REFERENCE), setting.num_gpu_blocks)

    def applied(self, setting: PaperSetting, system: str) -> PaperSetting:
        """The setting on this machine, as ``system`` sees it: its kernel is faster or slower by the same factor."""
        own = Machine.of(setting)
        if self.gpu_blocks != own.gpu_blocks:
            setting = setting.with_figures("claims map", num_gpu_blocks=self.gpu_blocks)
        rate = setting.cpu_attention_gb_s(system)
        if self.cpu_gb_s == own.cpu_gb_s or rate is None:
            return setting
        return with_cpu_bandwidth(setting, rate * self.cpu_gb_s / own.cpu_gb_s)


def plane(setting: PaperSetting, speeds: Sequence[float], pools: Sequence[float]) -> list[Machine]:
    """The machines of a setting's plane, pools and speeds ascending.

    Args:
        speeds: of CPU attention, in GB/s. The setting's own is added, and replaces those within a tenth of it.
        pools: times the setting's own. The own and the largest of the card are added. Those that hold less than the
            longest request, or that the card does not hold, are left out.
    """
    own = Machine.of(setting)
    blocks = {own.gpu_blocks, setting.max_gpu_blocks, *(round(times * own.gpu_blocks) for times in pools)}
    fitting = sorted(number for number in blocks if setting.min_gpu_blocks <= number <= setting.max_gpu_blocks)
    others = {float(speed) for speed in speeds if abs(speed / own.cpu_gb_s - 1) > 0.1}
    return [Machine(speed, number) for number in fitting for speed in sorted({own.cpu_gb_s, *others})]


def mappable(claim: Claim) -> bool:
    """Whether the map shows the claim: a number on throughput, about one setting, of systems that are scheduled."""
    is_number = claim.ratio is not None and claim.metric == METRIC
    return is_number and claim.setting is not None and systems().keys() >= set(claim.systems)


def make_map_points(
    settings: Mapping[str, Any],
    claims: Sequence[Claim],
    *,
    names: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    trace_dir: Path | None = None,
) -> list[Point]:
    """The points of all panels on all machines of their planes. A GPU-only system runs once for each pool.

    Args:
        settings: the experiment file.
        claims: those of all figures; they name the systems of a panel.
        names: settings to map; by default all of the experiment file.
        quick: ``quick_num_requests`` of every panel.

    Raises:
        ValueError: a setting has no panel; the message lists those that have.
    """
    panels = [panel for raw in settings["panels"] for panel in _panels(raw, quick)]
    known = list(dict.fromkeys(panel.setting.name for panel in panels))
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no panel in setting {', '.join(unknown)}; there are {', '.join(known)}")
    points = []
    for panel in panels:
        systems = _systems(panel, claims)
        if not systems or panel.setting.name not in (names or known):
            continue
        sweep = Sweep(systems, systems[-1], (panel,), seed, trace_dir=trace_dir)
        own = Machine.of(panel.setting)
        for machine in plane(panel.setting, settings["cpu_attention_gb_s"], settings["gpu_pools"]):
            here = tuple(s for s in systems if machine.cpu_gb_s == own.cpu_gb_s or panel.setting.kernel_of(s))
            points += make_sweep_points(replace(sweep, systems=here), functools.partial(_point, machine))
    return points


def _panels(raw: Mapping[str, Any], quick: bool) -> list[Panel]:
    """A panel of the experiment file, once for each of its hosts; its letter is the name of its figure."""
    shared = {key: value for key, value in raw.items() if key not in ("figure", "quick_num_requests")}
    number = raw["quick_num_requests"] if quick else raw["num_requests"]
    named = {**shared, "panel": raw["figure"], "num_requests": number}
    return list(neo_sweep({"panels": [named], "systems": [REFERENCE], "baseline": REFERENCE}).panels)


def _systems(panel: Panel, claims: Sequence[Claim]) -> tuple[str, ...]:
    """The systems of the claims about a panel."""
    about = [c for c in claims if mappable(c) and (c.figure, c.setting) == (panel.panel, panel.setting.name)]
    about = [claim for claim in about if claim.workload in (None, panel.workload_name)]
    return tuple(dict.fromkeys(system for claim in about for system in claim.systems))


def _point(machine: Machine, sweep: Sweep, panel: Panel, lengths: Lengths, system: str) -> Point:
    own, offloads = Machine.of(panel.setting), panel.setting.kernel_of(system) is not None
    values = {
        "figure": panel.panel,
        "baseline": sweep.baseline,
        "reference_cpu_gb_s": machine.cpu_gb_s if offloads else None,
        "own_cpu_gb_s": own.cpu_gb_s,
        "own_gpu_blocks": own.gpu_blocks,
    }
    setting = machine.applied(panel.setting, system)
    tag, words = f"blocks{machine.gpu_blocks}", f"{machine.gpu_blocks} GPU blocks"
    if offloads:
        tag, words = f"cpu{machine.cpu_gb_s:.4g}-{tag}", f"CPU {machine.cpu_gb_s:.0f} GB/s, {words}"
    parts, titles = ["map", panel.panel, setting.name], [setting.title]
    key, group, label = point_names(parts, titles, lengths, system, sweep.repeats, (tag, words))
    task = simulated_task(setting, system, lengths, values)
    return Point(key, group, label, task, concurrent=True, cost=float(lengths.total_output_tokens))
