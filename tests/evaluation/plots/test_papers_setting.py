"""Figures and tables of rows that were measured in a paper's setting: what they say, mark and leave empty."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import asdict

import pytest
from matplotlib import pyplot as plt
from matplotlib.legend import Legend
from rich.console import Console

from apex.replay.records import RequestRecord, summary_of
from evaluation.plots.charts import axis_top, label_distance
from evaluation.plots.notes import pool_notes
from evaluation.plots.papers import draw_fig5, draw_fig6, draw_fig7, draw_neo, print_results
from evaluation.results.folder import records_file
from tests.evaluation.plots.test_lines import row, words_of

SYSTEMS = ("vllm", "swiftllm", "apex")


def here(system: str, panel: str = "a", **changes) -> dict:
    """A row measured on a T4; vLLM's is of a server."""
    served = system == "vllm"
    measured = {
        "backend": "server" if served else "torch-cuda", "server": "vllm 0.32.0" if served else None, "gpu": "Tesla T4",
        "setting": "apex-t4", "setting_title": "T4 + Llama-2-7B", "setting_origin": "papers", "weights": "dummy",
        "dtype": None if served else "float16", "cpu_bandwidth_gb_s": None, "cpu_kv_gb": None if served else 20,
        "num_gpu_blocks": 54, "max_gpu_blocks": 9, "cpu_kernel": None if served else "native", "failed": 0,
        "num_requests": 40, "num_clipped": 3, "max_model_len": 832, "predicted_output_tokens_per_s": None,
    }  # fmt: skip
    return row(system, panel, **measured) | changes


def titles_of(figure: plt.Figure) -> list[str]:
    return [ax.get_title(loc="left") for ax in figure.axes]


def legends_of(figure: plt.Figure) -> list[str]:
    found = [legend for ax in figure.axes for legend in ax.findobj(Legend)]
    return [text.get_text() for legend in dict.fromkeys(found) for text in legend.get_texts()]


def test_the_measured_half_says_how_it_was_measured():
    figure = draw_fig5([row("swiftllm"), *map(here, SYSTEMS)], {})
    simulated, measured = figure.subfigs
    assert titles_of(measured) == ["T4 + Llama-2-7B, OSC, varied output length"]
    words = " ".join(" ".join(text.get_text() for text in measured.texts).split())
    for part in (
        "MEASURED on Tesla T4: T4 + Llama-2-7B",
        "Llama (float16, dummy weights) measured on Tesla T4",
        "KV pools of the paper: 54 GPU blocks of 16 tokens, 20 GB of host memory",
        "vllm 0.32.0: a server on this machine, timed at its client; swiftllm, apex: timed in the process",
        "OSC: 40 requests a point, fitted trace",
        "3 of 40 requests clipped to 832 tokens",
    ):
        assert part in words
    assert "larger one" not in words  # the card that measured held these blocks
    assert "clipped" not in " ".join(text.get_text() for text in simulated.texts)
    plt.close(figure)
    of_the_card = words_of(draw_fig5([here("swiftllm", setting_origin="card", weights="checkpoint")], {}))
    assert (
        "weights of a checkpoint" in of_the_card
        and "measured with all KV blocks that the card holds: 54" in of_the_card
    )


def test_engines_and_the_server_are_one_group_of_bars_with_ratios():
    figure = draw_fig5([here("vllm", output_tokens_per_s=4.0), here("swiftllm"), here("apex")], {})
    (ax,) = figure.axes
    assert [bar.get_height() for bar in ax.patches] == [4.0, 5.0, 5.0]
    assert {"0.80\u00d7", "5", "1.00\u00d7"} <= {text.get_text() for text in ax.texts}
    plt.close(figure)


@pytest.mark.parametrize(("measured", "empty"), [("a", "b"), ("b", "a")])
def test_a_panel_that_was_not_measured_keeps_its_place(measured, empty):
    simulated = [row("swiftllm", panel) for panel in "ab"]
    figure = draw_fig5([*simulated, here("swiftllm", measured)], {})
    left, right = figure.subfigs
    order = "ab".index(measured)
    assert titles_of(right)[order].startswith(f"({measured}) T4 + Llama-2-7B")
    blank = right.axes[1 - order]
    assert not blank.axison and [text.get_text() for text in blank.texts] == [f"({empty}) not measured on Tesla T4"]
    assert len(left.axes) == len(right.axes) == 2
    figure.draw_without_rendering()
    heights = [ax.get_position().height for ax in (left.axes[order], right.axes[order])]
    assert heights[1] == pytest.approx(heights[0], rel=0.25)
    plt.close(figure)
    alone = draw_fig5([here("swiftllm", measured)], {})
    assert len(alone.axes) == 1
    plt.close(alone)


def test_a_point_without_a_result_is_named_and_marked():
    rows = [here(system, output_len=length) for length in (9.0, 20.0) for system in SYSTEMS]
    figure = draw_fig5(rows[:3] + rows[4:], {})
    assert [text.get_text() for text in figure.axes[0].texts].count("no result") == 1
    assert "Without a result (failed, or not run yet): vllm: OSC, 20 output tokens." in words_of(figure)
    assert "Without a result" not in words_of(draw_fig5(rows, {}))


def test_predictions_are_marked_on_bars_and_drawn_beside_lines():
    rows = [
        here(system, output_len=length, output_tokens_per_s=10.0, predicted_output_tokens_per_s=rate)
        for length in (9.0, 20.0)
        for system, rate in (("swiftllm", 10.0), ("apex", 12.0))
    ]
    figure = draw_fig5(rows, {})
    (ax,) = figure.axes
    assert sorted(y for _, y in ax.collections[0].get_offsets()) == [10.0, 10.0, 12.0, 12.0]
    assert legends_of(figure) == ["SIMULATED from this machine's profile"]
    assert ax.get_ylim()[1] > 1.2 * 12.0  # the legend stands above all
    plt.close(figure)
    figure = draw_fig7(rows, {})
    faint = [line for line in figure.axes[0].get_lines() if line.get_alpha()]
    assert [list(line.get_ydata()) for line in faint] == [[1.0, 1.0], [1.2, 1.2]]
    assert legends_of(figure) == ["SIMULATED from this machine's profile"]
    plt.close(figure)
    without = [record | {"predicted_output_tokens_per_s": None} for record in rows]
    for draw in (draw_fig5, draw_fig7):
        figure = draw(without, {})
        assert legends_of(figure) == []
        plt.close(figure)


def test_a_number_makes_way_for_the_marker_of_its_bar():
    assert label_distance(100.0, None, 200.0) == label_distance(100.0, 20.0, 200.0) == 3.0
    assert label_distance(100.0, 103.0, 200.0) > 3.0 + 3.0  # just above the marker
    assert label_distance(100.0, 150.0, 200.0) == 3.0  # the marker is far above the number
    assert axis_top([]) == 1.0


def test_line_figures_name_the_setting_of_each_half():
    simulated = [row("swiftllm", request_rate=rate, per_token_latency_s_mean=1.0) for rate in (1, 2)]
    measured = [here("swiftllm", request_rate=rate, per_token_latency_s_mean=1.0) for rate in (1, 2)]
    figure = draw_fig6([*simulated, *measured], {})
    assert titles_of(figure) == ["A10 + Llama, OSC", "measured, T4 + Llama-2-7B, OSC"]
    assert [ax.get_ylabel().split("\n")[0][-9:] for ax in figure.axes] == ["SIMULATED", " measured"]
    words = words_of(figure)
    assert "SIMULATED and MEASURED" in words and "Measured: OSC: 40 requests a point" in words


NEO = {"setting": "neo-t4", "setting_title": "T4 + Llama-2-7B (g4dn.4xlarge)", "panel": "c"}


def neo_rows() -> list[dict]:
    rows = [row(system, output_len=length) for length in (9.0, 20.0) for system in ("swiftllm", "neo")]
    rows += [record | {"panel": "c", "setting": "neo-t4", "setting_title": "T4"} for record in rows]
    return rows + [here(system, output_len=length, **NEO) for length in (9.0, 20.0) for system in ("swiftllm", "neo")]


def test_neo_draws_both_halves_or_the_measured_one_alone(tmp_path):
    rows = neo_rows()
    figure = draw_neo("NEO Figure 9", rows, tmp_path)
    assert titles_of(figure) == [
        "(a) A10 + Llama, OSC", "(c) T4, OSC", "(c) measured, T4 + Llama-2-7B (g4dn.4xlarge), OSC",
    ]  # fmt: skip
    assert "measured" in figure.axes[2].get_ylabel() and "SIMULATED" not in figure.axes[2].get_ylabel()
    words = words_of(figure)
    assert "NEO Figure 9 \u2014 SIMULATED and MEASURED on Tesla T4" in words
    assert "Predicted as: A10." in words and "KV pools of the paper" in words
    alone = draw_neo("NEO Figure 9", [record for record in rows if record["backend"] != "simulated"], tmp_path)
    assert titles_of(alone) == ["measured, T4 + Llama-2-7B (g4dn.4xlarge), OSC"]
    words = words_of(alone)
    assert "NEO Figure 9 \u2014 MEASURED on Tesla T4" in words and "SIMULATED" not in words


def test_neo_draws_a_measured_distribution(tmp_path):
    """Points keep full records when they are measured, summaries when they are simulated."""
    full = RequestRecord("r", 0.0, 5, 2, token_times_s=(1.0, 3.0), first_token_s=1.0, finish_s=3.0)
    drawn = {}
    for name, record in (("full", full), ("summary", summary_of(full))):
        path = records_file(tmp_path, name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(asdict(record)).encode()))
        figure = draw_neo("NEO Figure 7", [here("neo", request_rate=1.6, point=name, **NEO)], tmp_path)
        assert figure.axes[0].get_xlabel() == "per-token latency (s), measured"
        drawn[name] = list(figure.axes[0].get_lines()[0].get_xdata())
        plt.close(figure)
    assert drawn["full"] == drawn["summary"] and drawn["full"][0] == pytest.approx(1.5)


def test_tables_keep_settings_apart_and_show_predictions():
    rows = [row("swiftllm"), here("vllm"), here("swiftllm"), here("apex", predicted_output_tokens_per_s=6.25)]
    for record in rows:
        record |= {"goodput_requests_per_s": None, "per_token_latency_s_mean": 1.0}
        record |= {"failed": 0, "gpu_batch_busy_fraction": None, "cpu_busy_fraction": None}
    out = io.StringIO()
    print_results("Figure 5", rows, Console(file=out, width=140))
    simulated, measured = out.getvalue().split("MEASURED here (T4 + Llama-2-7B, Tesla T4)")
    assert "SIMULATED;" in simulated and "predicted" not in simulated
    assert "predicted: SIMULATED tok/s from this machine's profile" in measured
    (apex,) = [line.split() for line in measured.splitlines() if " apex " in line]
    assert apex[1:5] == ["apex", "5.0", "6.2", "1.00"]
    assert " vllm " in measured  # the server stands in the same table


def test_a_figure_says_where_a_card_holds_fewer_blocks_than_were_simulated():
    machine = {"backend": "simulated", "setting_title": "T4"}
    rows = [machine | {"num_gpu_blocks": 300, "max_gpu_blocks": most} for most in (200, 300, 400, None)]
    (note,) = pool_notes(rows)
    assert note.startswith("T4: the card itself holds at most 200 blocks")
    assert pool_notes(rows[1:]) == []


def test_the_table_has_each_systems_rate_over_the_baselines():
    out = io.StringIO()
    rows = [here("swiftllm", output_tokens_per_s=4.0), here("apex", output_tokens_per_s=10.0)]
    print_results("Figure 5", rows, Console(file=out, width=200))
    lines = [line.split() for line in out.getvalue().splitlines()]
    ratio = next(line for line in lines if "ratio" in line and "system" in line).index("ratio")
    found = {name: line[ratio] for line in lines for name in ("swiftllm", "apex") if name in line}
    assert found == {"swiftllm": "1.00", "apex": "2.50"}
