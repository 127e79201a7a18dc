"""What a study declares: which places run, ratios between rows, tables without empty columns, figures."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from evaluation.grid import FIELDS, Place, simulate, simulated_point
from evaluation.options import StudyOptions, assignments
from evaluation.plots.figure import Axis, Figure
from evaluation.run import Run
from evaluation.study import Ratio, Study, Table, with_ratios

SECTION = {
    "system": ["swiftllm", "neo", "adaptive"],
    "kernel": "own",
    "quick": {"num_requests": 3},
    "panels": [{"setting": "neo-t4", "workload": "osc", "num_requests": 9, "output_len": [50, 200], "seed": 0}],
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(SECTION))
    return path


def point(place: Place) -> Any:
    return simulated_point([f"out{place['output_len']}"], simulate(place))


def keys(config: Path, study: Study | None = None, **options: Any) -> list[str]:
    return [made.key for made in (study or Study("x", point=point)).points_of(StudyOptions(config=config, **options))]


def test_options_choose_places_and_set_their_fields(config: Path) -> None:
    assert keys(config) == [f"out{n}-{s}" for n in (50, 200) for s in ("swiftllm", "neo", "adaptive")]
    assert keys(config, only=("output_len=200", "system=neo,adaptive")) == ["out200-neo", "out200-adaptive"]
    assert keys(config, set=("system=apex", "output_len=100")) == ["out100-apex"]
    (made,) = Study("x", point=point).points_of(
        StudyOptions(config=config, quick=True, set=("system=neo", "kernel=native", "output_len=50"))
    )
    assert made.task.lengths.spec.num_requests == 3 and made.task.hardware.table.identity["cpu_kernel"] == "native"


def test_a_study_may_leave_places_out_and_say_which_are_refused(config: Path, capsys) -> None:
    def not_200(place: Place) -> Any:
        if place["output_len"] == 200:
            raise ValueError("too long")
        return point(place)

    study = Study("x", point=not_200, is_place=lambda place: place["system"] == "neo", refused=lambda place: "200 out")
    assert keys(config, study) == ["out50-neo"]
    assert capsys.readouterr().out == "not possible: 200 out: too long\n"
    with pytest.raises(ValueError, match="too long"):
        keys(config, Study("x", point=not_200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"set": ("kernels=ispc",)}, "--set: a place has no kernels; it may have .*kernel"),
        ({"set": ("system=neon",)}, "unknown system 'neon'"),
        ({"only": ("output_len=51",)}, "--only: no output_len 51; there are 50, 200"),
        ({"only": ("neo",)}, "--only neo: write it as FIELD=VALUE"),
    ],
)
def test_what_is_unknown_is_refused_with_what_there_is(config: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keys(config, **options)


def test_values_of_options_are_numbers_and_words() -> None:
    given = assignments("--set", ("a=1,2.5,x", "b=true", "c=none", "d=off"))
    assert given == {"a": [1, 2.5, "x"], "b": [True], "c": [None], "d": ["off"]}


def test_a_section_is_a_part_of_a_file_that_another_study_has_too(config: Path) -> None:
    config.write_text(yaml.safe_dump({"first": SECTION, "second": {"case": 1}}))
    study = Study("z", file="x", section=lambda settings: settings["first"], fields=FIELDS, point=point)
    assert len(keys(config, study)) == 6


ROWS = [
    {"system": system, "out": out, "tier": tier, "output_tokens_per_s": rate, "empty": None}
    for out, system, tier, rate in (
        (50, "swiftllm", None, 10.0), (50, "neo", "auto", 15.0), (50, "neo", "int8", 30.0), (200, "neo", "auto", 5.0)
    )
]  # fmt: skip


def test_a_ratio_is_to_the_row_that_is_equal_in_some_fields_and_none_where_there_is_none() -> None:
    ratios = {
        "over_gpu_only": Ratio(lambda row: row["system"] == "swiftllm", ["out"]),
        "over_exact": Ratio(lambda row: row["tier"] == "auto", ["out", "system", "not_there"]),
    }
    found = [(row["over_gpu_only"], row["over_exact"]) for row in with_ratios(ROWS, ratios)]
    assert found == [(1.0, None), (1.5, 1.0), (3.0, 2.0), (None, 1.0)]


def test_a_table_has_a_part_for_each_group_and_no_empty_columns() -> None:
    console = Console(file=io.StringIO(), width=60)
    columns = (("system", "system", "s"), ("tok/s", "output_tokens_per_s", ".1f"), ("nothing", "empty", "d"))
    Table(columns, lambda rows: f"{len(rows)} rows", by=["out"], lines=lambda rows: rows[::-1])(ROWS, console)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines == [
        ["4", "rows"], ["50"], ["system", "tok/s"], ["neo", "30.0"], ["neo", "15.0"], ["swiftllm", "10.0"],
        ["200"], ["system", "tok/s"], ["neo", "5.0"],
    ]  # fmt: skip


def drawn(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    from evaluation.plots import charts
    from evaluation.plots.style import FigureText

    monkeypatch.setattr(charts, "figure_text", lambda *_, first_note: FigureText("T", "", first_note))
    fields = {
        "x": "out", "x_label": "output", "y": [Axis("output_tokens_per_s", "tok/s")], "panel": ["tier"],
        "is_drawn": lambda row: row["tier"] is not None, "notes": "a note", **changes,
    }  # fmt: skip
    return charts.draw(Figure("T", **fields), Run(Path(), "x", ROWS, {}))


def test_lines_have_a_panel_for_each_axis_and_group(monkeypatch) -> None:
    log = Axis("output_tokens_per_s", "log tok/s", log=True)
    figure = drawn(monkeypatch, kind="lines", y=[Axis("output_tokens_per_s", "tok/s"), log])
    shown = [(ax.get_title("left"), ax.get_yscale(), ax.lines[0].get_xydata().tolist()) for ax in figure.axes]
    exact, int8 = [[50, 15], [200, 5]], [[50, 30]]
    assert shown == [("auto", "linear", exact), ("int8", "linear", int8), ("auto", "log", exact), ("int8", "log", int8)]
    assert "a note" in [text.get_text() for text in figure.texts]


def test_bars_have_a_place_for_each_series_also_without_a_result(monkeypatch) -> None:
    figure = drawn(
        monkeypatch, kind="bars", panel=["system"], series=["tier"], look_of=lambda row: {"text": f"{row['tier']}!"}
    )
    (ax,) = figure.axes
    assert [bar.get_height() for bar in ax.patches] == [15, 30, 5]
    assert [text.get_text() for text in ax.texts] == ["auto!", "int8!", "auto!", "no result"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["50", "200"]
    with pytest.raises(ValueError, match="nothing to draw"):
        drawn(monkeypatch, kind="bars", is_drawn=lambda row: False)
