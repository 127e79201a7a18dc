"""Judges every claim in every cell of its plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.experiments.claims_map.points import METRIC, PlaneCell, mappable
from evaluation.results.claims import METRIC_WORDS, Claim, Comparison, agrees, compare_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped


@dataclass(frozen=True)
class JudgedCell:
    """A machine, and our ratio for the claim there; None if a point of the claim is not finished."""

    machine: PlaneCell
    ours: float | None
    holds: bool


@dataclass(frozen=True)
class MappedClaim:
    """A claim over its plane; ``own`` is the machine that the figures assume, ``variant`` its reading in words."""

    claim: Claim
    own: PlaneCell
    cells: tuple[JudgedCell, ...]
    variant: str = ""

    @property
    def ours(self) -> float | None:
        """Our ratio on the machine that the figures assume."""
        return next((cell.ours for cell in self.cells if cell.machine == self.own), None)

    @property
    def holding(self) -> list[JudgedCell]:
        return [cell for cell in self.cells if cell.holds]

    @property
    def nearest(self) -> JudgedCell | None:
        """The cell that holds and differs least from ``own``, both factors counted alike; None if none holds."""
        return min(self.holding, key=lambda cell: self._distance(cell.machine), default=None)

    @property
    def closest(self) -> JudgedCell | None:
        """The cell whose ratio comes closest to the claimed one; None if no cell is finished."""
        finished = [cell for cell in self.cells if cell.ours]
        return min(finished, key=lambda cell: abs(math.log(cell.ours / self.claim.ratio)), default=None)

    def _distance(self, machine: PlaneCell) -> float:
        return math.hypot(
            math.log(machine.cpu_gb_s / self.own.cpu_gb_s), math.log(machine.gpu_blocks / self.own.gpu_blocks)
        )


def judge_cells(claims: Sequence[Claim], rows: Sequence[FlatRecord]) -> list[MappedClaim]:
    """The mappable claims about which there are rows, in their order, once for each variant of the machine."""
    variants = grouped(rows, "variant")
    judged = [
        _judged(claim, [r for r in here if r["figure"] == claim.figure and claim.covers(r)])
        for claim in claims
        for here in variants.values()
    ]
    return [item for item in judged if item is not None]


def _judged(claim: Claim, rows: Sequence[FlatRecord]) -> MappedClaim | None:
    """``rows`` are those that the claim covers."""
    if not (mappable(claim) and rows):
        return None
    own = PlaneCell(rows[0]["own_cpu_gb_s"], rows[0]["own_gpu_blocks"])
    speeds = sorted({row["reference_cpu_gb_s"] for row in rows} - {None})
    pools = sorted({row["num_gpu_blocks"] for row in rows})
    compared = {
        machine: _compared(claim, rows, machine)
        for machine in (PlaneCell(speed, blocks) for blocks in pools for speed in speeds)
    }
    points = max(len(item.by_place) for item in compared.values())
    cells = []
    for machine, item in compared.items():
        ours = item.summary if points and len(item.by_place) == points else None  # else some points are not finished
        cells.append(JudgedCell(machine, ours, agrees(claim.ratio, ours)))
    return MappedClaim(claim, own, tuple(cells), rows[0].get("variant") or "")


def _compared(claim: Claim, rows: Sequence[FlatRecord], machine: PlaneCell) -> Comparison:
    """The claim on one machine. GPU-only systems have no speed of CPU attention."""
    here = [
        row
        for row in rows
        if row["num_gpu_blocks"] == machine.gpu_blocks and row["reference_cpu_gb_s"] in (None, machine.cpu_gb_s)
    ]
    return compare_claims([claim], here)[0]


def why_not_mapped(claim: Claim) -> str:
    """Why a claim that is not mappable is not."""
    if claim.ratio is None:
        return "states no number"
    if claim.metric != METRIC:
        over_rates = "latency" in claim.metric or "rate" in claim.metric
        why = "needs many request rates in each cell" if over_rates else "is no throughput of two systems at a point"
        return f"is about {METRIC_WORDS.get(claim.metric, claim.metric)}, which {why}"
    if claim.setting is not None:
        return "is about a paper whose systems are no schedulers"
    return "names no machine"
