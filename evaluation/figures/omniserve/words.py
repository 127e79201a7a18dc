"""Words for the metrics, points and notes of the figures of two classes of service."""

from __future__ import annotations

from collections.abc import Sequence

from evaluation.figures.style import FigureText
from evaluation.figures.words import span_text, trace_note, unique_values
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import distinct

Records = Sequence[FlatRecord]

BEST_EFFORT, ATTAINMENT = "best_effort_tokens_per_s", "slo_attainment"
AXES = {
    "request_rate": "latency-sensitive requests/s (Poisson arrivals)",
    "rate_interval_s": "seconds between changes of the request rate",
    "tpot_slo_s": "target: seconds per output token",
    "cpu_hosts": "CPU hosts, the GPUs' own included",
}
METRICS = {
    BEST_EFFORT: "best-effort tokens/s",
    ATTAINMENT: "share of requests within targets",
    "best_effort_over_one_host": "best-effort tokens/s over 1 host",
    "latency_sensitive_tpot_s_p50": "median seconds per token",
    "latency_sensitive_tokens_per_s": "latency-sensitive tokens/s",
    "ttft_attainment": "first tokens in time, of offered",
    "ttft_attainment_admitted": "first tokens in time, of admitted",
}
SHARES = (ATTAINMENT, "ttft_attainment", "ttft_attainment_admitted")


def line_label(record: FlatRecord, *, with_admission: bool) -> str:
    """Name of a row's line: its system, or how it admits requests where rows differ in that."""
    if not with_admission:
        return record["system"].removeprefix("omniserve-")
    return "admission" if record["admission_control"] else "admit all"


def panel_words(record: FlatRecord) -> str:
    """Machine and best-effort stream of a row."""
    stream = record["best_effort"] or "no best effort"
    return f"{record['setting_title']}, {stream.removesuffix('-backlog')}"


def figure_text(shows: str, records: Records, subtitle: str = "") -> FigureText:
    first = records[0]
    targets = dict.fromkeys(
        f"{row['setting_title']}: {row['ttft_slo_s']:g} s to the first token"
        + ("" if len(unique_values(records, "tpot_slo_s")) > 2 else f" and {row['tpot_slo_s']:g} s per token")
        for row in records
    )
    pools = dict.fromkeys(
        f"{row['setting_title']}: {row['num_gpu_blocks']} GPU blocks of 16 tokens, {row['cpu_kv_gb']:g} GB of KV cache "
        "in each CPU host"
        for row in records
    )
    durations = span_text([f"{value:g}" for value in sorted(distinct(records, "window_s"))])
    notes = [
        f"Latency-sensitive requests: {trace_title(first)}, {first['trace_origin']} lengths. {trace_note(records)} "
        "Best-effort lengths are synthetic shapes with the stated means, or Dolphin-r1's.",
        f"{durations} virtual seconds a point, seed {first['seed']}; tokens are "
        "counted within them, from the start, while CPU memory still fills. A refused request misses its targets.",
        "; ".join(pools) + ".",
        *system_notes(records),
    ]
    lines = [*([subtitle] if subtitle else []), "Targets: " + "; ".join(targets)]
    return FigureText(f"{shows} \u2014 SIMULATED", "\n".join(lines), "\n".join(notes))


def trace_title(record: FlatRecord) -> str:
    return record["workload_title"].split(" beside ")[0]


def system_notes(records: Records) -> list[str]:
    there, notes = unique_values(records, "system"), []
    if "neo" in there:
        notes.append("neo knows one class of requests, and serves them in the order of arrival.")
    if "omniserve-stepping" in there:
        text = (
            "omniserve-stepping (a line's name: stepping) is this project's own scheduler; the paper does not have it."
        )
        notes.append(text)
    return notes
