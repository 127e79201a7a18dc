"""Drawn lines and bars: where names stand, which colours systems get, and what a figure says beside its data."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from matplotlib import pyplot as plt
from matplotlib.container import ErrorbarContainer

from evaluation.plots.charts import Level, LinePanel, Series, line_figure, spread_labels
from evaluation.plots.notes import cpu_attention_notes
from evaluation.plots.papers import draw_fig5, system_lines
from evaluation.plots.style import COLOURS, FigureText, system_colour

TEXT = FigureText("", "", "")


def test_places_are_the_nearest_that_are_far_enough_apart():
    assert spread_labels([0.2, 0.5, 0.9], 0.1) == pytest.approx([0.2, 0.5, 0.9])
    assert spread_labels([0.5, 0.5, 0.5, 0.9], 0.1) == pytest.approx([0.4, 0.5, 0.6, 0.9])
    assert spread_labels([0.4, 0.42, 0.5], 0.1) == pytest.approx([0.34, 0.44, 0.54])
    assert spread_labels([0.0, 0.01, 0.99, 1.0], 0.1) == pytest.approx([0.0, 0.1, 0.9, 1.0])
    assert spread_labels([], 0.1) == []


def test_lines_are_named_where_they_end():
    """Also on a logarithmic axis whose limits depend on a level."""
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


def grey(colour: str) -> float:
    """The lightness (0 to 255) of a colour in grey print."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_systems_can_be_told_apart_in_grey_and_servers_by_any_name():
    one_class = ("vllm", "swiftllm", "fastdecode", "neo", "apex", "adaptive")
    two_classes = ("llumnix", "sarathi", "neo", "omniserve", "omniserve-stepping")
    assert {*one_class, *two_classes} == COLOURS.keys()
    for together in (one_class, two_classes):  # in one figure
        shades = sorted(grey(COLOURS[system]) for system in together)
        assert min(after - before for before, after in itertools.pairwise(shades)) > 25
    assert len({system_colour(name) for name in ("vllm", "my-vllm", "my-apex")}) == 3
    assert system_colour("my-apex") == system_colour("my-apex")


def test_failed_requests_are_told():
    rows = [row("swiftllm", failed=0), row("apex", failed=2), row("apex", "b", failed=1)]
    assert "FAILED requests, which count in nothing that is drawn: apex 3." in words_of(draw_fig5(rows, {}))
    assert "FAILED" not in words_of(draw_fig5(rows[:1], {}))


def test_repeats_show_their_span():
    rows = [row("swiftllm"), row("apex", output_tokens_per_s_low=4.0, output_tokens_per_s_high=9.0, repeats=3)]
    figure = draw_fig5(rows, {})
    (ax,) = figure.axes
    assert len([part for part in ax.containers if isinstance(part, ErrorbarContainer)]) == 1
    assert ax.get_ylim()[1] > 9.0
    assert "Medians of 3 repeats" in words_of(figure)
    _, apex = system_lines(rows, "output_len", "output_tokens_per_s", "swiftllm")
    assert apex.points == ((9.0, 1.0),) and apex.spans == ((9.0, 0.8, 1.8),)


def words_of(figure: plt.Figure) -> str:
    parts = [figure, *figure.subfigs]
    words = " ".join(text.get_text() for part in parts for text in part.texts)
    plt.close(figure)
    return " ".join(words.split())


def test_a_figure_says_what_computed_what_is_missing_and_what_fitted_means():
    rows = [row(system) for system in ("vllm", "swiftllm", "neo", "apex")]
    rows += [measured(system) for system in ("swiftllm", "neo", "apex")]
    words = words_of(draw_fig5(rows, {"cpu": "a CPU", "usable_cores": 2}))
    assert "neo (ispc kernel) 100 GB/s, 20.0%, apex (llamafile kernel) 100 GB/s, 20.0% of the GPU's 500 GB/s" in words
    assert "Attention on the CPU: neo (native kernel), apex (native kernel)." in words
    assert "Not measured: vllm." in words and "Not simulated" not in words
    assert "fitted: drawn from a record's quantiles" in words


def test_more_systems_make_the_figure_wider_so_that_bars_keep_room_for_their_numbers():
    names = ("vllm", "swiftllm", "neo", "apex", "adaptive")
    figures = [draw_fig5([row(name) for name in names[:count]], {}) for count in (3, 4, 5)]
    few, four, five = (figure.get_size_inches()[0] for figure in figures)
    bars = [figure.axes[0].patches[0].get_width() * figure.get_size_inches()[0] for figure in figures]
    assert few == four < five and bars[2] == pytest.approx(bars[1])
    for figure in figures:
        plt.close(figure)


def test_a_figure_says_which_system_its_paper_does_not_have():
    rows = [row("swiftllm"), row("apex")]
    said = "adaptive is this project's own scheduler; the paper does not have it."
    assert said in words_of(draw_fig5([*rows, row("adaptive")], {})) and said not in words_of(draw_fig5(rows, {}))


def test_only_a_panel_among_others_has_a_letter():
    def titles(*panels: str) -> list[str]:
        figure = draw_fig5([row("swiftllm", panel) for panel in panels], {})
        found = [ax.get_title(loc="left") for ax in figure.axes]
        plt.close(figure)
        return found

    assert titles("b") == ["A10 + Llama, OSC"]
    figure = draw_fig5([row("swiftllm", "a"), row("swiftllm", "b")], {})
    assert figure.legends and not any(
        ax.get_legend() for ax in figure.axes
    )  # the titles of narrow panels need the room
    plt.close(figure)
    assert [title[:4] for title in titles("a", "b")] == ["(a) ", "(b) "]


def test_rows_of_a_plugin_that_is_not_loaded_are_described_too():
    machine = {"backend": "simulated", "setting_title": "A10", "gpu_attention_gb_s": 500.0}
    rows = [
        {**machine, "system": "join-all", "cpu_kernel": "native", "cpu_bandwidth_gb_s": 40.0},
        {**machine, "system": "swiftllm", "cpu_kernel": "native", "cpu_bandwidth_gb_s": None},
    ]
    (note,) = cpu_attention_notes(rows)
    assert "join-all (native kernel) 40 GB/s" in note and "swiftllm" not in note


def test_an_axis_says_how_it_is_scaled():
    """A reader must see that an axis is logarithmic or does not begin at 0."""
    points = (Series("a", "#000000", ((1.0, 10.0), (100.0, 30.0))),)
    panels = [
        LinePanel("plain", "x", "y", points),
        LinePanel("log x", "x", "y", points, log_x=True),
        LinePanel("log y", "x", "y", points, log_y=True),
        LinePanel("from", "x", "y", points, y_from=5.0),
    ]
    figure = line_figure(panels, FigureText("", "", ""))
    labels = [(ax.get_xlabel(), ax.get_ylabel()) for ax in figure.axes[:4]]
    assert labels == [("x", "y"), ("x, log scale", "y"), ("x", "y\nlog scale"), ("x", "y\naxis from 5 on")]
    assert [(ax.get_xscale(), ax.get_yscale()) for ax in figure.axes[:3]] == [
        ("linear", "linear"), ("log", "linear"), ("linear", "log"),
    ]  # fmt: skip
    assert figure.axes[0].get_xlim()[0] == 0 and figure.axes[3].get_ylim()[0] == 5
    plt.close(figure)


def test_all_that_is_drawn_is_within_the_axes():
    """Predictions and levels too; on a logarithmic axis whose height is given, in its middle."""
    predicted = Series("a", "#000000", ((1.0, 10.0), (2.0, 20.0)), predicted=((1.0, 90.0), (2.0, 50.0)))
    plain = LinePanel("", "x", "y", (predicted,), (Level(70.0, "claim", "#000000"),))
    figure = line_figure([plain, replace(plain, log_y=True, decades=3.0), replace(plain, y_to=200.0)], TEXT)
    highest, log, to_200 = (ax.get_ylim() for ax in figure.axes[:3])
    assert highest[1] == pytest.approx(99.0) and to_200[1] == pytest.approx(220.0)
    assert log[0] < 10.0 and log[1] > 90.0 and log[1] / log[0] == pytest.approx(10**3.4)
    plt.close(figure)
