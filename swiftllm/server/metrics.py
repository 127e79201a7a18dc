"""`/metrics` for Prometheus: vLLM's names where the meaning is the same, `apex:` names for the rest.

Times to tokens are measured here, as clients see them. All else is the engine's report, asked for at each scrape.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from swiftllm.server.engine_status import LATENCY_SENSITIVE, TOKEN_S, Histogram

if TYPE_CHECKING:
    from swiftllm.server.client import EngineClient
    from swiftllm.server.engine_status import Counts, Snapshot
    from swiftllm.server.messages import Report, TokenStream

# -- Prometheus --------------------------------------------------------------------------------------------------------

# vLLM counts an abort as a success too; failures have their own counter.
NOT_ADMITTED = ("queue_full", "slo_unattainable")  # codes of requests refused for the load, not for what they are
# Labels, and what they show of the engine's description.
CACHE_CONFIG = {"block_size": "block_size", "num_gpu_blocks": "num_gpu_blocks", "num_cpu_blocks": "num_cpu_blocks",
                "cache_dtype": "dtype", "cpu_cache_dtype": "cpu_kv_dtype"}  # fmt: skip
FINISHED_WELL = ("stop", "length", "abort")

# Upper bounds of the buckets, equal to vLLM's.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
CHOICES = (1, 2, 5, 10, 20)

Values = Mapping[tuple[str, ...], float]  # a value for each set of labels
Series = tuple[str, str, float | tuple[tuple[str, ...], Values]]  # name, description, value; or names of labels, values


def family_of(histogram: Histogram, labels: Mapping[str, str]) -> HistogramMetricFamily:
    """A histogram as the library writes it."""
    names = [*labels, "service_class"] if histogram.by_class else list(labels)
    family = HistogramMetricFamily(histogram.name, histogram.documentation, labels=names)
    bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
    for service_class, counts in histogram.counts.items():
        if service_class is LATENCY_SENSITIVE or any(counts):
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            values = [*labels.values(), service_class.value][: len(names)]
            family.add_metric(values, buckets, histogram.sums[service_class])
    return family


class Metrics:
    """Observes an engine's client and answers `/metrics`. All series have the label ``model_name``.

    Each instance has its own registry, so several servers may run in one process.
    """

    def __init__(self, service: EngineClient, model_name: str) -> None:
        self._service = service
        self._labels = {"model_name": model_name}
        self._refused: Counter[int] = Counter()
        self._not_admitted: Counter[str] = Counter(dict.fromkeys(NOT_ADMITTED, 0))
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_S, True
        )
        self._between_tokens = Histogram(
            "vllm:inter_token_latency_seconds", "From tokens of a request to its next ones.", TOKEN_S, True
        )
        self._choices = Histogram("vllm:request_params_n", "The parameter n of HTTP requests answered.", CHOICES)
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._answer, methods=["GET"], include_in_schema=False)
        service.observers.append(self.on_arrival)

    def count_refusal(self, status_code: int, code: str | None = None) -> None:
        """Count a request that was answered with an error status, and the error's code."""
        self._refused[status_code] += 1
        if code in NOT_ADMITTED:
            self._not_admitted[code] += 1

    def count_choices(self, n: int) -> None:
        """Count an HTTP request that asked for ``n`` outputs of each prompt."""
        self._choices.observe(n)

    def on_arrival(self, streams: Iterable[TokenStream], now_s: float) -> None:
        """Record new tokens, as clients see them."""
        first, between = self._first_token.observe, self._between_tokens.observe
        for stream in streams:
            (first if stream.is_new else between)(now_s - stream.new_s, stream.service_class)
            stream.new_s, stream.is_new = now_s, False

    async def _answer(self) -> Response:
        families = self.families(await self._service.report())
        text = await asyncio.to_thread(self._text, families)  # a scrape has a thousand lines
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _text(self, families: Sequence[Metric]) -> bytes:
        return generate_latest(SimpleNamespace(collect=lambda: families)) + generate_latest(self._process)

    def families(self, report: Report) -> list[Metric]:
        """All series, with those of the engine as it reports them."""
        refused = {(str(status),): count for status, count in sorted(self._refused.items())}
        outcomes = {(target, outcome): count for target, outcome, count in report.slo_outcomes}
        histograms = [self._first_token, self._between_tokens, self._choices, *report.histograms]
        families: list[Metric] = [family_of(histogram, self._labels) for histogram in histograms]
        now = report.snapshot
        counted = counters(now, refused, outcomes, dict(self._not_admitted))
        gauged = gauges(now, self._service.ready.description)
        for kind, rows in ((GaugeMetricFamily, gauged), (CounterMetricFamily, counted)):
            for name, documentation, values in rows:
                names, by_label = values if isinstance(values, tuple) else ((), {(): values})
                family = kind(name, documentation, labels=[*self._labels, *names])
                for of_labels, value in by_label.items():
                    family.add_metric([*self._labels.values(), *of_labels], float(value))
                families.append(family)
        return families


def by_label(name: str, values: Mapping[str, float]) -> tuple[tuple[str], Values]:
    """Values by one label."""
    return (name,), {(label,): value for label, value in values.items()}


def counts_by_class(now: Snapshot) -> Mapping[str, Counts]:
    """Requests and tokens of each class; before the first best-effort request all are latency-sensitive."""
    return now.classes or {LATENCY_SENSITIVE.value: now}


def gauges(now: Snapshot, description: Mapping[str, Any]) -> list[Series]:
    cache = tuple(str(description.get(name)) for name in CACHE_CONFIG.values())
    by_class = counts_by_class(now).items()
    return [
        ("vllm:num_requests_running", "Requests that hold KV blocks, in either tier.",
         now.running_gpu + now.running_cpu),
        ("vllm:num_requests_waiting", "Requests that hold no KV blocks yet, or were preempted.", now.waiting),
        ("vllm:num_requests_waiting_by_reason",
         "Those that wait for KV blocks or a seat, and those deferred while a failed step is examined.",
         by_label("reason", {"capacity": now.waiting - now.held, "deferred": now.held})),
        ("vllm:kv_cache_usage_perc", "Share of the GPU tier's KV blocks in use, 0 to 1.",
         now.gpu_blocks_used / max(1, now.gpu_blocks_total)),
        ("vllm:cache_config_info", "Always 1; the labels tell of the KV cache.", (tuple(CACHE_CONFIG), {cache: 1})),
        ("apex:num_requests_running", "Requests by the tier their KV cache is in.",
         (("tier", "service_class"), {
             (tier, name): getattr(counts, f"running_{tier}") for tier in ("gpu", "cpu") for name, counts in by_class
         })),
        ("apex:num_requests_waiting", "Requests that hold no KV blocks yet, or were preempted, by class.",
         by_label("service_class", {name: counts.waiting for name, counts in by_class})),
        ("apex:kv_blocks_used", "KV blocks in use.",
         by_label("tier", {"gpu": now.gpu_blocks_used, "cpu": now.cpu_blocks_used})),
        ("apex:kv_blocks", "KV blocks in total.",
         by_label("tier", {"gpu": now.gpu_blocks_total, "cpu": now.cpu_blocks_total})),
        ("apex:kv_blocks_cached", "KV blocks in use by none, with prefixes that later requests may find.",
         by_label("tier", {"gpu": now.gpu_blocks_cached, "cpu": now.cpu_blocks_cached})),
        ("apex:states_cached", "States of linear attention, in host memory, with which prefixes are found.",
         now.states_cached),
        ("apex:prediction_factor", "Recent measured over profiled time of operations; it multiplies predictions.",
         by_label("operation", now.prediction_factors)),
        ("apex:attention_hosts_connected", "Other hosts whose part of the CPU tier is in use.", now.hosts_connected),
        ("apex:healthy", "1 while requests are accepted and served, else 0.", now.health.status == "ok"),
        ("apex:uptime_seconds", "Since the service was started.", now.uptime_s),
    ]  # fmt: skip


def counters(now: Snapshot, refused: Values, slo_outcomes: Values, not_admitted: Mapping[str, int]) -> list[Series]:
    """The counters; Prometheus appends `_total` to their names."""
    well = {reason: now.finished.get(reason, 0) for reason in FINISHED_WELL}
    failed = {reason: count for reason, count in now.finished.items() if reason not in FINISHED_WELL}
    tokens = {name: counts.output_tokens for name, counts in counts_by_class(now).items()}
    return [
        ("vllm:prompt_tokens", "Prompt tokens computed; recomputed ones count again.", now.prompt_tokens),
        ("vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", now.prefix_queries),
        ("vllm:prefix_cache_hits", "Those of them that were found there, by the tier where they lay.",
         by_label("tier", {tier: now.prefix_hits.get(tier, 0) for tier in ("gpu", "cpu")})),
        ("vllm:generation_tokens", "Tokens sampled.", by_label("service_class", tokens)),
        ("vllm:num_preemptions", "Preemptions: requests that had to release all their KV blocks.", now.preemptions),
        ("vllm:request_success", "Requests that ended, by reason.", by_label("finished_reason", well)),
        ("vllm:admission_rejections", "Requests refused for the load.", by_label("reason", not_admitted)),
        ("apex:request_failures", "Requests that the engine failed, by reason.", by_label("reason", failed)),
        ("apex:requests_refused", "Requests answered with an error, by HTTP status code.", (("status",), refused)),
        ("apex:iterations", "Iterations by strategy.", by_label("strategy", now.strategy_iterations)),
        ("apex:iteration_seconds", "Time of all iterations.", now.duration_s),
        ("apex:predicted_iteration_seconds", "Time predicted for them, by schedulers that predict.", now.predicted_s),
        ("apex:gpu_batch_busy_seconds", "Time the GPU batch computed; the rest of an iteration it waited for the CPU.",
         now.gpu_batch_busy_s),
        ("apex:cpu_worker_busy_seconds", "Time the CPU worker computed attention.", now.cpu_busy_s),
        ("apex:swapped_blocks", "KV blocks moved from one tier to the other.", now.swapped_blocks),
        ("apex:step_failures", "Iterations that raised an error.", now.step_failures),
        ("apex:worker_restarts", "CPU workers that died and were restarted.", now.worker_restarts),
        ("apex:host_deaths", "Other hosts of the CPU tier that were lost.", now.host_deaths),
        ("apex:recomputed_after_host_deaths", "Requests computed again for the loss of such a host.",
         now.recomputed_after_host_deaths),
        ("apex:slo_requests", "Latency-sensitive requests that ended, by target and outcome.",
         (("slo", "outcome"), slo_outcomes)),
    ]  # fmt: skip


# -- the log -----------------------------------------------------------------------------------------------------------
# A log line every ten seconds in which the engine has worked.

INTERVAL_S = 10.0

logger = logging.getLogger("uvicorn.error")  # uvicorn's logger for all but access lines


async def log_activity(service: EngineClient) -> None:
    """Log lines until it is cancelled: each compares a snapshot with the one before."""
    before = await service.snapshot()
    while True:
        await asyncio.sleep(INTERVAL_S)
        after = await service.snapshot()
        if after.iterations > before.iterations or after.waiting:
            logger.info(activity_line(before, after))
        before = after


def activity_line(before: Snapshot, after: Snapshot) -> str:
    """What the engine did between two snapshots, and its requests and KV cache at the second."""
    seconds = after.uptime_s - before.uptime_s
    iterations = after.iterations - before.iterations
    parts = [
        f"prompts {(after.prompt_tokens - before.prompt_tokens) / seconds:.0f} tokens/s, "
        f"outputs {(after.output_tokens - before.output_tokens) / seconds:.0f} tokens/s",
        f"requests: {after.running_gpu} in the GPU tier, {after.running_cpu} in the CPU tier, {after.waiting} waiting",
        f"KV cache: GPU {share(after.gpu_blocks_used, after.gpu_blocks_total)}, "
        f"CPU {share(after.cpu_blocks_used, after.cpu_blocks_total)}",
    ]
    done = {name: n - before.strategy_iterations.get(name, 0) for name, n in after.strategy_iterations.items()}
    if iterations and any(n for name, n in done.items() if name != "gpu-only"):
        parts.append(", ".join(f"{name} {share(n, iterations)}" for name, n in done.items() if n))
    return "; ".join(parts)


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
