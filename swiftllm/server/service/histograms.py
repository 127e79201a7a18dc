"""What an engine's requests and iterations were like, as histograms."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import msgspec

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput, RequestStatus, ServiceClass
from swiftllm.core.slo import Slo

WAITING = RequestStatus.WAITING.value
LATENCY_SENSITIVE = ServiceClass.LATENCY_SENSITIVE

# Upper bounds of the buckets, equal to vLLM's, so that one dashboard serves both.
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


class Histogram(msgspec.Struct):
    """Counts of observations by bucket; ``bounds`` are the buckets' upper bounds.

    With ``by_class`` there are counts for each service class that has been observed, and always for the default one.
    ``counts`` and ``sums`` are by class.
    """

    name: str
    documentation: str
    bounds: tuple[float, ...]
    by_class: bool = False
    counts: dict[ServiceClass, list[int]] = {}
    sums: dict[ServiceClass, float] = {}

    def __post_init__(self) -> None:
        for service_class in ServiceClass:
            self.counts.setdefault(service_class, [0] * (len(self.bounds) + 1))
            self.sums.setdefault(service_class, 0.0)

    def observe(self, value: float, service_class: ServiceClass = LATENCY_SENSITIVE) -> None:
        self.counts[service_class][bisect_left(self.bounds, value)] += 1
        self.sums[service_class] += value


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to ``largest``."""
    numbers = (step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5))
    return tuple(number for number in numbers if number <= largest)


class EngineHistograms:
    """An observer of a service. ``slo_outcomes`` counts requests by target and outcome."""

    def __init__(self, max_model_len: int, slo: Slo | None) -> None:
        self.lock = threading.Lock()  # the engine's thread writes; others read
        self.slo_outcomes: Counter[tuple[str, str]] = Counter()
        self._slo = slo
        lengths = one_two_five(max_model_len)
        rows = (
            (
                "vllm:request_time_per_output_token_seconds",
                TOKEN_S,
                "Mean gap between tokens of a request that ended.",
            ),
            (
                "vllm:e2e_request_latency_seconds",
                REQUEST_S,
                "From arrival of a request to its end, for any reason.",
            ),
            ("vllm:request_queue_time_seconds", REQUEST_S, "From a request's arrival to its first KV blocks."),
            ("vllm:request_prefill_time_seconds", REQUEST_S, "From a request's first KV blocks to its first token."),
            ("vllm:request_decode_time_seconds", REQUEST_S, "From a request's first token to its last."),
            ("vllm:request_inference_time_seconds", REQUEST_S, "From a request's first KV blocks to its last token."),
            ("vllm:request_num_preemptions", PREEMPTIONS, "Preemptions of each request that ended."),
            ("vllm:request_params_max_tokens", lengths, "The parameter max_tokens of requests that ended."),
            ("vllm:request_prompt_tokens", lengths, "Prompt tokens of requests that ended."),
            ("vllm:request_generation_tokens", lengths, "Output tokens of requests that ended."),
            ("vllm:iteration_tokens_total", ITERATION_TOKENS, "Tokens prefilled and sampled in an iteration."),
            ("apex:iteration_over_predicted", RATIOS, "Measured time of an iteration divided by its predicted time."),
        )
        self.all = [Histogram(name, documentation, bounds) for name, bounds, documentation in rows]
        self._named = {histogram.name.partition(":")[2]: histogram for histogram in self.all}

    def _observe(self, name: str, value: float) -> None:
        self._named[name].observe(value)

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """Record an iteration."""
        predicted_s = plan.predicted.get("iteration_s", 0.0)
        num_tokens = len(result.tokens) + sum(item.num_tokens for item in plan.prefills)
        with self.lock:
            if num_tokens:
                self._observe("iteration_tokens_total", num_tokens)
            if predicted_s > 0.0:
                self._observe("iteration_over_predicted", result.duration_s / predicted_s)

    def on_finish(self, request: Request, reason: str) -> None:
        """Record a request that has ended, for any ``reason``."""
        times_s = request.token_times_s
        with self.lock:
            self._observe("request_prompt_tokens", request.prompt_len)
            self._observe("request_generation_tokens", request.output_len)
            self._observe("request_params_max_tokens", request.sampling.max_tokens)
            self._observe("request_num_preemptions", request.num_preemptions)
            # A stop string or an error of the service ends a request before the engine does.
            end_s = request.finish_s if request.finish_s is not None else times_s[-1] if times_s else None
            if end_s is not None:
                self._observe("e2e_request_latency_seconds", end_s - request.arrival_s)
            if admissions_s := [time_s for time_s, tier in request.tier_history if tier != WAITING]:
                self._observe("request_queue_time_seconds", admissions_s[0] - request.arrival_s)
                if times_s:
                    self._observe("request_prefill_time_seconds", times_s[0] - admissions_s[0])
                    self._observe("request_decode_time_seconds", times_s[-1] - times_s[0])
                    self._observe("request_inference_time_seconds", times_s[-1] - admissions_s[0])
            if len(times_s) > 1:
                mean_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
                self._observe("request_time_per_output_token_seconds", mean_s)
            if self._slo is None or request.service_class is not LATENCY_SENSITIVE:
                return
            if reason == "slo_unattainable":
                self.slo_outcomes["ttft", "refused"] += 1
            for target, is_met in self._slo.met_by(request).items():
                self.slo_outcomes[target, "met" if is_met else "missed"] += 1
