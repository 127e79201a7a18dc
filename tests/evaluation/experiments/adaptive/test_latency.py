"""Points under load: their rates and lengths, and ratios of latencies."""

from __future__ import annotations

import pytest

from evaluation.experiments.adaptive.cases import Selection
from evaluation.experiments.adaptive.latency import (
    make_capacity_points,
    make_latency_points,
    requests_per_s,
    with_latency_ratios,
)
from evaluation.experiments.options import experiment_settings

SETTINGS = experiment_settings("adaptive")


def test_loads_are_fractions_of_what_neo_serves() -> None:
    chosen = Selection(cases=["t4-osc-50"], quick=True)
    (at_once,) = make_capacity_points(SETTINGS, chosen)
    assert at_once.task.system == "neo" and at_once.task.lengths.spec.request_rate is None
    row = {"case": "t4-osc-50", "output_tokens_per_s": 120.0, "output_len_mean": 48.0}
    capacities = requests_per_s([row])
    assert capacities == {"t4-osc-50": 2.5}
    points = make_latency_points(SETTINGS, chosen, capacities)
    assert [(p.task.lengths.spec.request_rate, p.task.system) for p in points] == [
        (rate, system) for rate in (1.25, 2.0, 2.5) for system in ("neo", "apex", "adaptive")
    ]
    for point in points:
        pairs = zip(point.task.lengths.rows, at_once.task.lengths.rows, strict=True)
        assert all((a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens) for a, b in pairs)
    assert len({point.key for point in points}) == len(points)


def test_by_default_there_are_some_cases_and_by_name_any() -> None:
    assert [p.task.values["case"] for p in make_capacity_points(SETTINGS, Selection(quick=True))] == SETTINGS[
        "latency"
    ]["cases"]
    with pytest.raises(ValueError, match="no case nothing"):
        make_capacity_points(SETTINGS, Selection(cases=["nothing"]))


def test_ratios_are_to_the_same_load() -> None:
    def row(system: str, load: float, latency: float, ttft: float | None, tpot: float) -> dict:
        values = {"per_token_latency_s_mean": latency, "ttft_s_p99": ttft, "tpot_s_p99": tpot}
        return {"system": system, "case": "a", "load": load, **values}

    rows = [
        row("neo", 0.5, 0.2, 4.0, 0.1),
        row("adaptive", 0.5, 0.1, 5.0, 0.1),
        row("neo", 1.0, 0.4, None, 0.2),
        row("adaptive", 1.0, 0.6, 5.0, 0.1),
    ]
    half, full = (r for r in with_latency_ratios(["neo", "apex"])(rows) if r["system"] == "adaptive")
    assert (half["latency_over_neo"], half["ttft_p99_over_neo"], half["tpot_p99_over_neo"]) == (0.5, 1.25, 1.0)
    assert full["latency_over_neo"] == pytest.approx(1.5) and full["ttft_p99_over_neo"] is None
    assert full["tpot_p99_over_neo"] == 0.5 and full["latency_over_apex"] is None
