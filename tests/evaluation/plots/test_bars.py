"""Bars of throughput: their numbers, their places, and bars without a result."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from evaluation.plots.charts import METRIC, Bar, BarPanel, draw_bars, rate_bars
from evaluation.plots.style import system_colour


def row(system: str, rate: float | None, **fields: object) -> dict[str, object]:
    return {"system": system, METRIC: rate, **fields}


def test_the_baseline_has_its_rate_and_others_their_ratio_to_it() -> None:
    rows = [row("apex", 30.0), row("swiftllm", 20.0), row("neo", 40.0, ratio=1.75)]
    base, apex, neo = rate_bars(rows, ["swiftllm", "apex", "neo"], "swiftllm")
    assert [(bar.value, bar.text) for bar in (base, apex, neo)] == [
        (20.0, "20"), (30.0, "1.50\u00d7"), (40.0, "1.75\u00d7"),
    ]  # fmt: skip
    assert (base.faint, base.bold, apex.faint, apex.bold) == (True, False, False, True)
    assert apex.colour == system_colour("apex")


def test_a_rate_of_nothing_is_no_result() -> None:
    """All requests may have failed, or the point has not run."""
    rows = [row("swiftllm", 20.0), row("neo", 0.0), row("apex", None)]
    assert rate_bars(rows, ["neo", "apex", "adaptive"], "swiftllm") == [None, None, None]
    (bar,) = rate_bars([row("swiftllm", None), row("apex", 5.0)], ["apex"], "swiftllm")
    assert bar.text == "5" and bar.faint, "there is nothing to compare with"


def test_bars_stand_beside_each_other_over_their_label() -> None:
    bars = [Bar(2.0, "#000000", "two"), None, Bar(1.0, "#000000", "one", span=(0.5, 4.0))]
    figure, ax = plt.subplots()
    draw_bars(ax, BarPanel("title", "x", [("here", bars), ("there", bars[:1])], "rate"))
    middles = [box.get_x() + box.get_width() / 2 for box in ax.patches]
    assert middles == pytest.approx([-0.28, 0.28, 1.0])
    words = {text.get_text(): text for text in ax.texts}
    assert words["no result"].get_position()[0] == 0 and words["one"].xy == pytest.approx((0.28, 4.0))
    assert [label.get_text() for label in ax.get_xticklabels()] == ["here", "there"]
    assert ax.get_ylim() == pytest.approx((0, 4.0 * 1.13)) and ax.get_ylabel() == "rate"
    plt.close(figure)
