"""Every claim of the papers beside what was measured, simulated and predicted, with a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.results.claims import METRIC_WORDS, Claim, Comparison, compare_claims
from evaluation.results.folder import PREDICTED, FlatRecord
from evaluation.results.kinds import comparisons, distinct, is_full_size, is_simulated

AGREES = 0.10
"""Largest relative difference of two ratios that agree."""
AGREEMENT = f"agrees within {AGREES:.0%}"
NO_DIRECTION = 0.02
"""A ratio this near to 1 favours neither system."""
LIMITS = (
    f"Agrees: our ratio is within {AGREES:.0%} of the paper's. Larger, smaller: the effect differs by more than that. "
    f"Opposite direction: the other system is ahead, by more than {NO_DIRECTION:.0%}. Claims in words are not judged."
)
POOLS = {"papers": "paper's KV pools", "card": "all KV blocks it holds", "chosen": "a chosen KV pool"}


def verdict(claimed: float | None, ours: float | None) -> str:
    """Our ratio judged by the claimed one, in a word or two; :data:`LIMITS` states the rules.

    ``claimed`` is None for a claim in words, which is not judged. Ratios below 1 (latencies) are turned over, so that
    "larger" always means a larger effect.
    """
    if ours is None:
        return "not run"
    if claimed is None:
        return "not judged"
    effect, claimed_effect = (ours, claimed) if claimed >= 1 else (1 / ours, 1 / claimed)
    if effect < 1 - NO_DIRECTION:
        return "opposite direction"
    difference = effect / claimed_effect - 1
    if abs(difference) <= AGREES:
        return AGREEMENT
    return "larger" if difference > 0 else "smaller"


def agrees(claimed: float | None, ours: float | None) -> bool:
    """Whether the :func:`verdict` is that both ratios agree."""
    return verdict(claimed, ours) == AGREEMENT


@dataclass(frozen=True)
class ClaimOverview:
    """A claim and our comparisons for it.

    ``measured`` and ``predicted`` are of one run in the paper's setting; ``where`` names its setting and pools.
    ``simulated`` is of the paper's machine. Comparisons without a ratio are None.
    """

    claim: Claim
    where: str = ""
    measured: Comparison | None = None
    predicted: Comparison | None = None
    simulated: Comparison | None = None

    @property
    def judged(self) -> Comparison | None:
        """What the verdict is about: the measured ratio, or the simulated one where nothing was measured."""
        return self.measured or self.simulated

    @property
    def judged_word(self) -> str:
        return "measured" if self.measured else "simulated" if self.simulated else ""

    @property
    def verdict(self) -> str:
        return verdict(self.claim.ratio, self.judged.summary if self.judged else None)

    @property
    def what(self) -> str:
        """Metric and systems, with the stand-in of a system that was not run."""
        claim = self.claim
        metric = METRIC_WORDS.get(claim.metric, claim.metric.replace("_", " "))
        pair = self.judged.systems if self.judged else claim.systems
        stand_in = "" if pair == claim.systems else f" (here {' / '.join(pair)})"
        return f"{metric}, {' / '.join(claim.systems)}{stand_in}"


def overview(claims: Sequence[Claim], runs: Sequence[tuple[str, Sequence[FlatRecord]]]) -> list[ClaimOverview]:
    """The claims in their order, each once for every run that measured it in a paper's setting, else once.

    Args:
        claims: claims of any figures.
        runs: name of the experiment and rows of each result folder. Rows of another model, of a CPU and of scaled
            lengths are left out.
    """
    found = []
    for claim in claims:
        groups = [rows for name, records in runs if name == claim.figure for rows in comparisons(records)]
        simulated = next((c for rows in groups if is_simulated(rows[0]) and (c := compared(claim, rows))), None)
        here = [measured_overview(claim, list(filter(is_full_size, rows))) for rows in groups]
        measured = [replace(item, simulated=simulated) for item in here if item is not None]
        found += measured or [ClaimOverview(claim, simulated=simulated)]
    return found


def compared(claim: Claim, records: Sequence[FlatRecord]) -> Comparison | None:
    """The claim's ratios in rows of one comparison, None if there are none."""
    (item,) = compare_claims([claim], records)
    return item if item.ours else None


def measured_overview(claim: Claim, records: Sequence[FlatRecord]) -> ClaimOverview | None:
    """The claim in rows that one run measured in a paper's setting at full size, and the prediction of the same
    points; None without such rows."""
    rows = [record for record in records if claim.covers(record)]
    measured = compared(claim, rows)
    if measured is None:
        return None
    predicted = None
    if claim.metric == "output_tokens_per_s":
        predicted = compared(claim, [{**row, claim.metric: row.get(PREDICTED)} for row in rows])
    pools = [POOLS.get(origin, origin) for origin in distinct(rows, "setting_origin")]
    where = [*distinct(rows, "setting_title"), *pools]
    return ClaimOverview(claim, ", ".join(where), measured, predicted)
