"""`/metrics` for Prometheus: vLLM's names where the meaning is the same, `apex:` names for the rest.

Gauges and counters are read from the service's snapshot at a scrape. Only the histograms are updated on the engine's
thread, once for each token and each request that ends.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import FinishReason, Request, RequestOutput, RequestStatus, ServiceClass

if TYPE_CHECKING:
    from swiftllm.server.service.service import EngineService
    from swiftllm.server.service.snapshot import Counts, Snapshot

WAITING = RequestStatus.WAITING.value
# vLLM counts an abort as a success too; failures have their own counter.
NOT_ADMITTED = ("queue_full", "slo_unattainable")  # codes of requests refused for the load, not for what they are
# Labels, and what they show of the engine's description.
CACHE_CONFIG = {"block_size": "block_size", "num_gpu_blocks": "num_gpu_blocks", "num_cpu_blocks": "num_cpu_blocks",
                "cache_dtype": "dtype", "cpu_cache_dtype": "cpu_kv_dtype"}  # fmt: skip
FINISHED_WELL = ("stop", "length", "abort")

# Upper bounds of the buckets, equal to vLLM's, so that one dashboard serves both.
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
CHOICES = (1, 2, 5, 10, 20)
OVER_PREDICTION = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)

LATENCY_SENSITIVE = ServiceClass.LATENCY_SENSITIVE

Values = Mapping[tuple[str, ...], float]  # a value for each set of labels
Series = tuple[str, str, float | tuple[tuple[str, ...], Values]]  # name, description, value; or names of labels, values


class Histogram:
    """Counts of observations by bucket; ``bounds`` are the buckets' upper bounds.

    It costs a fifth of the library's own, which takes a lock for each number. Here the caller holds one for many.
    With ``by_class`` there are counts for each service class that has been observed, and always for the default one.
    """

    def __init__(self, name: str, documentation: str, bounds: Sequence[float], by_class: bool = False) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._by_class = by_class
        self._counts = {service_class: [0] * (len(bounds) + 1) for service_class in ServiceClass}
        self._sums = dict.fromkeys(ServiceClass, 0.0)

    def observe(self, value: float, service_class: ServiceClass = LATENCY_SENSITIVE) -> None:
        self._counts[service_class][bisect_left(self._bounds, value)] += 1
        self._sums[service_class] += value

    def family(self, labels: Mapping[str, str]) -> HistogramMetricFamily:
        names = [*labels, "service_class"] if self._by_class else list(labels)
        family = HistogramMetricFamily(self._name, self._documentation, labels=names)
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        for service_class, counts in self._counts.items():
            if service_class is LATENCY_SENSITIVE or any(counts):
                buckets = list(zip(bounds, accumulate(counts), strict=True))
                values = [*labels.values(), service_class.value][: len(names)]
                family.add_metric(values, buckets, self._sums[service_class])
        return family


def one_two_five(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``largest``."""
    numbers = (step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5))
    return [number for number in numbers if number <= largest]


class Metrics(Collector):
    """Observes a service and answers `/metrics`. All series have the label ``model_name``.

    Each instance has its own registry, so several servers may run in one process.
    """

    def __init__(self, service: EngineService, model_name: str) -> None:
        self._service = service
        self._labels = {"model_name": model_name}
        self._refused: Counter[int] = Counter()
        self._not_admitted: Counter[str] = Counter(dict.fromkeys(NOT_ADMITTED, 0))
        self._slo_outcomes: Counter[tuple[str, str]] = Counter()  # by target and outcome
        self._lock = threading.Lock()  # the engine's thread writes, the server's reads
        lengths = one_two_five(service.engine.residents.limits.max_model_len)
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_S, True
        )
        self._between_tokens = Histogram(
            "vllm:inter_token_latency_seconds", "From a token of a request to its next.", TOKEN_S, True
        )
        self._per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a request that ended.", TOKEN_S
        )
        self._latency = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its end, whatever the reason.", REQUEST_S
        )
        self._queued = Histogram(
            "vllm:request_queue_time_seconds", "From a request's arrival to its first KV blocks.", REQUEST_S
        )
        self._prefill = Histogram(
            "vllm:request_prefill_time_seconds", "From a request's first KV blocks to its first token.", REQUEST_S
        )
        self._decode = Histogram(
            "vllm:request_decode_time_seconds", "From a request's first token to its last.", REQUEST_S
        )
        self._inference = Histogram(
            "vllm:request_inference_time_seconds", "From a request's first KV blocks to its last token.", REQUEST_S
        )
        self._preempted = Histogram(
            "vllm:request_num_preemptions", "Preemptions of each request that ended.", PREEMPTIONS
        )
        self._choices = Histogram("vllm:request_params_n", "The parameter n of HTTP requests answered.", CHOICES)
        self._most_tokens = Histogram(
            "vllm:request_params_max_tokens", "The parameter max_tokens of requests that ended.", lengths
        )
        self._prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of requests that ended.", lengths)
        self._output = Histogram("vllm:request_generation_tokens", "Output tokens of requests that ended.", lengths)
        self._iteration = Histogram(
            "vllm:iteration_tokens_total", "Tokens prefilled and sampled in an iteration.", ITERATION_TOKENS
        )
        about = "Measured time of an iteration divided by its predicted time."
        self._over_prediction = Histogram("apex:iteration_over_predicted", about, OVER_PREDICTION)
        self._histograms = [histogram for histogram in vars(self).values() if isinstance(histogram, Histogram)]
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self.router = APIRouter()
        self.router.add_api_route("/metrics", self._answer, methods=["GET"], include_in_schema=False)
        service.add_observer(self)

    def count_refusal(self, status_code: int, code: str | None = None) -> None:
        """Count a request that was answered with an error status, and the error's code. Any thread."""
        with self._lock:
            self._refused[status_code] += 1
            if code in NOT_ADMITTED:
                self._not_admitted[code] += 1

    def count_choices(self, n: int) -> None:
        """Count an HTTP request that asked for ``n`` outputs of each prompt. Any thread."""
        with self._lock:
            self._choices.observe(n)

    def _answer(self) -> Response:  # not async: FastAPI runs it in a thread, as a scrape has a thousand lines
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    # -- on the engine's thread ------------------------------------------------------------------------------------

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """Record an iteration, and the tokens it sampled, in the histograms."""
        predicted_s = plan.predicted.get("iteration_s", 0.0)
        num_tokens = len(result.tokens) + sum(item.num_tokens for item in plan.prefills)
        with self._lock:
            if num_tokens:
                self._iteration.observe(num_tokens)
            if predicted_s > 0.0:
                self._over_prediction.observe(result.duration_s / predicted_s)
            for request in requests_with_new_tokens(plan, result):
                times_s = request.token_times_s
                if len(times_s) > 1:
                    self._between_tokens.observe(times_s[-1] - times_s[-2], request.service_class)
                elif times_s:
                    self._first_token.observe(times_s[0] - request.arrival_s, request.service_class)

    def on_finish(self, request: Request, reason: str) -> None:
        """Record a request that has ended, for any ``reason``, in the histograms."""
        times_s = request.token_times_s
        with self._lock:
            self._prompt.observe(request.prompt_len)
            self._output.observe(request.output_len)
            self._most_tokens.observe(request.sampling.max_tokens)
            self._preempted.observe(request.num_preemptions)
            # A stop string or an error of the service ends a request before the engine does.
            end_s = request.finish_s if request.finish_s is not None else times_s[-1] if times_s else None
            if end_s is not None:
                self._latency.observe(end_s - request.arrival_s)
            if admissions_s := [time_s for time_s, tier in request.tier_history if tier != WAITING]:
                self._queued.observe(admissions_s[0] - request.arrival_s)
                if times_s:
                    self._prefill.observe(times_s[0] - admissions_s[0])
                    self._decode.observe(times_s[-1] - times_s[0])
                    self._inference.observe(times_s[-1] - admissions_s[0])
            if len(times_s) > 1:
                self._per_token.observe((times_s[-1] - times_s[0]) / (len(times_s) - 1))
            slo = self._service.engine.policy.slo
            if slo is None or request.service_class is not LATENCY_SENSITIVE:
                return
            if reason == "slo_unattainable":
                self._slo_outcomes["ttft", "refused"] += 1
            for target, is_met in slo.met_by(request).items():
                self._slo_outcomes[target, "met" if is_met else "missed"] += 1

    # -- on a scrape -----------------------------------------------------------------------------------------------

    def describe(self) -> list[Metric]:
        """Nothing, so that the library does not collect once at registration to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            refused = {(str(status),): count for status, count in sorted(self._refused.items())}
            families = [histogram.family(self._labels) for histogram in self._histograms]
            outcomes, not_admitted = dict(self._slo_outcomes), dict(self._not_admitted)
        yield from families
        now, description = self._service.snapshot(), self._service.engine.describe()
        counted, gauged = counters(now, refused, outcomes, not_admitted), gauges(now, description)
        for kind, rows in ((GaugeMetricFamily, gauged), (CounterMetricFamily, counted)):
            for name, documentation, values in rows:
                names, by_label = values if isinstance(values, tuple) else ((), {(): values})
                family = kind(name, documentation, labels=[*self._labels, *names])
                for of_labels, value in by_label.items():
                    family.add_metric([*self._labels.values(), *of_labels], float(value))
                yield family


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
        ("apex:lane_busy_seconds", "Time the lane computed; the rest of an iteration it waited for the CPU.",
         now.lane_busy_s),
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


def requests_with_new_tokens(plan: IterationPlan, result: StepResult) -> Iterator[Request]:
    """Requests for which the iteration sampled a token; a cohort's get theirs when it has crossed all layers."""
    finished = (cohort.requests for cohort in plan.cohorts if cohort.cohort_id not in result.boundaries)
    for request in chain(plan.decodes, (item.request for item in plan.prefills), *finished):
        # A request aborted during the iteration does not get its token.
        if request.request_id in result.tokens and request.finish_reason is not FinishReason.ABORT:
            yield request
