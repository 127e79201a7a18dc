"""Ratios to other rows of a figure: the baseline, one host, no best effort, no admission control."""

from __future__ import annotations

from typing import Any

import pytest

from evaluation.studies.omniserve import PLACE, with_service_ratios


def row(system: str, attained: float = 1.0, tokens: float = 100.0, **changes: Any) -> dict[str, Any]:
    place = dict.fromkeys(PLACE) | {
        "best_effort": "dailymails",
        "cpu_hosts": 1,
        "admission_control": True,
        "slower": 1.0,
    }
    values = {"slo_attainment": attained, "best_effort_tokens_per_s": tokens, "ttft_attainment_admitted": 0.9}
    values |= {"latency_sensitive_tpot_s_p50": 0.1, "latency_sensitive_tokens_per_s": 50.0}
    return {"system": system, "baseline": "sarathi", **place, **values, **changes}


def test_over_the_baseline_at_the_same_point_only() -> None:
    mine, _, other = with_service_ratios(
        [row("omniserve", tokens=150.0), row("sarathi"), row("omniserve", tpot_slo_s=1)]
    )
    assert mine["best_effort_over_baseline"] == 1.5 and other["best_effort_over_baseline"] is None


def test_points_lost_to_best_effort_by_the_same_system_else_the_baseline() -> None:
    alone = row("sarathi", 1.0, 0.0, best_effort=None)
    lost, without = with_service_ratios([row("omniserve", 0.99, cpu_hosts=3), alone])
    assert lost["points_over_alone"] == pytest.approx(-1.0) and lost["attainment_over_alone"] == 0.99
    assert without["points_over_alone"] is None
    own = row("omniserve", 0.98, 0.0, best_effort=None)
    assert with_service_ratios([row("omniserve", 0.99), alone, own])[0]["points_over_alone"] == pytest.approx(1.0)


def test_two_rows_of_one_place_are_no_matter_where_none_is_compared_with_them() -> None:
    both, queued, baseline = with_service_ratios(
        [row("omniserve", tokens=150.0), row("omniserve", tokens=200.0, panel="queued"), row("sarathi")]
    )
    assert (both["best_effort_over_baseline"], queued["best_effort_over_baseline"]) == (1.5, 2.0)
    assert baseline["best_effort_over_baseline"] == 1.0 and both["best_effort_over_one_host"] is None


def test_over_one_host_and_over_no_admission_control() -> None:
    rows = [row("omniserve"), row("omniserve", tokens=300.0, cpu_hosts=5, latency_sensitive_tpot_s_p50=0.2)]
    one, five = with_service_ratios(rows)
    assert one["best_effort_over_one_host"] is None and one["tpot_over_one_host"] is None
    assert (five["best_effort_over_one_host"], five["tpot_over_one_host"]) == (3.0, 2.0)
    free = row("omniserve", admission_control=False, ttft_attainment_admitted=0.6)
    controlled, uncontrolled = with_service_ratios([row("omniserve"), free])
    assert controlled["ttft_over_uncontrolled"] == pytest.approx(1.5)
    assert controlled["throughput_over_uncontrolled"] == 1.0 and uncontrolled["ttft_over_uncontrolled"] is None
