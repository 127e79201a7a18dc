"""Summary records of two classes of service as tables on the terminal."""

from __future__ import annotations

from rich.console import Console

from apex.cli.output import number, table
from evaluation.figures.omniserve.words import Records, panel_words
from evaluation.results.kinds import label_of

SWEPT = (
    ("req/s", "request_rate", "g"),
    ("burst s", "rate_interval_s", "g"),
    ("target", "tpot_slo_s", "g"),
    ("hosts", "cpu_hosts", "d"),
    ("blocks", "num_gpu_blocks", "d"),
    ("slower", "slower", "g"),
    ("control", "admission_control", ""),
)
"""Shown where they differ."""
COLUMNS = (
    ("system", "system", "s"),
    ("in SLO", "slo_attainment", ".2%"),
    ("points", "points_over_alone", "+.2f"),
    ("refused", "refused", "d"),
    ("TTFT p99", "latency_sensitive_ttft_s_p99", ".2f"),
    ("TPOT p50", "latency_sensitive_tpot_s_p50", ".3f"),
    ("p99", "latency_sensitive_tpot_s_p99", ".3f"),
    ("LS tok/s", "latency_sensitive_tokens_per_s", ".0f"),
    ("BE tok/s", "best_effort_tokens_per_s", ".1f"),
    ("ratio", "best_effort_over_baseline", ".2f"),
)
OF_HOSTS = (("/ 1 host", "best_effort_over_one_host", ".2f"),)
OF_ADMISSION = (
    ("TTFT ok", "ttft_attainment", ".2%"),
    ("admitted", "ttft_attainment_admitted", ".2%"),
    ("LS / all", "throughput_over_uncontrolled", ".3f"),
)
"""Where hosts, or admission control, differ."""


def print_omniserve(shows: str, summary: Records, console: Console) -> None:
    """A table for each machine and best-effort stream, with what differs in it."""
    kind, baseline = label_of(summary), summary[0]["baseline"]
    console.print(
        f"\n{shows}, {kind}. in SLO: share of offered latency-sensitive requests (LS) within both targets; "
        f"points: that minus attainment without best effort (BE); ratio: BE tokens/s over {baseline}'s",
        highlight=False,
        soft_wrap=True,
    )
    groups: dict[str, list] = {}
    for row in summary:
        groups.setdefault(panel_words(row), []).append(row)
    for title, rows in groups.items():
        columns = shown_columns(rows)
        cells = [tuple(number(row.get(field), form) for _, field, form in columns) for row in rows]
        console.print(title, style="bold", highlight=False)
        console.print(table([name for name, _, _ in columns], cells))


def shown_columns(rows: Records) -> list[tuple[str, str, str]]:
    """What differs among the rows, and what is known of them."""
    varied = {field for _, field, _ in SWEPT if len({row.get(field) for row in rows}) > 1}
    columns = [column for column in SWEPT if column[1] in varied] + list(COLUMNS)
    columns += OF_HOSTS if "cpu_hosts" in varied else ()
    if "admission_control" in varied:
        columns = [column for column in columns if column[0] not in ("ratio", "p99", "TPOT p50")] + list(OF_ADMISSION)
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]
