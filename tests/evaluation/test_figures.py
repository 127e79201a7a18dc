"""What the figures say beside their data, and where the names of lines stand."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from evaluation.figures.apex_paper import draw_fig5
from evaluation.figures.lines import Level, LinePanel, Series, line_figure, spread
from evaluation.figures.style import FigureText


def test_places_are_the_nearest_that_are_far_enough_apart():
    assert spread([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.5, 0.9], 0.1) == pytest.approx([0.4, 0.5, 0.6, 0.9])
    assert spread([0.4, 0.42, 0.5], 0.1) == pytest.approx([0.34, 0.44, 0.54])
    assert spread([0.0, 0.01, 0.99, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    assert spread([], 0.1) == []


def test_lines_are_named_where_they_end():
    """On a logarithmic axis, too, whose limits a level moves."""
    series = [Series(name, "#000000", ((1.0, 1.0), (2.0, y))) for name, y in (("c", 9.0), ("a", 1.0), ("b", 1.001))]
    panel = LinePanel("", "x", "y", tuple(series), (Level(1000.0, "", "#000000"),), log_y=True)
    figure = line_figure([panel], FigureText("", "", ""))
    figure.draw_without_rendering()
    (ax,) = figure.axes
    names = {text.get_text(): text for text in ax.texts if text.get_text()}
    for line in series:
        end = ax.transAxes.inverted().transform(ax.transData.transform(max(line.points)))
        assert names[line.label].xy == pytest.approx(end)
    heights = [names[name].get_position()[1] for name in "abc"]
    assert heights == sorted(heights) and heights[1] - heights[0] > 0.02
    assert "log scale" in ax.get_ylabel() and "log scale" not in ax.get_xlabel()
    plt.close(figure)


def row(system: str, panel: str = "a", **changes) -> dict:
    simulated = {
        "backend": "simulated", "gpu": "A10", "setting": "s", "setting_title": "A10 + Llama", "host": "Xeon",
        "cpu_kv_gb": 9, "cpu_bandwidth_gb_s": 100.0 if system in ("neo", "apex") else None, "gpu_attention_gb_s": 500.0,
        "cpu_kernel": {"neo": "ispc", "apex": "llamafile"}.get(system, "native"),
    }  # fmt: skip
    shared = {
        "system": system, "baseline": "swiftllm", "panel": panel, "workload": "osc", "workload_title": "OSC",
        "trace_origin": "fitted", "num_requests": 8, "scale": 1, "input_len": 9.0, "output_len": 9.0,
        "output_len_mean": 9.0, "request_rate": None, "output_tokens_per_s": 5.0, "model": "Llama", "dtype": "float16",
        "num_gpu_blocks": 4,
    }  # fmt: skip
    return shared | simulated | changes


def measured(system: str) -> dict:
    here = {"backend": "torch-cpu", "gpu": None, "setting": None, "setting_title": None, "cpu_bandwidth_gb_s": None}
    return row(system, **here, cpu_kernel="native")


def words_of(figure: plt.Figure) -> str:
    parts = [figure, *figure.subfigs]
    words = " ".join(text.get_text() for part in parts for text in part.texts)
    plt.close(figure)
    return " ".join(words.split())


def test_a_figure_says_what_computed_what_is_missing_and_what_fitted_means():
    rows = [row(system) for system in ("vllm", "swiftllm", "neo", "apex")]
    rows += [measured(system) for system in ("swiftllm", "neo", "apex")]
    words = words_of(draw_fig5(rows, {"cpu": "a CPU", "usable_cores": 2}))
    assert "neo (ispc kernel) 100 GB/s, apex (llamafile kernel) 100 GB/s; on the GPU 500 GB/s" in words
    assert "Attention on the CPU: neo (native kernel), apex (native kernel)." in words
    assert "Not measured: vllm." in words and "Not simulated" not in words
    assert "fitted: drawn from a record's quantiles" in words


def test_only_a_panel_among_others_has_a_letter():
    def titles(*panels: str) -> list[str]:
        figure = draw_fig5([row("swiftllm", panel) for panel in panels], {})
        found = [ax.get_title(loc="left") for ax in figure.axes]
        plt.close(figure)
        return found

    assert titles("b") == ["A10 + Llama, OSC"]
    assert [title[:4] for title in titles("a", "b")] == ["(a) ", "(b) "]
