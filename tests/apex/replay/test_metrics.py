from __future__ import annotations

from dataclasses import replace

import pytest

from apex.replay.metrics import Targets, compute_metrics, per_token_latency_s, predicted_over_actual
from apex.replay.records import RequestRecord, record_of, record_values, summary_of
from swiftllm.core.request import Request, SamplingParams


def record(name, arrival, *times, failure=None):
    return RequestRecord(name, arrival, 10, len(times), tuple(times), failure=failure)


def test_hand_computed_example():
    records = [
        record("a", 0.0, 1.0, 2.0, 3.0, 4.0),  # latency 4 over 4 tokens = 1.0, ttft 1, tpot 1
        record("b", 2.0, 5.0, 10.0),  # latency 8 over 2 tokens = 4.0, ttft 3, tpot 5
        record("c", 1.0, 7.0),  # latency 6 over 1 token = 6.0, ttft 6, no tpot
        record("d", 0.0, failure="refused"),
    ]
    metrics = compute_metrics(records, wall_s=12.0, stats={"gpu_batch_busy_s": 6.0, "cpu_busy_s": 3.0})
    assert metrics["makespan_s"] == 10.0
    assert metrics["output_tokens_per_s"] == pytest.approx(7 / 10)
    assert metrics["output_tokens_per_s_mid_window"] == pytest.approx(5 / 6)  # tokens at 2, 3, 4, 5, 7 in [2, 8]
    assert metrics["requests_per_s"] == pytest.approx(0.3)
    assert metrics["per_token_latency_s_mean"] == pytest.approx(11 / 3)
    assert metrics["per_token_latency_s_p50"] == 4.0
    assert metrics["per_token_latency_s_p90"] == pytest.approx(4 + 0.8 * 2)
    assert metrics["per_token_latency_s_p99"] == pytest.approx(4 + 0.98 * 2)
    assert metrics["ttft_s_mean"] == pytest.approx(10 / 3)
    assert metrics["tpot_s_mean"] == 3.0 and metrics["tpot_s_p50"] == 3.0
    assert (metrics["completed"], metrics["failed"]) == (3, 1)
    assert (metrics["output_tokens"], metrics["prompt_tokens"]) == (7, 30)
    assert (metrics["gpu_batch_busy_fraction"], metrics["cpu_busy_fraction"]) == (0.5, 0.25)


def test_goodput_counts_requests_that_keep_both_targets():
    records = [
        record("late", 0.0, 3.0, 3.1, 3.2),  # first token after 3
        record("slow", 0.0, 1.0, 2.0, 3.0),  # a token per second
        record("good", 1.0, 2.0, 2.1, 2.2),
        record("single", 3.0, 4.0),  # no gap at all
        record("refused", 0.0, failure="refused"),
    ]
    metrics = compute_metrics(records, 5.0, targets=Targets(ttft_s=1.0, tpot_s=0.1 + 1e-9))
    assert metrics["goodput_requests_per_s"] == pytest.approx(2 / 4) and metrics["requests_per_s"] == 1.0
    assert (metrics["ttft_target_s"], metrics["tpot_target_s"]) == (1.0, 0.1 + 1e-9)


def test_every_latency_has_the_same_spread():
    metrics = compute_metrics([record("a", 0.0, 1.0, 2.0), record("b", 0.0, 2.0, 6.0)], 6.0)
    for name in ("per_token_latency_s", "ttft_s", "tpot_s"):
        assert all(metrics[f"{name}_{part}"] is not None for part in ("mean", "p50", "p90", "p99"))


def test_a_request_in_short_keeps_what_its_latencies_need():
    short = summary_of(record("a", 1.0, 2.0, 3.0, 5.5))
    assert (short.arrival_s, short.first_token_s, short.last_token_s, short.output_len) == (1.0, 2.0, 5.5, 3)
    assert per_token_latency_s(short) == 1.5
    assert summary_of(record("d", 0.0, failure="refused")).failure == "refused"


def test_makespan_begins_with_the_first_arrival():
    assert compute_metrics([record("a", 3.0, 5.0)], 5.0)["makespan_s"] == 2.0


def test_nothing_completed_gives_none_not_zero():
    metrics = compute_metrics([record("a", 0.0, failure="refused")], 1.0)
    assert metrics["output_tokens_per_s"] is None and metrics["per_token_latency_s_p99"] is None
    assert metrics["gpu_batch_busy_fraction"] is None and metrics["failed"] == 1


def test_record_of_a_request_is_relative_to_the_start():
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=2, ignore_eos=True), arrival_s=101.0)
    request.tier_history.append((101.5, "cpu"))
    request.append_token(5, 102.0)
    half = record_of(request, 2, start_s=100.0)
    assert half.failure == "1 of 2 tokens (finish reason: none)" and half.finish_s is None
    request.append_token(6, 104.0)
    whole = record_of(request, 2, start_s=100.0)
    assert whole.completed and whole.finish_reason == "length"
    assert (whole.arrival_s, whole.first_token_s, whole.finish_s) == (1.0, 2.0, 4.0)
    assert whole.token_times_s == (2.0, 4.0) and whole.tier_history == ((1.5, "cpu"),)
    assert whole.output_digest != half.output_digest


def test_predictions_are_held_against_what_the_iterations_took():
    assert predicted_over_actual({"predicted_s": 3.0, "duration_s": 4.0}) == 0.75
    assert predicted_over_actual({"predicted_s": 0.0, "duration_s": 4.0}) is None
    assert predicted_over_actual({"predicted_s": 0.0, "duration_s": 0.0}) is None


def test_each_class_counts_the_tokens_of_the_window_whoever_ended() -> None:
    urgent = [record("a", 0.0, 1.0, 2.0, 3.0), record("b", 1.0, 4.0), record("late", 11.0, 12.0)]
    others = [record("c", 0.0, 2.0, 6.0, 10.0, 11.0, failure="4 of 9 tokens"), record("d", 0.0, failure="refused")]
    others = [replace(other, service_class="best-effort") for other in others]
    metrics = compute_metrics([*urgent, *others], 11.0, window_s=10.0)
    assert metrics["window_s"] == 10.0
    assert (metrics["latency_sensitive_arrived"], metrics["latency_sensitive_completed"]) == (2, 2)
    assert (metrics["best_effort_arrived"], metrics["best_effort_completed"]) == (2, 0)
    assert metrics["latency_sensitive_output_tokens"] == 4
    assert (metrics["best_effort_output_tokens"], metrics["best_effort_tokens_per_s"]) == (3, 0.3)
    assert metrics["best_effort_ttft_s_mean"] == 2.0 and metrics["best_effort_tpot_s_mean"] == 4.0
    assert metrics["latency_sensitive_ttft_s_mean"] == 2.0
    assert metrics["output_tokens"] == 5  # of completed requests, as always


def test_without_classes_and_window_there_are_no_metrics_of_a_class() -> None:
    assert not any("latency_sensitive" in name for name in compute_metrics([record("a", 0.0, 1.0)], 1.0))


def test_a_record_names_its_class_if_it_is_not_the_default() -> None:
    of_class = replace(record("a", 0.0, 1.0), service_class="best-effort")
    assert record_values(of_class)["service_class"] == record_values(summary_of(of_class))["service_class"]
    assert "service_class" not in record_values(record("a", 0.0, 1.0))


def test_attainment_is_a_share_of_offered_requests_and_of_admitted_ones() -> None:
    records = [
        record("good", 0.0, 1.0, 2.0),
        record("slow tokens", 0.0, 1.0, 4.0, 7.0),
        record("late", 0.0, 3.0, 3.5),
        record("single token", 1.0, 3.0),
        record("no token yet", 2.0, failure="0 of 3 tokens"),
        replace(record("refused", 0.0), failure="refused: later"),
        record("too near the end", 8.5, 9.0),
        replace(record("best effort", 0.0, 9.0), service_class="best-effort"),
    ]
    metrics = compute_metrics(records, 10.0, targets=Targets(2.0, 1.0), window_s=10.0)
    assert (metrics["offered"], metrics["refused"]) == (6, 1)
    assert metrics["slo_attainment"] == pytest.approx(2 / 6) and metrics["ttft_attainment"] == pytest.approx(3 / 6)
    assert metrics["slo_attainment_admitted"] == 2 / 5 and metrics["ttft_attainment_admitted"] == 3 / 5


def test_attainment_counts_nothing_after_the_window() -> None:
    metrics = compute_metrics([record("a", 0.0, 1.0, 2.0, 30.0)], 40.0, targets=Targets(2.0, 1.0), window_s=10.0)
    assert metrics["slo_attainment"] == 1.0
    nobody = compute_metrics([], 1.0, window_s=1.0)
    assert nobody["slo_attainment"] is None and nobody["ttft_attainment_admitted"] is None
