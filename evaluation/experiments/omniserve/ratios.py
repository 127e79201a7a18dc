"""Fields of rows that compare them with other rows of the same figure."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns

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
METRICS = (
    "slo_attainment",
    "best_effort_tokens_per_s",
    "latency_sensitive_tpot_s_p50",
    "latency_sensitive_tokens_per_s",
    "ttft_attainment_admitted",
)


def with_service_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Adds to each row what it compares with, None where that did not run.

    - ``best_effort_over_baseline``: best-effort tokens/s over those of the figure's baseline.
    - ``best_effort_over_one_host``, ``tpot_over_one_host``: best-effort tokens/s and the median time per token of
      latency-sensitive requests, over those of the same system with the GPUs' own CPU host only.
    - ``points_over_alone``: attainment with best-effort requests minus attainment without, in percentage points;
      ``attainment_over_alone`` is the ratio. Without is the same system, else the baseline, on as many CPU hosts, else
      on one.
    - ``ttft_over_uncontrolled``, ``throughput_over_uncontrolled``: TTFT attainment of admitted requests, and tokens/s
      of latency-sensitive requests, over those without admission control.
    """
    frame = frame_of(rows, ("system", "baseline", *PLACE, *METRICS))
    is_baseline, one_host = frame["system"] == frame["baseline"], frame["cpu_hosts"] == 1
    controlled, is_alone = frame["admission_control"].astype(bool), frame["best_effort"].isna()
    beside = ~is_alone
    attained, tokens = frame["slo_attainment"].astype(float), frame["best_effort_tokens_per_s"]

    def place(who: str, *others: str) -> list[str]:
        """The fields of a place, but for those in which the other row differs."""
        return [who, *(field for field in PLACE if field not in others)]

    baseline = bases(frame, is_baseline, place("baseline"))
    on_one_host = bases(frame, one_host, place("system", "cpu_hosts"), lines=~one_host)
    uncontrolled = bases(frame, ~controlled, place("system", "admission_control"), lines=controlled)
    alone = bases(frame, is_alone, place("system", "best_effort"), lines=beside)
    for to, fields in (
        (is_alone & one_host, place("system", "best_effort", "cpu_hosts")),
        (is_alone & is_baseline, place("baseline", "best_effort")),
        (is_alone & is_baseline & one_host, place("baseline", "best_effort", "cpu_hosts")),
    ):
        alone = alone.fillna(bases(frame, to, fields, lines=beside))
    return with_columns(
        rows,
        best_effort_over_baseline=over(tokens, baseline),
        best_effort_over_one_host=over(tokens, on_one_host),
        tpot_over_one_host=over(frame["latency_sensitive_tpot_s_p50"], on_one_host),
        points_over_alone=100 * (attained - alone.map(attained)),
        attainment_over_alone=over(attained, alone),
        ttft_over_uncontrolled=over(frame["ttft_attainment_admitted"], uncontrolled),
        throughput_over_uncontrolled=over(frame["latency_sensitive_tokens_per_s"], uncontrolled),
    )
