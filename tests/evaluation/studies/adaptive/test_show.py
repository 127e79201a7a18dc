"""The figures about `adaptive`: what is written in a cell, beside a bar and below points under load."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib import pyplot as plt

from evaluation.plots.charts import MAP_COLOURS
from evaluation.plots.style import save_figure
from evaluation.studies.adaptive import draw_cases, draw_latency, draw_map, error_rows


def row(system: str, **values: Any) -> dict[str, Any]:
    shared = {
        "case": "a", "case_title": "A10: 1000 in, 25 out", "setting_title": "A10 + Llama", "host": "Xeon",
        "input_len": 1003.0, "output_len": 25.0, "num_requests": 8, "seed": 1, "num_gpu_blocks": 16, "cpu_kv_gb": 120,
        "output_tokens_per_s": 100.0, "fraction_of_bound": 0.5, "ratio_to_best_published": 1.0,
    }  # fmt: skip
    return {"system": system, **shared, **values}


def words(figure: plt.Figure) -> dict[str, str]:
    """Texts of the panels with their weight."""
    return {text.get_text(): text.get_fontweight() for ax in figure.axes for text in ax.texts if text.get_text()}


def test_every_cell_is_marked_with_its_ratio_and_bold_where_another_system_is_faster(tmp_path) -> None:
    ratios = {(12, 25.0): 0.957, (12, 300.0): 1.304, (80, 25.0): 0.998, (80, 300.0): 1.1}
    rows = [
        row("adaptive", kernel=kernel, host_read_gb_s=gb_s, output_len=length, ratio_to_best_published=ratio)
        for kernel in ("own", "native")
        for (gb_s, length), ratio in ratios.items()
    ]
    figure = draw_map([row("neo", kernel="own", host_read_gb_s=12), *rows])
    marks = {"0.96": "bold", "1.30": "normal", "1.00": "normal", "1.10": "normal"}
    titles = {"Each system with its own CPU kernel": "bold", "All systems with the kernel native": "bold"}
    assert words(figure) == marks | titles
    own, native, scale = figure.axes
    assert [text.get_text() for text in native.texts][-1] == "All systems with the kernel native"
    assert [label.get_text() for label in own.get_xticklabels()] == ["12", "80"]
    assert [label.get_text() for label in own.get_yticklabels()] == ["25", "300"]
    assert scale.get_xlim() == pytest.approx((1 / 1.304, 1.304))
    shades = dict(zip([text.get_text() for text in own.texts], own.patches, strict=False))
    assert shades["1.00"].get_facecolor()[:3] == pytest.approx(MAP_COLOURS(0.5)[:3], abs=0.02)
    assert shades["1.30"].get_facecolor() == MAP_COLOURS(1.0)
    assert "SIMULATED" in figure.texts[0].get_text() and "GB/s" in own.get_xlabel()
    assert {path.suffix for path in save_figure(figure, tmp_path)} == {".png", ".pdf"}


def test_a_map_without_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="no cell is finished"):
        draw_map([row("neo", kernel="own", host_read_gb_s=12)])


def test_bars_of_all_cases_end_at_their_fraction_of_the_bound() -> None:
    rows = [
        row("neo", case=case, case_title=case, fraction_of_bound=0.4, ratio_to_best_published=1.0)
        if system == "neo"
        else row("adaptive", case=case, case_title=case, fraction_of_bound=0.38, ratio_to_best_published=0.95)
        for case in "abc"
        for system in ("neo", "adaptive")
    ]
    figure = draw_cases(rows)
    left, right = figure.axes
    assert [label.get_text() for ax in (left, right) for label in ax.get_yticklabels()] == ["a", "b", "c"]
    assert [bar.get_width() for bar in left.patches] == [0.4, 0.38] * 2
    assert words(figure) == {"100 tok/s, 0.95\u00d7": "bold"}
    assert "SIMULATED" in left.get_xlabel()
    plt.close(figure)


def test_points_under_load_are_marked_with_their_ratio_to_neo() -> None:
    rows = [
        row(
            system, load=load, loaded_as="neo", per_token_latency_s_mean=latency, ttft_s_p99=10 * latency,
            latency_over_neo=latency / 0.1, ttft_p99_over_neo=latency / 0.1,
        )
        for load in (0.5, 1.0)
        for system, latency in (("neo", 0.1), ("adaptive", 0.085))
    ]  # fmt: skip
    figure = draw_latency(rows)
    latency, ttft = figure.axes[:2]
    assert [line.get_ydata().tolist() for line in latency.lines] == [[0.1, 0.1], [0.085, 0.085]]
    assert ttft.lines[1].get_ydata().tolist() == pytest.approx([0.85, 0.85])
    assert latency.lines[0].get_xdata().tolist() == [50, 100] and latency.get_xlabel() == "load (%)"
    assert [text.get_text() for text in latency.texts] == ["0.85\u00d7", "0.85\u00d7", "adaptive", "neo"]
    assert latency.get_title("left") == "A10: 1000 in, 25 out"
    low, high = latency.get_ylim()
    assert high > 9.99 * low, "a small difference looks large"
    plt.close(figure)


def test_the_lowest_ratios_of_each_error() -> None:
    def wrong(case: str, factor: float, over_best: float, over_right: float) -> dict[str, Any]:
        error = {"actual_over_believed": factor, "online_correction": True}
        ratios = {"ratio_to_best_published": over_best, "ratio_to_right_table": over_right}
        return row("adaptive", case=case, **error, **ratios)

    right, slower = error_rows(
        [wrong("a", 1.0, 1.2, 1.0), wrong("b", 1.0, 1.1, 1.0), wrong("a", 1.5, 0.9, 0.8), wrong("b", 1.5, 1.6, 0.7)]
    )
    assert (right["lowest"], right["lowest_case"]) == (1.1, "b")
    assert (slower["lowest"], slower["lowest_case"]) == (0.9, "a")
    assert (slower["lowest_right"], slower["lowest_right_case"]) == (0.7, "b")
    assert slower["mean"] == pytest.approx((0.9 * 1.6) ** 0.5)
