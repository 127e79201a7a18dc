"""Ratios to the best published system at a place, to the bound, to the same load, and to a right table."""

from __future__ import annotations

from typing import Any

import pytest

from evaluation.studies.adaptive import with_best, with_checks, with_error_ratios, with_latency_ratios


def row(system: str, rate: float | None, **place: Any) -> dict[str, Any]:
    return {"system": system, "output_tokens_per_s": rate, "bound_tokens_per_s": 200.0, **place}


def test_ratios_are_to_the_best_published_system_of_the_case() -> None:
    rows = [
        row("neo", 100.0, case="a"),
        row("apex", 80.0, case="a"),
        row("adaptive", 120.0, case="a"),
        row("adaptive", 50.0, case="b"),
    ]
    completed = with_best(rows)
    assert [row["ratio_to_best_published"] for row in completed] == [1.0, 0.8, 1.2, None]
    assert [row["best_published"] for row in completed] == ["neo", "neo", "neo", None]
    assert [row["fraction_of_bound"] for row in completed] == [0.5, 0.4, 0.6, 0.25]


def test_a_system_that_does_not_depend_on_a_field_counts_at_each_of_its_values() -> None:
    rows = [
        row("swiftllm", 100.0, out=9, gb_s=None) | {"bound_tokens_per_s": None},
        row("swiftllm", 500.0, out=8, gb_s=None) | {"bound_tokens_per_s": None},
        row("neo", 50.0, out=9, gb_s=12),
        row("neo", 200.0, out=9, gb_s=80),
        row("adaptive", 125.0, out=9, gb_s=12),
        row("adaptive", 150.0, out=9, gb_s=80),
        row("adaptive", None, out=9, gb_s=80),
    ]
    completed = with_best(rows, at=("out",), any_of=("gb_s",))
    assert [row["ratio_to_best_published"] for row in completed] == [1.0, 1.0, 0.5, 1.0, 1.25, 0.75, 0.0]
    assert [row["best_published"] for row in completed[4:6]] == ["swiftllm", "neo"]
    assert completed[0]["fraction_of_bound"] is None


def test_ratios_are_to_the_same_load() -> None:
    def loaded(system: str, load: float, latency: float, ttft: float | None, tpot: float) -> dict:
        values = {"per_token_latency_s_mean": latency, "ttft_s_p99": ttft, "tpot_s_p99": tpot}
        return {"system": system, "case": "a", "load": load, **values}

    rows = [
        loaded("neo", 0.5, 0.2, 4.0, 0.1),
        loaded("adaptive", 0.5, 0.1, 5.0, 0.1),
        loaded("neo", 1.0, 0.4, None, 0.2),
        loaded("adaptive", 1.0, 0.6, 5.0, 0.1),
    ]
    half, full = (r for r in with_latency_ratios(rows) if r["system"] == "adaptive")
    assert (half["latency_over_neo"], half["ttft_p99_over_neo"], half["tpot_p99_over_neo"]) == (0.5, 1.25, 1.0)
    assert full["latency_over_neo"] == pytest.approx(1.5) and full["ttft_p99_over_neo"] is None
    assert full["tpot_p99_over_neo"] == 0.5 and full["latency_over_apex"] is None
    assert half["ttft_p99_over_best"] == 1.25 and full["latency_over_best"] == pytest.approx(1.5)


def test_a_check_holds_while_its_ratios_keep_their_limits() -> None:
    def checked(system: str, rate: float, ttft: float, without: str | None = None, **limits: float) -> dict:
        limits = {"least_over_best": 0.9, "most_ttft_over_best": None, **limits}
        return row(system, rate, case="a", ttft_s_p99=ttft, without=without, **limits)

    published = [checked("neo", 100.0, 4.0), checked("apex", 80.0, 2.0)]

    def holds(*rows: dict) -> list[bool]:
        return [here["holds"] for here in with_checks([*published, *rows])[2:]]

    assert holds(checked("adaptive", 95.0, 9.0)) == [True]
    assert holds(checked("adaptive", 89.0, 1.0)) == [False]
    assert holds(checked("adaptive", 95.0, 2.2, most_ttft_over_best=1.15)) == [True]
    assert holds(checked("adaptive", 95.0, 2.4, most_ttft_over_best=1.15)) == [False]  # the best has 2.0
    without = [checked("adaptive", rate, 1.0, without="lockstep") for rate in (50.0, 95.4, 96.0)]
    assert holds(checked("adaptive", 95.0, 1.0), *without) == [True, True, True, False]


def test_ratios_are_to_the_same_error() -> None:
    def wrong(system: str, factor: float | None, correction: bool | None, rate: float) -> dict:
        error = {"actual_over_believed": factor, "online_correction": correction}
        return {"system": system, "case": "a", **error, "output_tokens_per_s": rate, "bound_tokens_per_s": 400.0}

    rows = [
        wrong("swiftllm", None, None, 90.0),
        wrong("neo", 1.0, True, 100.0),
        wrong("neo", 1.5, False, 80.0),
        wrong("adaptive", 1.0, True, 125.0),
        wrong("adaptive", 1.5, False, 100.0),
    ]
    completed = with_error_ratios(rows)
    assert [r["ratio_to_best_published"] for r in completed[3:]] == [1.25, pytest.approx(100 / 90)]
    assert [r["ratio_to_right_table"] for r in completed] == [1.0, 1.0, 0.8, 1.0, 0.8]
