"""Ratios of throughput to the best published system at the same place, and to the bound."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.experiments.runner import Complete
from evaluation.results.folder import FlatRecord


def with_ratios(published: Sequence[str], place: Sequence[str] = ("case",)) -> Complete:
    """Adds to each row ``fraction_of_bound``, ``best_published`` (the fastest of these systems at the row's place) and
    ``ratio_to_best_published``; None where none of these ran.

    ``place`` are the fields of a place. A system that does not depend on a field has None there, and counts at each
    of its values.
    """

    def complete(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
        candidates = [row for row in rows if row["system"] in published and row["output_tokens_per_s"]]
        return [{**row, **ratios(row, [other for other in candidates if is_at(other, row)])} for row in rows]

    def is_at(other: FlatRecord, row: FlatRecord) -> bool:
        return all(other[field] is None or other[field] == row[field] for field in place)

    def ratios(row: FlatRecord, candidates: Sequence[FlatRecord]) -> FlatRecord:
        rate, bound = row["output_tokens_per_s"] or 0.0, row["bound_tokens_per_s"]
        best = max(candidates, key=lambda other: other["output_tokens_per_s"], default=None)
        return {
            "fraction_of_bound": rate / bound if bound else None,
            "best_published": best["system"] if best else None,
            "ratio_to_best_published": rate / best["output_tokens_per_s"] if best else None,
        }

    return complete
