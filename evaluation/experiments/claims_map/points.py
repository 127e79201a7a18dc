"""The simulated points of the claims map: every panel of a claim, once for each machine of a plane.

A machine of the plane is a setting with another speed of CPU attention and another number of KV blocks on the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apex.simulator.paper_settings import PaperSetting
from evaluation.grid import FIELDS, REFERENCE, Grid, Place, concerns, setting_of, simulate, simulated_point, workload_of
from evaluation.results.claims import Claim
from evaluation.run import Point
from swiftllm.systems import systems

METRIC = "output_tokens_per_s"


@dataclass(frozen=True)
class PlaneCell:
    """A cell of a setting's plane: GB/s of CPU attention with the ``REFERENCE``'s kernel, and KV blocks on the GPU."""

    cpu_gb_s: float
    gpu_blocks: int

    @classmethod
    def of(cls, setting: PaperSetting) -> PlaneCell:
        """The setting as it is."""
        return cls(setting.cpu_attention_gb_s(REFERENCE), setting.num_gpu_blocks)


def plane(setting: PaperSetting, speeds: Sequence[float], pools: Sequence[float]) -> list[PlaneCell]:
    """The machines of a setting's plane, pools and speeds ascending.

    Args:
        speeds: of CPU attention, in GB/s. The setting's own is added, and replaces those within a tenth of it.
        pools: times the setting's own. The own and the largest of the card are added. Those that hold less than the
            longest request, or that the card does not hold, are left out.
    """
    own = PlaneCell.of(setting)
    blocks = {own.gpu_blocks, setting.max_gpu_blocks, *(round(times * own.gpu_blocks) for times in pools)}
    fitting = sorted(number for number in blocks if setting.min_gpu_blocks <= number <= setting.max_gpu_blocks)
    others = {float(speed) for speed in speeds if abs(speed / own.cpu_gb_s - 1) > 0.1}
    return [PlaneCell(speed, number) for number in fitting for speed in sorted({own.cpu_gb_s, *others})]


def mappable(claim: Claim) -> bool:
    """Whether the map shows the claim: a number on throughput, about one setting, of systems that are scheduled."""
    is_number = claim.ratio is not None and claim.metric == METRIC
    return is_number and claim.setting is not None and systems().keys() >= set(claim.systems)


def map_points(
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

    Raises:
        ValueError: a setting has no panel; the message lists those that have.
    """
    speeds, pools = "cpu_attention_gb_s", "gpu_pools"
    grid = Grid.read(settings, FIELDS | {"figure"}, "quick" if quick else None, notes=(speeds, pools))
    places = Grid(tuple(grid.with_(seed=seed, trace_dir=trace_dir).places()))
    points = []
    for place in places.only("setting", names, lambda place: setting_of(place).name).panels:
        setting, own = setting_of(place), PlaneCell.of(setting_of(place))
        systems = _systems(place, setting, claims)
        machines = [
            {
                "num_gpu_blocks": None if machine.gpu_blocks == own.gpu_blocks else machine.gpu_blocks,
                "reference_cpu_gb_s": machine.cpu_gb_s,
            }
            for machine in plane(setting, settings[speeds], settings[pools])
        ]
        cells = Grid((place,)).with_(machine=machines, system=systems).places(concerns)
        charged = bool(place.get("neo_launches"))
        points += [_point(cell, setting, own, systems[-1], charged) for cell in cells]
    return points


def _systems(place: Place, setting: PaperSetting, claims: Sequence[Claim]) -> tuple[str, ...]:
    """The systems of the claims about a panel."""
    names = (setting.name, setting.like)
    about = [c for c in claims if mappable(c) and c.figure == place["figure"] and c.setting in names]
    about = [claim for claim in about if claim.workload in (None, workload_of(place))]
    return tuple(dict.fromkeys(system for claim in about for system in claim.systems))


def _point(cell: Place, setting: PaperSetting, own: PlaneCell, baseline: str, charged: bool) -> Point:
    """``charged``: whether the panel charges NEO's launches, which not all of its systems have."""
    values = {"baseline": baseline, "own_cpu_gb_s": own.cpu_gb_s, "own_gpu_blocks": own.gpu_blocks}
    variant = ", ".join(filter(None, (setting.reading, "with NEO's launches" if charged else None)))
    task = simulate(cell, ("figure", "reference_cpu_gb_s"), variant=variant, **values)
    speed, output_len = cell["reference_cpu_gb_s"], cell.get("output_len")
    names = (
        "map",
        cell["figure"],
        setting.name,
        workload_of(cell),
        *([] if output_len is None else [f"out{output_len:g}"]),
        *([] if speed is None else [f"cpu{speed:.4g}"]),
        *(["launches"] if charged else []),
        f"blocks{task.num_gpu_blocks}",
    )
    return simulated_point(names, task)
