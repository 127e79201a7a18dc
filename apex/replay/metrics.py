"""Every metric, defined once.

Times are seconds from the start of a replay. Percentiles interpolate linearly between order statistics. Only
completed requests count, except in ``failed`` and in the metrics of a class. A metric that does not apply is None.
docs/serving/metrics.md explains them in prose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apex.replay.records import LATENCY_SENSITIVE, RequestRecord, RequestSummary
from swiftllm.core.request import ServiceClass

MID_WINDOW = (0.2, 0.8)

Metrics = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Targets:
    """Latency targets that a request must meet to count in goodput."""

    ttft_s: float = 2.0
    """Time to first token, in seconds: NEO reads its load-latency curves on the A10G at it (its section 5.2)."""
    tpot_s: float = 0.2
    """Time per output token, in seconds: five tokens a second, about as fast as people read."""


DEFAULT_TARGETS = Targets()


def makespan_s(records: Sequence[RequestRecord]) -> float | None:
    """Seconds from the first arrival to the last token."""
    done = [record for record in records if record.completed]
    if not done:
        return None
    return max(record.token_times_s[-1] for record in done) - min(record.arrival_s for record in done)


def output_tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens over the makespan, filling and draining included."""
    span = makespan_s(records)
    return sum(record.output_len for record in records if record.completed) / span if span else None


def mid_window_output_tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens per second between 20% and 80% of the makespan, without filling and draining."""
    span = makespan_s(records)
    if not span:
        return None
    done = [record for record in records if record.completed]
    start = min(record.arrival_s for record in done)
    low, high = (start + part * span for part in MID_WINDOW)
    tokens = sum(low <= time < high for record in done for time in record.token_times_s)
    return tokens / (high - low)


def meets_targets(record: RequestRecord, targets: Targets) -> bool:
    """Whether a completed request meets both targets. A single token has no gap, so it meets the second."""
    tpot_s = time_per_output_token_s(record) or 0.0
    return time_to_first_token_s(record) <= targets.ttft_s and tpot_s <= targets.tpot_s


def per_token_latency_s(record: RequestRecord | RequestSummary) -> float:
    """Latency of the whole request, waiting included, over its output tokens (APEX, caption of Fig. 6)."""
    assert record.last_token_s is not None, "a request without a token"
    return (record.last_token_s - record.arrival_s) / record.output_len


def time_to_first_token_s(record: RequestRecord) -> float:
    """From arrival to the first output token (TTFT)."""
    return record.token_times_s[0] - record.arrival_s


def time_per_output_token_s(record: RequestRecord) -> float | None:
    """Mean gap between output tokens (TPOT); None for a single token."""
    if record.output_len < 2:
        return None
    return (record.token_times_s[-1] - record.token_times_s[0]) / (record.output_len - 1)


def distribution_metrics(name: str, values: Sequence[float]) -> Metrics:
    """Mean, p50, p90 and p99 of ``values`` under ``name_mean`` and so on."""
    numbers = (np.mean(values), *np.percentile(values, [50, 90, 99])) if values else (None,) * 4
    parts = zip(("mean", "p50", "p90", "p99"), numbers, strict=True)
    return {f"{name}_{part}": None if number is None else float(number) for part, number in parts}


def class_metrics(records: Sequence[RequestRecord], window_s: float) -> Metrics:
    """Metrics of each class in the first ``window_s`` seconds. Tokens of requests that did not end count too."""
    metrics: Metrics = {}
    for service_class in ServiceClass:
        of_class = [record for record in records if record.service_class == service_class.value]
        values = window_metrics(of_class, window_s)
        metrics |= {f"{service_class.value.replace('-', '_')}_{key}": value for key, value in values.items()}
    return metrics


def window_metrics(records: Sequence[RequestRecord], window_s: float) -> Metrics:
    """What requests got in the first ``window_s`` seconds, whether they ended or not."""
    arrived = [record for record in records if record.arrival_s < window_s]
    ends_s = [record.last_token_s for record in arrived if record.completed]
    times = [[time_s for time_s in record.token_times_s if time_s <= window_s] for record in arrived]
    num_tokens = sum(map(len, times))
    first = [seen[0] - record.arrival_s for record, seen in zip(arrived, times, strict=True) if seen]
    gaps = [(seen[-1] - seen[0]) / (len(seen) - 1) for seen in times if len(seen) > 1]
    return {
        "arrived": len(arrived),
        "completed": sum(end_s is not None and end_s <= window_s for end_s in ends_s),
        "output_tokens": num_tokens,
        "tokens_per_s": num_tokens / window_s if window_s else None,
        **distribution_metrics("ttft_s", first),
        **distribution_metrics("tpot_s", gaps),
    }


def attainment_metrics(records: Sequence[RequestRecord], window_s: float, targets: Targets) -> Metrics:
    """The shares of latency-sensitive requests that meet their targets in the first ``window_s`` seconds.

    ``offered`` are those that arrive early enough to have a first token in time; ``refused`` are those of them that the
    engine did not admit, which miss their targets. A request under way counts with the tokens that it has.
    ``slo_attainment`` is the share of offered requests that meet both targets, ``ttft_attainment`` the first alone;
    the names that end in ``admitted`` are shares of admitted requests.
    """
    offered = [r for r in records if r.service_class == LATENCY_SENSITIVE and r.arrival_s <= window_s - targets.ttft_s]
    num_admitted = len(offered) - sum(record.refused for record in offered)
    both = first = 0
    for record in offered:
        times = [time_s for time_s in record.token_times_s if time_s <= window_s]
        if times and times[0] - record.arrival_s <= targets.ttft_s:
            first += 1
            both += times[-1] - times[0] <= targets.tpot_s * (len(times) - 1)
    return {
        "ttft_slo_s": targets.ttft_s,
        "tpot_slo_s": targets.tpot_s,
        "offered": len(offered),
        "refused": len(offered) - num_admitted,
        "slo_attainment": both / len(offered) if offered else None,
        "slo_attainment_admitted": both / num_admitted if num_admitted else None,
        "ttft_attainment": first / len(offered) if offered else None,
        "ttft_attainment_admitted": first / num_admitted if num_admitted else None,
    }


def busy_fraction(busy_s: float | None, wall_s: float) -> float | None:
    """The fraction of the replay in which a resource was computing."""
    return None if busy_s is None or wall_s <= 0 else busy_s / wall_s


def predicted_over_actual(stats: Mapping[str, float]) -> float | None:
    """Predicted over actual time of the iterations; None for a scheduler that predicts nothing."""
    return stats["predicted_s"] / stats["duration_s"] if stats["predicted_s"] and stats["duration_s"] else None


def compute_metrics(
    records: Sequence[RequestRecord],
    wall_s: float,
    stats: Mapping[str, float] | None = None,
    targets: Targets = DEFAULT_TARGETS,
    window_s: float | None = None,
) -> Metrics:
    """All metrics of one replay of ``wall_s`` seconds.

    Rates are over the makespan. ``goodput_requests_per_s`` counts completed requests that meet both targets.

    ``window_s`` is the duration of a run that is cut after it. Such runs, and those with best-effort requests, also
    have :func:`class_metrics` and :func:`attainment_metrics`.

    ``stats`` are the engine's counters over the replay. ``gpu_batch_busy_s`` is the time the GPU batch computed,
    without waiting for the CPU; ``cpu_busy_s`` is the time the CPU attention worker computed.
    """
    stats, span = stats or {}, makespan_s(records)

    def per_s(count: int) -> float | None:
        return count / span if span else None

    done = [record for record in records if record.completed]
    gaps = [gap for record in done if (gap := time_per_output_token_s(record)) is not None]
    classes = {record.service_class for record in records}
    by_class: Metrics = {}
    if ServiceClass.BEST_EFFORT.value in classes or window_s is not None:
        window = wall_s if window_s is None else window_s
        by_class = class_metrics(records, window) | attainment_metrics(records, window, targets)
        by_class["service_class"] = "both" if len(classes) > 1 else next(iter(classes), None)
    return {
        "output_tokens_per_s": output_tokens_per_s(records),
        "output_tokens_per_s_mid_window": mid_window_output_tokens_per_s(records),
        "requests_per_s": per_s(len(done)),
        "goodput_requests_per_s": per_s(sum(meets_targets(record, targets) for record in done)),
        "ttft_target_s": targets.ttft_s,
        "tpot_target_s": targets.tpot_s,
        **distribution_metrics("per_token_latency_s", [per_token_latency_s(record) for record in done]),
        **distribution_metrics("ttft_s", [time_to_first_token_s(record) for record in done]),
        **distribution_metrics("tpot_s", gaps),
        "completed": len(done),
        "failed": len(records) - len(done),
        "output_tokens": sum(record.output_len for record in done),
        "prompt_tokens": sum(record.prompt_len for record in done),
        "makespan_s": span,
        "wall_s": wall_s,
        "gpu_batch_busy_fraction": busy_fraction(stats.get("gpu_batch_busy_s"), wall_s),
        "cpu_busy_fraction": busy_fraction(stats.get("cpu_busy_s"), wall_s),
        **({} if window_s is None else {"window_s": window_s}),
        **by_class,
    }
