"""Ratios of throughput to the best published system at the same place, and to the bound."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.experiments.runner import Derive
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns


def with_ratios(published: Sequence[str], at: Sequence[str] = ("case",), any_of: Sequence[str] = ()) -> Derive:
    """Adds to each row ``fraction_of_bound``, ``best_published`` (the fastest of these systems at the row's place) and
    ``ratio_to_best_published``; None where none of these ran. A row without tokens has ratios of 0.

    ``at`` and ``any_of`` are the fields of a place, as in ``bases``.
    """

    def complete(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
        frame = frame_of(rows)
        rate = frame["output_tokens_per_s"].astype(float).fillna(0.0)
        best = bases(frame, frame["system"].isin(published) & (rate > 0), at, any_of, best=rate)
        return with_columns(
            rows,
            fraction_of_bound=rate / frame["bound_tokens_per_s"].astype(float),
            best_published=best.map(frame["system"]),
            ratio_to_best_published=over(rate, best),
        )

    return complete
