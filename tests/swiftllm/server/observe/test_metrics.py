"""What a scrape says: vLLM's names, the engine's own numbers, and every token and request counted once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from apex.simulator.build import build_simulated
from apex.simulator.hardware_files import load_gpu, load_host, load_model_config
from apex.simulator.predicted_profile import hardware_profile
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import FinishReason, Request, SamplingParams, ServiceClass, Slo
from swiftllm.engine.engine import Engine
from swiftllm.server.engine_status import Counts, EngineHistograms, Health, Histogram, one_two_five
from swiftllm.server.messages import NewRequest, TokenStream
from swiftllm.server.metrics import Metrics, family_of
from tests.swiftllm.server.fake_service import FakeService

REPO = Path(__file__).resolve().parents[4]

# As vLLM's V1 engine calls them; dashboards made for it read these.
VLLM_NAMES = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prompt_tokens",
    "vllm:generation_tokens", "vllm:request_success", "vllm:num_preemptions", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:iteration_tokens_total", "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits", "vllm:cache_config_info",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds",
    "vllm:request_params_n", "vllm:request_params_max_tokens", "vllm:request_num_preemptions",
    "vllm:num_requests_waiting_by_reason", "vllm:admission_rejections",
}  # fmt: skip

Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(metrics: Metrics) -> Series:
    """Values by name and labels, the model's name left out."""
    app = FastAPI()
    app.include_router(metrics.router)
    answer = TestClient(app).get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    series = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name.startswith(("vllm:", "apex:")):
                assert labels.pop("model_name") == MODEL
            series[sample.name, frozenset(labels.items())] = sample.value
    return series


LS, BE = (service_class.value for service_class in ServiceClass)
MODEL = 'a "model"\nwith \\ everything'


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


def test_gauges_and_counters_are_those_of_the_snapshot() -> None:
    service = FakeService()
    metrics = Metrics(service, MODEL)
    service.change(
        running_gpu=3, running_cpu=4, waiting=5, held=2, gpu_blocks_used=6, cpu_blocks_used=7, prompt_tokens=11,
        output_tokens=12, preemptions=13, swapped_blocks=14, worker_restarts=15, step_failures=16, duration_s=1.5,
        predicted_s=1.25, gpu_batch_busy_s=0.75, cpu_busy_s=0.5, finished={"stop": 1, "abort": 2, "deadline": 3},
        strategy_iterations={"gpu-only": 8, "asynchronous-overlap": 9},
        prediction_factors={"gpu_batch": 1.0, "cpu_attention": 1.75}, prefix_queries=100, prefix_hits={"cpu": 48},
        gpu_blocks_cached=2,
        states_cached=5,
    )  # fmt: skip
    series = scrape(metrics)
    assert value(series, "vllm:num_requests_running") == 7 and value(series, "vllm:num_requests_waiting") == 5
    assert value(series, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(series, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    cache = {"block_size": "16", "num_gpu_blocks": "8", "num_cpu_blocks": "64", "cache_dtype": "float32"}
    cache["cpu_cache_dtype"] = "int8"
    assert value(series, "vllm:cache_config_info", **cache) == 1
    assert value(series, "vllm:kv_cache_usage_perc") == 6 / 8
    assert value(series, "apex:num_requests_running", tier="cpu", service_class=LS) == 4
    assert value(series, "apex:num_requests_waiting", service_class=LS) == 5
    assert value(series, "apex:kv_blocks_used", tier="gpu") == 6 and value(series, "apex:kv_blocks", tier="cpu") == 64
    assert (
        value(series, "vllm:prompt_tokens_total") == 11
        and value(series, "vllm:generation_tokens_total", service_class=LS) == 12
    )
    assert value(series, "vllm:prefix_cache_queries_total") == 100
    assert [value(series, "vllm:prefix_cache_hits_total", tier=tier) for tier in ("gpu", "cpu")] == [0, 48]
    assert [value(series, "apex:kv_blocks_cached", tier=tier) for tier in ("gpu", "cpu")] == [2, 0]
    assert value(series, "apex:states_cached") == 5
    assert value(series, "vllm:num_preemptions_total") == 13 and value(series, "apex:swapped_blocks_total") == 14
    assert value(series, "apex:worker_restarts_total") == 15 and value(series, "apex:step_failures_total") == 16
    assert value(series, "vllm:request_success_total", finished_reason="abort") == 2
    assert value(series, "vllm:request_success_total", finished_reason="length") == 0
    assert value(series, "apex:request_failures_total", reason="deadline") == 3
    assert value(series, "apex:iterations_total", strategy="asynchronous-overlap") == 9
    assert value(series, "apex:iteration_seconds_total") == 1.5
    assert value(series, "apex:predicted_iteration_seconds_total") == 1.25
    assert value(series, "apex:gpu_batch_busy_seconds_total") == 0.75
    assert value(series, "apex:cpu_worker_busy_seconds_total") == 0.5
    assert value(series, "apex:prediction_factor", operation="gpu_batch") == 1
    assert value(series, "apex:prediction_factor", operation="cpu_attention") == 1.75
    assert value(series, "apex:healthy") == 1
    service.change(health=Health("stalled", "nothing moves"))
    assert value(scrape(metrics), "apex:healthy") == 0


def test_the_names_are_vllms_and_a_registry_of_its_own() -> None:
    service = FakeService()
    first, second = Metrics(service, MODEL), Metrics(FakeService(), MODEL)
    names = {family.name for family in first.families(service.report_now())}
    assert names >= VLLM_NAMES and {name for name in names if name.startswith("vllm:")} == VLLM_NAMES
    first.count_refusal(429)
    first.count_refusal(429)
    first.count_refusal(400)
    assert value(scrape(first), "apex:requests_refused_total", status="429") == 2
    assert value(scrape(first), "apex:requests_refused_total", status="400") == 1
    assert not [name for name, _ in scrape(second) if name == "apex:requests_refused_total"]


def test_what_is_refused_for_the_load_is_counted_by_reason() -> None:
    metrics = Metrics(FakeService(), MODEL)
    for status, code in ((429, "queue_full"), (429, "slo_unattainable"), (429, "queue_full"), (400, "invalid_value")):
        metrics.count_refusal(status, code)
    series = scrape(metrics)
    assert value(series, "vllm:admission_rejections_total", reason="queue_full") == 2
    assert value(series, "vllm:admission_rejections_total", reason="slo_unattainable") == 1
    assert len([name for name, _ in series if name == "vllm:admission_rejections_total"]) == 2


def test_what_requests_ask_for_is_observed() -> None:
    metrics = Metrics(FakeService(), MODEL)
    for n in (1, 4):
        metrics.count_choices(n)
    series = scrape(metrics)
    assert value(series, "vllm:request_params_n_sum") == 5 and value(series, "vllm:request_params_n_count") == 2


def simulated_engine() -> Engine:
    table = hardware_profile(load_gpu("a10"), load_host("g5-4xlarge"), load_model_config("llama-3.1-8b"))
    strategy = StrategyConfig(strategy="asynchronous-overlap")
    return build_simulated("apex", table, 32, num_gpu_blocks=30, num_cpu_blocks=500, strategy=strategy)


def test_the_documentation_names_every_metric() -> None:
    documented = set(re.findall(r"`((?:vllm|apex):\w+)`", (REPO / "docs/serving/metrics.md").read_text()))
    service = FakeService()
    families = Metrics(service, MODEL).families(service.report_now())
    assert documented == {family.name for family in families if ":" in family.name}


def admitted_s(request: Request) -> float:
    return next(time_s for time_s, tier in request.tier_history if tier != "waiting")


def test_every_iteration_and_request_is_observed_once() -> None:
    """A run with CPU batches, prompts in chunks and an abort: the histograms hold what the requests themselves tell."""
    engine, service = simulated_engine(), FakeService()
    metrics = Metrics(service, MODEL)
    requests = [
        engine.add(engine.make_request(str(i), (1,) * (40 + 97 * i), SamplingParams(max_tokens=5 + i)))
        for i in range(8)
    ]
    run, steps = engine.executor.run, []
    engine.executor.run = lambda plan: steps.append((plan, run(plan))) or steps[-1][1]
    while engine.has_unfinished():
        before = len(steps)
        if before == 20:
            engine.abort("7")
        outputs = engine.step()
        if len(steps) > before:
            service.histograms.on_step(*steps[-1], outputs)
        for output in outputs:
            if output.finished:
                service.histograms.on_finish(requests[int(output.request_id)], output.finish_reason)
    assert any(plan.cpu_batches for plan, _ in steps) and requests[7].finish_reason is FinishReason.ABORT
    series = scrape(metrics)
    with_tokens = [request for request in requests if request.token_times_s]
    for name, values in (
        ("vllm:e2e_request_latency_seconds", [r.finish_s - r.arrival_s for r in requests]),
        ("vllm:request_prefill_time_seconds", [r.token_times_s[0] - admitted_s(r) for r in with_tokens]),
        ("vllm:request_decode_time_seconds", [r.token_times_s[-1] - r.token_times_s[0] for r in with_tokens]),
        ("vllm:request_inference_time_seconds", [r.token_times_s[-1] - admitted_s(r) for r in with_tokens]),
        ("vllm:request_num_preemptions", [r.num_preemptions for r in requests]),
        ("vllm:request_params_max_tokens", [r.sampling.max_tokens for r in requests]),
        ("vllm:request_queue_time_seconds", [admitted_s(r) - r.arrival_s for r in requests]),
        ("vllm:request_prompt_tokens", [r.prompt_len for r in requests]),
        ("vllm:request_generation_tokens", [r.output_len for r in requests]),
        ("apex:iteration_over_predicted", [s.duration_s / p.predicted["iteration_s"] for p, s in steps if p.predicted]),
    ):
        assert value(series, f"{name}_count") == len(values), name
        assert value(series, f"{name}_sum") == pytest.approx(sum(values)), name
    tokens = sum(request.output_len for request in requests)
    prefilled = sum(item.num_tokens for plan, _ in steps for item in plan.prefills)
    assert value(series, "vllm:iteration_tokens_total_sum") == tokens + prefilled


def test_a_request_that_never_ran_has_no_times() -> None:
    service = FakeService()
    metrics = Metrics(service, MODEL)
    request = Request("0", (1, 2, 3), SamplingParams())
    service.histograms.on_finish(request, "shutdown")
    service.histograms.on_step(IterationPlan(), StepResult({}, {}, frozenset(), 0.0, 0.0, 0.0), [])
    series = scrape(metrics)
    assert value(series, "vllm:request_prompt_tokens_sum") == 3
    for name in ("vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds", "vllm:iteration_tokens_total"):
        assert value(series, f"{name}_count") == 0


def test_buckets_are_cumulative_and_closed_above() -> None:
    histogram = Histogram("name", "documentation", (1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.5, 9.0):
        histogram.observe(number)
    samples = family_of(histogram, {}).samples
    assert [sample.value for sample in samples if sample.name == "name_bucket"] == [2, 3, 5]
    assert one_two_five(300) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_each_class_has_its_own_series_once_it_has_been_seen() -> None:
    service = FakeService()
    metrics = Metrics(service, MODEL)
    assert not [name for name, labels in scrape(metrics) if ("service_class", BE) in labels]
    service.change(waiting=3, classes={LS: Counts(1, 2, 3, 4), BE: Counts(2, 6, 7, 8)})
    for service_class, first_s in zip(ServiceClass, (1.0, 3.0), strict=True):
        new = NewRequest("0", (1, 2), SamplingParams(), service_class=service_class)
        stream = TokenStream(new, 0, now_s=10.0)
        for now_s in (10.0 + first_s, 12.0 + first_s):
            metrics.on_arrival([stream], now_s)
    series = scrape(metrics)
    assert value(series, "vllm:time_to_first_token_seconds_sum", service_class=LS) == 1.0
    assert value(series, "vllm:time_to_first_token_seconds_sum", service_class=BE) == 3.0
    assert value(series, "vllm:inter_token_latency_seconds_sum", service_class=BE) == 2.0
    assert value(series, "vllm:generation_tokens_total", service_class=BE) == 8
    assert value(series, "apex:num_requests_waiting", service_class=BE) == 2
    assert value(series, "apex:num_requests_running", tier="cpu", service_class=BE) == 7
    assert value(series, "vllm:num_requests_waiting") == 3


def test_targets_are_those_of_latency_sensitive_requests() -> None:
    """A best-effort request has none, whatever its times; one that was refused misses nothing else."""
    histograms = EngineHistograms(2048, Slo(ttft_s=1.0, tpot_s=0.1, margin=0.0))

    def finish(service_class: ServiceClass, *times_s: float, reason: str = "stop") -> dict[tuple[str, str], int]:
        request = Request("0", (1, 2), SamplingParams(), service_class=service_class, arrival_s=10.0)
        request.token_times_s[:] = times_s
        before = histograms.slo_outcomes.copy()
        histograms.on_finish(request, reason)
        return dict(histograms.slo_outcomes - before)

    for times_s in ((10.5, 10.55), (12.0, 13.0)):
        assert finish(ServiceClass.BEST_EFFORT, *times_s) == {}
    assert finish(ServiceClass.BEST_EFFORT, reason="slo_unattainable") == {}
    urgent = ServiceClass.LATENCY_SENSITIVE
    assert finish(urgent, 10.5, 10.7) == {("ttft", "met"): 1, ("tpot", "missed"): 1}
    assert finish(urgent, 11.5, 11.55) == {("ttft", "missed"): 1, ("tpot", "met"): 1}
    assert finish(urgent, 11.0) == {("ttft", "met"): 1}
    assert finish(urgent, reason="slo_unattainable") == {("ttft", "refused"): 1}
