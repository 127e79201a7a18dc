"""What rows are compared with: the best published system at the same place, the bound, and a right profile table."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.experiments.adaptive.points import ERROR
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns

LATENCY_RATIOS = {
    "per_token_latency_s_mean": "latency_over",
    "ttft_s_p99": "ttft_p99_over",
    "tpot_s_p99": "tpot_p99_over",
}
"""Metrics of which a row under load has ratios to other systems, and how the names of these begin."""


def with_ratios(
    rows: Sequence[FlatRecord], published: Sequence[str], at: Sequence[str] = ("case",), any_of: Sequence[str] = ()
) -> list[FlatRecord]:
    """Adds to each row ``fraction_of_bound``, ``best_published`` (the fastest of these systems at the row's place) and
    ``ratio_to_best_published``; None where none of these ran. A row without tokens has ratios of 0.

    ``at`` and ``any_of`` are the fields of a place, as in ``bases``.
    """
    frame = frame_of(rows)
    rate = frame["output_tokens_per_s"].astype(float).fillna(0.0)
    best = bases(frame, frame["system"].isin(published) & (rate > 0), at, any_of, best=rate)
    return with_columns(
        rows,
        fraction_of_bound=rate / frame["bound_tokens_per_s"].astype(float),
        best_published=best.map(frame["system"]),
        ratio_to_best_published=over(rate, best),
    )


def with_latency_ratios(rows: Sequence[FlatRecord], published: Sequence[str]) -> list[FlatRecord]:
    """Adds to each row its latencies over those of each ``published`` system at the same load, named as in
    ``LATENCY_RATIOS`` with the system's name; None where that did not run."""
    frame, ratios = frame_of(rows), {}
    for system in published:
        base = bases(frame, frame["system"] == system, ("case", "load"))
        ratios |= {f"{name}_{system}": over(frame[metric], base) for metric, name in LATENCY_RATIOS.items()}
    return with_columns(rows, **ratios)


def with_error_ratios(rows: Sequence[FlatRecord], published: Sequence[str]) -> list[FlatRecord]:
    """As ``with_ratios`` under the same error; also ``ratio_to_right_table``: throughput over that of the same system
    with a right table."""
    frame = frame_of(rows)
    right = bases(frame, frame["actual_over_believed"].fillna(1.0) == 1.0, ("case", "system"))
    compared = with_ratios(rows, published, any_of=ERROR)
    return with_columns(compared, ratio_to_right_table=over(frame["output_tokens_per_s"], right))
