"""Fields of rows that compare them with other rows of the same figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evaluation.results.folder import FlatRecord

PLACE = (
    "setting",
    "num_gpu_blocks",
    "best_effort",
    "request_rate",
    "rate_interval_s",
    "tpot_slo_s",
    "cpu_hosts",
    "admission_control",
    "slower",
)
"""Fields of a row that name its point."""


def with_service_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Adds to each row what it compares with, None where that did not run.

    - ``best_effort_over_baseline``: best-effort tokens/s over those of the figure's baseline.
    - ``best_effort_over_one_host``, ``tpot_over_one_host``: best-effort tokens/s and the median time per token of
      latency-sensitive requests, over those of the same system with the GPUs' own CPU host only.
    - ``points_over_alone``: attainment with best-effort requests minus attainment without, in percentage points;
      ``attainment_over_alone`` is the ratio.
    - ``ttft_over_uncontrolled``, ``throughput_over_uncontrolled``: TTFT attainment of admitted requests, and tokens/s
      of latency-sensitive requests, over those without admission control.
    """
    at = {(row["system"], *place_of(row)): row for row in rows}

    def other(row: FlatRecord, system: str | None = None, **changed: Any) -> Mapping[str, Any]:
        return at.get((system or row["system"], *place_of({**row, **changed})), {})

    return [{**row, **_compared(row, other)} for row in rows]


def place_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[field] for field in PLACE)


def _compared(row: FlatRecord, other: Any) -> FlatRecord:
    tokens, attained = "best_effort_tokens_per_s", row["slo_attainment"]
    one_host = other(row, cpu_hosts=1) if row["cpu_hosts"] > 1 else {}
    uncontrolled = other(row, admission_control=False) if row["admission_control"] else {}
    alone = alone_row(row, other) if row["best_effort"] else {}
    without = alone.get("slo_attainment")
    known = attained is not None and without is not None
    return {
        "best_effort_over_baseline": over(row, other(row, row["baseline"]), tokens),
        "best_effort_over_one_host": over(row, one_host, tokens),
        "tpot_over_one_host": over(row, one_host, "latency_sensitive_tpot_s_p50"),
        "points_over_alone": 100 * (attained - without) if known else None,
        "attainment_over_alone": over(row, alone, "slo_attainment"),
        "ttft_over_uncontrolled": over(row, uncontrolled, "ttft_attainment_admitted"),
        "throughput_over_uncontrolled": over(row, uncontrolled, "latency_sensitive_tokens_per_s"),
    }


def alone_row(row: FlatRecord, other: Any) -> Mapping[str, Any]:
    """The row without best-effort requests: of the same system, else of the baseline; CPU hosts make no difference."""
    for system in (row["system"], row["baseline"]):
        for hosts in (row["cpu_hosts"], 1):
            if found := other(row, system, best_effort=None, cpu_hosts=hosts):
                return found
    return {}


def over(row: Mapping[str, Any], base: Mapping[str, Any], metric: str) -> float | None:
    value, other = row.get(metric), base.get(metric)
    return value / other if other and value is not None else None
