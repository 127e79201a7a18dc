"""Cards that nobody measured: the formula from board power, and each measured card left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from apex.perf.model import Curve
from apex.simulator.hardware_files import (
    ASSUMPTIONS_FILE,
    HARDWARE_DIR,
    POWER_ERRORS,
    LayerShape,
    load_gpu,
    load_model_config,
    read_figures,
)
from apex.simulator.predicted_profile import gemm_s, how_known, linear_curve, sheet_linear_s
from evaluation.validation.cards import SIZES, CardTable, card_tables, fit, leave_one_out, own_share

LLAMA = LayerShape(4096, 14336, 32, 8, 128)


def power_card(folder: Path) -> Path:
    """An A10's data sheet with its board power, and without its tables."""
    text = (HARDWARE_DIR / "a10.yaml").read_text().split("measured_layers")[0]
    kept = [line for line in text.splitlines() if "_fraction" not in line]
    path = folder / "card.yaml"
    path.write_text("\n".join(kept) + "\n")
    return path


def test_every_card_left_out_is_predicted_within_the_limits() -> None:
    """The aims: half of the tables within 6%, the worst within 12%."""
    errors = list(leave_one_out(card_tables()))
    assert len({error.table.card for error in errors}) == 9
    medians = [error.median for error in errors]
    assert median(medians) <= 0.06
    assert max(medians) <= 0.12
    assert f"{median(medians):.1%}, of the worst card {max(medians):.1%}" in POWER_ERRORS


def test_the_figures_are_those_fitted_to_all_cards() -> None:
    fitted, figures = fit(card_tables()), read_figures(ASSUMPTIONS_FILE)
    assert figures["gemm_power_factor"].value == pytest.approx(fitted.factor, rel=2e-3)
    assert figures["gemm_power_hbm_factor"].value == pytest.approx(fitted.hbm_factor, rel=4e-3)
    assert figures["gemm_power_read_fraction"].value == pytest.approx(fitted.read_fraction, rel=2e-3)


def test_a_card_left_out_is_not_in_its_own_fit() -> None:
    """A card three times as slow is predicted as before, and the others' errors change."""
    tables = card_tables()
    slow = [replace(table, gemm=table.gemm.times(3.0)) if table.card == "a40" else table for table in tables]
    before, after = ({e.table.card: e.share for e in leave_one_out(list(t))} for t in (tables, slow))
    assert after["a40"] == pytest.approx(before["a40"])
    assert after["a10"] != pytest.approx(before["a10"], rel=0.01)


def test_a_card_with_its_power_and_no_table_is_predicted_from_it(tmp_path: Path) -> None:
    card, a10 = load_gpu(power_card(tmp_path)), load_gpu("a10")
    assert card.from_power and not a10.from_power
    assert card["gemm_fraction"] == pytest.approx(a10["gemm_fraction"], rel=0.06)
    llama = load_model_config("llama-3.1-8b")
    assert POWER_ERRORS in how_known(card, llama)
    assert how_known(a10, llama).startswith("linear layers measured (Meta-Llama-3-8B)")
    assert how_known(load_gpu("rtx-4090"), llama) == "measured tables of the card's operators with this model"
    assert how_known(load_gpu("h200"), llama).startswith("its data sheet, and assumed shares of it")


def test_large_gemms_compute_whole_tiles(tmp_path: Path) -> None:
    card = load_gpu(power_card(tmp_path))
    curve = linear_curve(card, LLAMA, 2, 2048)
    assert curve(129) == pytest.approx(sheet_linear_s(card, LLAMA, 2, 129))
    assert curve(130) / curve(256) > 0.97
    assert curve(128) / curve(129) < 0.8


def test_own_shares_of_a_table_are_found() -> None:
    card = replace(load_gpu("a40"), layers=(), from_power=True)
    gemm = Curve(SIZES, tuple(gemm_s(card, LLAMA.gemm_weights, 2, n) for n in SIZES))
    share = own_share(CardTable("a40", "made", LLAMA, gemm), card["weight_read_fraction"])
    assert share == pytest.approx(card["gemm_fraction"], abs=0.005)
