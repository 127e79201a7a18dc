"""The papers' claims beside what we get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evaluation.paths import CLAIMS_FILE
from evaluation.results import FlatRecord

# The GPU-only baseline stands in for one that was not run.
STAND_INS = {"vllm": "swiftllm"}


@dataclass(frozen=True)
class Claim:
    """A paper says: ``systems[0]`` over ``systems[1]`` in ``metric`` is ``ratio``; ``up_to``: at best."""

    figure: str
    section: str
    hardware: str
    workload: str | None
    metric: str
    systems: tuple[str, str]
    ratio: float
    up_to: bool


@dataclass(frozen=True)
class Comparison:
    """A claim and our ratios for it, one per point of its workload; ``systems`` are the two compared here."""

    claim: Claim
    systems: tuple[str, str]
    ours: tuple[float, ...]


def load_claims(figure: str, path: Path = CLAIMS_FILE) -> list[Claim]:
    """The claims of one figure, in the order of the file."""
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    claims = [Claim(**{**entry, "systems": tuple(entry["systems"])}) for entry in entries]
    return [claim for claim in claims if claim.figure == figure]


def compare(claims: Sequence[Claim], summary: Sequence[FlatRecord]) -> list[Comparison]:
    """Our ratios for each claim; a claim none of whose points were run has none."""
    systems_run = {record["system"] for record in summary}
    comparisons = []
    for claim in claims:
        pair = tuple(name if name in systems_run else STAND_INS.get(name, name) for name in claim.systems)
        points = [record for record in summary if record["workload"] == claim.workload]
        ratios = ratios_by_point(points, claim.metric, *pair)
        comparisons.append(Comparison(claim, pair, tuple(ratios.values())))
    return comparisons


def ratios_by_point(records: Sequence[FlatRecord], metric: str, system: str, other: str) -> dict[float, float]:
    """``system`` over ``other`` in ``metric``, by average output length, where both were measured."""

    def values(name: str) -> dict[float, float]:
        return {r["output_len"]: r[metric] for r in records if r["system"] == name and r.get(metric)}

    ours, theirs = values(system), values(other)
    return {length: ours[length] / theirs[length] for length in ours if length in theirs}
