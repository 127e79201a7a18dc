"""The simulated points of the claims map: every panel of a claim, once for each machine of a plane.

A machine of the plane is a setting with another speed of CPU attention and another number of KV blocks on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from apex.simulator.paper_settings import PaperSetting
from evaluation.experiments.axes import REFERENCE
from evaluation.experiments.grid import Grid, Panel, Place, values_of
from evaluation.experiments.papers.points import point_names
from evaluation.experiments.places import FIELDS, concerns, lengths_of, setting_of, simulate, workload_of
from evaluation.experiments.runner import Point
from evaluation.results.claims import Claim
from swiftllm.systems import systems

KNOWN = FIELDS | {"figure"}
METRIC = "output_tokens_per_s"


@dataclass(frozen=True)
class Machine:
    """A cell of a setting's plane: GB/s of CPU attention with the ``REFERENCE``'s kernel, and KV blocks on the GPU."""

    cpu_gb_s: float
    gpu_blocks: int

    @classmethod
    def of(cls, setting: PaperSetting) -> Machine:
        """The setting as it is."""
        return cls(setting.cpu_attention_gb_s(REFERENCE), setting.num_gpu_blocks)


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
        quick: the variant of this name of every panel.

    Raises:
        ValueError: a setting has no panel; the message lists those that have.
    """
    panels = Grid.read({"panels": settings["panels"]}, KNOWN, "quick" if quick else None).panels
    on_hosts = [{**panel, "host": host} for panel in panels for host in values_of(panel, "host") or [None]]
    known = list(dict.fromkeys(setting_of(panel).name for panel in on_hosts))
    if unknown := [name for name in names or () if name not in known]:
        raise ValueError(f"no panel in setting {', '.join(unknown)}; there are {', '.join(known)}")
    points = []
    for panel in on_hosts:
        setting, systems = setting_of(panel), _systems(panel, claims)
        if not systems or setting.name not in (names or known):
            continue
        own = Machine.of(setting)
        machines = [
            {"reference_cpu_gb_s": cpu_gb_s, "num_gpu_blocks": None if blocks == own.gpu_blocks else blocks}
            for cpu_gb_s, blocks in map(astuple, plane(setting, settings["cpu_attention_gb_s"], settings["gpu_pools"]))
        ]
        chosen = {"repeats": 1, "seed": seed, "trace_dir": trace_dir, "system": systems, "baseline": systems[-1]}
        places = Grid(({"machine": machines, **panel, **chosen},)).places(concerns)
        points += [_point(place, own) for place in places]
    return points


def _systems(panel: Panel, claims: Sequence[Claim]) -> tuple[str, ...]:
    """The systems of the claims about a panel."""
    where = (panel["figure"], setting_of(panel).name)
    about = [claim for claim in claims if mappable(claim) and (claim.figure, claim.setting) == where]
    about = [claim for claim in about if claim.workload in (None, workload_of(panel))]
    return tuple(dict.fromkeys(system for claim in about for system in claim.systems))


def _point(place: Place, own: Machine) -> Point:
    setting, lengths, cpu_gb_s = setting_of(place), lengths_of(place), place["reference_cpu_gb_s"]
    tag, words = f"blocks{setting.num_gpu_blocks}", f"{setting.num_gpu_blocks} GPU blocks"
    if cpu_gb_s is not None:
        tag, words = f"cpu{cpu_gb_s:.4g}-{tag}", f"CPU {cpu_gb_s:.0f} GB/s, {words}"
    parts, titles = ["map", place["figure"], setting.name], [setting.title]
    key, group, label = point_names(parts, titles, lengths, place, (tag, words))
    row = ("figure", "baseline", "reference_cpu_gb_s")
    task = simulate(place, row, lengths, own_cpu_gb_s=own.cpu_gb_s, own_gpu_blocks=own.gpu_blocks)
    return Point(key, group, label, task, concurrent=True, cost=float(lengths.total_output_tokens))
