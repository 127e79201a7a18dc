"""Verdicts on the papers' claims: their limits, what they are about, and which rows they may use."""

from __future__ import annotations

import pytest

from evaluation.results.claims import Claim, overview, verdict

CLAIM = Claim("fig5", "5.2", "T4", "osc", "output_tokens_per_s", ("apex", "vllm"), 1.96, True, "apex-t4")


def rows(rates: dict[str, float], output_len: float = 100.0, **more) -> list[dict]:
    shared = {"backend": "torch-cuda", "setting": "apex-t4", "setting_origin": "papers", "gpu": "Tesla T4"}
    shared |= {"setting_title": "T4 + Llama-2-7B", "scale": 1.0}
    shared |= {"workload": "osc", "output_len": output_len, "request_rate": None} | more
    return [shared | {"system": system, "output_tokens_per_s": rate} for system, rate in rates.items()]


def simulated(rates: dict[str, float]) -> list[dict]:
    return rows(rates, backend="simulated", gpu="T4")


@pytest.mark.parametrize(
    ("claimed", "ours", "word"),
    [
        (1.5, 1.6, "agrees within 10%"),
        (1.5, 1.4, "agrees within 10%"),
        (1.5, 1.7, "larger"),
        (1.5, 1.3, "smaller"),
        (1.5, 0.99, "smaller"),  # favours neither system
        (1.05, 0.99, "agrees within 10%"),
        (1.05, 0.97, "opposite direction"),  # although it differs by less than 10%
        (0.5, 0.52, "agrees within 10%"),
        (0.5, 0.4, "larger"),  # a latency: the gain is larger
        (0.5, 0.8, "smaller"),
        (0.5, 1.2, "opposite direction"),
        (1.5, None, "not run"),
        (None, None, "not run"),
        (None, 1.2, "not judged"),
    ],
)
def test_a_verdict_keeps_its_limits(claimed, ours, word):
    assert verdict(claimed, ours) == word


def test_the_measured_ratio_is_judged_before_the_simulated_one():
    prediction = simulated({"vllm": 10.0, "apex": 40.0})
    (alone,) = overview([CLAIM], [("fig5", prediction)])
    assert (alone.verdict, alone.judged_word, alone.measured) == ("larger", "simulated", None)
    (both,) = overview([CLAIM], [("fig5", [*prediction, *rows({"vllm": 10.0, "apex": 20.0})])])
    assert (both.verdict, both.judged_word) == ("agrees within 10%", "measured")
    assert both.simulated.summary == pytest.approx(4.0) and both.measured.summary == pytest.approx(2.0)
    assert both.where == "T4 + Llama-2-7B, paper's KV pools"


def test_each_reading_of_a_machine_is_judged_by_itself():
    other = {"setting": "apex-t4-as-measured", "paper_setting": "apex-t4", "reading": "as APEX measured"}
    measured = [row | other for row in simulated({"vllm": 10.0, "apex": 20.0})]
    today = [row | {"reading": "with today's kernels"} for row in simulated({"vllm": 10.0, "apex": 90.0})]
    first, second = overview([CLAIM], [("fig5", [*measured, *today])])
    assert (first.where, first.verdict) == ("as APEX measured", "agrees within 10%")
    assert (second.where, second.verdict) == ("with today's kernels", "larger")


@pytest.mark.parametrize("other", [{"setting": None}, {"gpu": None}, {"scale": 0.1}])
def test_another_model_a_cpu_and_scaled_lengths_are_never_judged(other):
    (item,) = overview([CLAIM], [("fig5", rows({"vllm": 1.0, "apex": 2.0}, **other))])
    assert (item.verdict, item.measured, item.simulated) == ("not run", None, None)


def test_an_up_to_is_judged_at_its_best_point():
    measured = [*rows({"vllm": 10.0, "apex": 12.0}), *rows({"vllm": 10.0, "apex": 19.0}, 300.0)]
    (item,) = overview([CLAIM], [("fig5", measured)])
    assert item.measured.summary == pytest.approx(1.9) and item.measured.best_at == "300 out"


def test_a_prediction_needs_both_systems():
    ours, theirs = rows({"apex": 20.0}), rows({"vllm": 10.0}, backend="server")
    (item,) = overview([CLAIM], [("fig5", [*ours, *theirs])])
    assert item.predicted is None and item.measured is not None
    predicted = [
        row | {"predicted_output_tokens_per_s": rate} for row, rate in zip([*ours, *theirs], (33.0, 11.0), strict=True)
    ]
    (item,) = overview([CLAIM], [("fig5", predicted)])
    assert item.predicted.summary == pytest.approx(3.0) and item.measured.summary == pytest.approx(2.0)


def test_every_card_that_measured_a_claim_has_a_row():
    here = rows({"vllm": 10.0, "apex": 20.0})
    other = rows({"vllm": 10.0, "apex": 30.0}, setting_title="L4 + Llama-2-7B", setting_origin="card")
    found = overview([CLAIM], [("fig5", simulated({"vllm": 1.0, "apex": 2.0})), ("fig5", here), ("fig5", other)])
    assert [item.where for item in found] == [
        "T4 + Llama-2-7B, paper's KV pools",
        "L4 + Llama-2-7B, all KV blocks it holds",
    ]
    assert [item.verdict for item in found] == ["agrees within 10%", "larger"]
    assert all(item.simulated.summary == pytest.approx(2.0) for item in found)
    (not_run,) = overview([CLAIM], [("fig7", here)])
    assert not_run.verdict == "not run" and not_run.judged_word == ""


def test_a_stand_in_is_named():
    (item,) = overview([CLAIM], [("fig5", rows({"swiftllm": 10.0, "apex": 20.0}))])
    assert item.what == "throughput, apex / vllm (here apex / swiftllm)"
