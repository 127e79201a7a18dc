"""Ratios to the best published system at a place, and to the bound."""

from __future__ import annotations

from typing import Any

from evaluation.experiments.adaptive.ratios import with_ratios


def row(system: str, rate: float | None, **place: Any) -> dict[str, Any]:
    return {"system": system, "output_tokens_per_s": rate, "bound_tokens_per_s": 200.0, **place}


def test_ratios_are_to_the_best_published_system_of_the_case() -> None:
    rows = [
        row("neo", 100.0, case="a"),
        row("apex", 80.0, case="a"),
        row("adaptive", 120.0, case="a"),
        row("adaptive", 50.0, case="b"),
    ]
    completed = with_ratios(["neo", "apex"])(rows)
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
    completed = with_ratios(["swiftllm", "neo"], at=("out",), any_of=("gb_s",))(rows)
    assert [row["ratio_to_best_published"] for row in completed] == [1.0, 1.0, 0.5, 1.0, 1.25, 0.75, 0.0]
    assert [row["best_published"] for row in completed[4:6]] == ["swiftllm", "neo"]
    assert completed[0]["fraction_of_bound"] is None
