"""Fits of compact curves, and their reported errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from apex.simulator.hardware_files import HARDWARE_DIR, load_gpu, read_measured_layer
from evaluation.calibrate import Options, main
from evaluation.validation.calibration import (
    ATTENTION_TABLES,
    ELEMENTWISE,
    GEMMS,
    LAYER_TABLES,
    attention_errors,
    compact_curve,
    fit_terms,
    held_out,
    layer_errors,
    read_layer_tables,
    transfer_errors,
    write_curves,
)

TABLES = Path(os.environ.get("APEX_CALIBRATION_TABLES", "no tables"))
needs_tables = pytest.mark.skipif(
    not TABLES.is_dir(), reason="set APEX_CALIBRATION_TABLES to the folder of the measured tables (docs/simulator.md)"
)


def staircase(tokens: float) -> float:
    """Steps of 128 sizes, each with a small slope."""
    return 1.0 + (tokens - 1) // 128 + tokens / 10_000


# -- fits -------------------------------------------------------------------------------------------------------------


def test_a_compact_curve_keeps_steps() -> None:
    sizes = [1, *range(8, 513, 8)]
    curve = compact_curve(sizes, [staircase(n) for n in sizes], 8)
    assert len(curve.sizes) == 8
    for n in sizes:
        assert curve(n) == pytest.approx(staircase(n), rel=1e-9)


def test_a_compact_curve_of_too_few_points_is_the_best_of_them() -> None:
    sizes, seconds = [1, 2, 3, 4, 5], [1.0, 1.0, 1.0, 2.0, 3.0]
    assert compact_curve(sizes, seconds, 3).sizes == (1, 3, 5)
    assert compact_curve(sizes, seconds, 9).sizes == (1, 2, 3, 4, 5)


def test_a_compact_curve_ascends_through_noise() -> None:
    rng = np.random.default_rng(0)
    sizes = np.arange(1, 200)
    curve = compact_curve(sizes, sizes * rng.uniform(0.9, 1.1, len(sizes)), 12)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert np.median([abs(curve(n) / n - 1) for n in sizes]) < 0.06


def test_terms_are_recovered_despite_outliers() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.uniform(1, 100, 300), rng.uniform(1, 50, 300)
    seconds = 5 + 2 * x + 0.1 * x * y
    seconds[::20] *= 1.5
    assert fit_terms([np.ones(300), x, x * y], seconds) == pytest.approx([5, 2, 0.1], rel=0.01)


def test_a_third_is_held_out_and_the_first_row_never() -> None:
    assert held_out(9).tolist() == [False, False, True] * 3


# -- the command ------------------------------------------------------------------------------------------------------


def write_tables(folder: Path, noise: float = 0.0) -> None:
    """Invented measurements in the format of the tables."""
    rng = np.random.default_rng(2)
    for gpu, model in LAYER_TABLES:
        lines = ["op,num_tokens,time_ms"]
        for op in (*GEMMS, *ELEMENTWISE, "emb"):
            lines += [f"{op},{n},{staircase(n) * (1 + noise * rng.normal())}" for n in (1, *range(8, 1025, 8))]
        (folder / f"mlp_{gpu}_{model}_tp1.csv").write_text("\n".join(lines))
    for file, _ in ATTENTION_TABLES.values():
        lines = ["op,batch_size,num_tokens,context_tokens,time_ms"]
        for n in (1, 2, 4, 8, 16, 32):
            lines += [f"attn_decode,{n},1,{c},{0.01 + n * 0.001 + n * c * 1e-5}" for c in (32, 256, 1024)]
            lines += [f"attn_prefill,1,{64 * n},{c},{0.01 + n * (c + 64 * n) * 1e-5}" for c in (0, 256, 1024)]
        (folder / file).write_text("\n".join(lines))


def test_the_command_writes_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tables(tmp_path)
    assert main(Options(tables=tmp_path, results_dir=tmp_path / "results")) == 0
    records = json.loads((tmp_path / "results" / "calibration" / "latest" / "summary.json").read_text())
    assert {record["gpu"] for record in records} == {"t4", "a10", "a30", "a40", "a100", "h100"}
    for record in records:
        if record["method"] == "held-out third":  # 32 points suffice for eight exact steps; formulas fit themselves
            assert record["median_error"] < 0.02, record
    assert "| t4 | Llama-2-7b-hf | layer | held-out third |" in capsys.readouterr().out


def test_errors_are_those_of_rows_not_fitted(tmp_path: Path) -> None:
    write_tables(tmp_path)
    (table, *_) = read_layer_tables(tmp_path)
    test = held_out(len(table.tokens))
    for op in GEMMS:
        table.ops[op][test] *= 2
    records = {record["op"]: record for record in layer_errors(table)}
    assert records["mlp_up_proj"]["median_error"] == pytest.approx(0.5, abs=0.01)
    assert records["elementwise operations"]["median_error"] < 0.02
    assert records["mlp_up_proj"]["num_rows"] == test.sum()


def test_the_table_counts_the_residual_addition_twice(tmp_path: Path) -> None:
    write_tables(tmp_path)
    (table, *_) = read_layer_tables(tmp_path)
    assert table.elementwise[0] == pytest.approx(6 * staircase(1) * 1e-3)
    assert table.gemm[0] == pytest.approx(4 * staircase(1) * 1e-3)


def test_missing_tables_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Options(tables=tmp_path / "nowhere", results_dir=tmp_path)) == 1
    assert "nowhere" in (message := capsys.readouterr().err) and "--tables" in message


# -- the real tables --------------------------------------------------------------------------------------------------


@needs_tables
def test_linear_layers_are_predicted_within_five_percent() -> None:
    for table in read_layer_tables(TABLES):
        for record in layer_errors(table):
            assert record["median_error"] <= 0.05, record


@needs_tables
def test_the_same_cards_other_model_predicts_within_five_percent() -> None:
    records = [r for r in transfer_errors(read_layer_tables(TABLES)) if r["method"].startswith("scaled")]
    assert len(records) == 2
    assert max(r["median_error"] for r in records) <= 0.05


@needs_tables
def test_the_shipped_curves_are_the_fit_to_all_rows(tmp_path: Path) -> None:
    write_curves(read_layer_tables(TABLES), tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted(path.name for path in (HARDWARE_DIR / "measured").iterdir())
    for name in files:
        assert read_measured_layer(tmp_path / name) == read_measured_layer(HARDWARE_DIR / "measured" / name)


@needs_tables
def test_the_shipped_attention_figures_are_the_fit_to_all_rows() -> None:
    _, fitted = attention_errors(TABLES)
    for gpu, figures in fitted.items():
        for name, value in figures.items():
            assert load_gpu(gpu)[name] == pytest.approx(value, rel=0.01), (gpu, name)
