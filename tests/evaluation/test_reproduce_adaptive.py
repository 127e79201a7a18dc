"""The comparison of `adaptive` from the command to the files, on tiny cases."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from evaluation.options import experiment_settings
from evaluation.studies.adaptive import Options, main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The experiment file with few requests, two systems, two cells, one case under load, two errors."""
    settings = experiment_settings("adaptive") | {"system": ["swiftllm", "neo", "adaptive"]}
    for section in ("cases", "map"):
        settings[section]["quick"] = {"num_requests": 20}
    settings["map"] |= {"host_read_gb_s": [12, 120], "outputs": settings["map"]["outputs"][:1], "kernel": ["own"]}
    settings["latency"] |= {"case": ["t4-osc-50"], "load": [0.5], "system": ["neo", "adaptive"]}
    settings["wrong_tables"]["error"] = settings["wrong_tables"]["error"][:2]
    path = tmp_path / "adaptive.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def rows_of(results: Path, name: str) -> list[dict[str, Any]]:
    return json.loads((results / name / "latest" / "summary.json").read_text())


def run(config: Path, **options: Any) -> int:
    return main(Options(quick=True, jobs=1, config=config, results_dir=config.parent, **options))


def test_a_row_for_each_case_and_system_and_a_figure_that_can_be_drawn_again(config, capsys) -> None:
    cases = ("a10-20gbps-u1000-100", "t4-osc-50")
    assert run(config, only=(f"case={','.join(cases)}",)) == 0
    rows = rows_of(config.parent, "adaptive")
    assert [(row["case"], row["system"]) for row in rows] == [
        (case, system) for case in cases for system in ("swiftllm", "neo", "adaptive")
    ]
    for row in rows:
        assert row["backend"] == "simulated" and row["failed"] == 0 and 0 < row["fraction_of_bound"] < 1
    best = max(row["output_tokens_per_s"] for row in rows[:2])
    assert rows[2]["ratio_to_best_published"] == rows[2]["output_tokens_per_s"] / best
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed
    folder = config.parent / "elsewhere"
    shutil.copytree(config.parent / "adaptive" / "latest", folder)
    drawn = (folder / "figure.png").read_bytes()
    (folder / "figure.png").unlink()
    assert main(Options(from_folder=folder)) == 0
    assert (folder / "figure.png").read_bytes() == drawn
    table = printed[printed.index("SIMULATED; over best") : printed.index("figure:")]
    assert table in capsys.readouterr().out


def test_the_map_has_its_cells_and_its_figure(config, capsys) -> None:
    assert run(config, part=("map",)) == 0
    rows = [row for row in rows_of(config.parent, "adaptive-map") if row["system"] == "adaptive"]
    assert [(row["kernel"], row["host_read_gb_s"], row["output_len"]) for row in rows] == [
        ("own", 12, 25),
        ("own", 120, 25),
    ]
    assert all(row["ratio_to_best_published"] > 0 and row["seed"] == 1 for row in rows)
    assert "2 cells" in capsys.readouterr().out
    assert (config.parent / "adaptive-map" / "latest" / "figure.png").is_file()


def test_load_comes_from_what_neo_serves_at_once(config, capsys) -> None:
    assert run(config, part=("latency",)) == 0
    (at_once,) = rows_of(config.parent, "adaptive-capacity")
    neo, adaptive = rows_of(config.parent, "adaptive-latency")
    served = at_once["output_tokens_per_s"] / at_once["output_len_mean"]
    assert neo["request_rate"] == adaptive["request_rate"] == pytest.approx(0.5 * served)
    ratio = adaptive["per_token_latency_s_mean"] / neo["per_token_latency_s_mean"]
    assert adaptive["latency_over_neo"] == ratio and neo["latency_over_neo"] == 1.0
    assert f"{ratio:.3f}" in capsys.readouterr().out
    assert (config.parent / "adaptive-latency" / "latest" / "figure.png").is_file()


def test_a_wrong_table_has_rows_of_its_own(config, capsys) -> None:
    assert run(config, part=("wrong-tables",), only=("case=t4-osc-50",)) == 0
    rows = rows_of(config.parent, "adaptive-wrong-tables")
    assert [(row["system"], row["actual_over_believed"]) for row in rows] == [
        ("swiftllm", None), ("neo", 1.0), ("neo", 0.8), ("adaptive", 1.0), ("adaptive", 0.8)
    ]  # fmt: skip
    assert "actual / believed" in capsys.readouterr().out


def test_checks_have_rows_and_say_what_is_not_held(config, capsys) -> None:
    assert run(config, part=("checks",), only=("case=a10-u300-300-40",)) == 0
    *published, row = rows_of(config.parent, "adaptive-checks")
    assert [other["system"] for other in published] == ["swiftllm", "neo"] and row["system"] == "adaptive"
    assert row["holds"] is (row["ratio_to_best_published"] >= row["least_over_best"])
    assert f"not held: {'none' if row['holds'] else row['case']}" in capsys.readouterr().out


def test_what_cannot_be_run_is_refused(config, tmp_path, capsys) -> None:
    for options, message in (
        ({"only": ("case=nothing",)}, "no case nothing"),
        ({"part": ("latency",), "set": ("system=neon",)}, "unknown system 'neon'"),
        ({"part": ("map",), "only": ("case=t4-osc-50",)}, "no case t4-osc-50"),
    ):
        assert run(config, **options) == 2
        assert message in capsys.readouterr().out
    assert not (tmp_path / "adaptive-capacity").exists()
    assert main(Options(from_folder=tmp_path)) == 2
    assert "no results in" in capsys.readouterr().out
