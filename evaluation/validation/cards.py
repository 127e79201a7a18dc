"""How well the linear layers of a card that nobody measured are predicted: each measured card left out in turn.

`python -m evaluation.validation.cards` fits the formula of `gemm_share` (apex/simulator/hardware_files.py) to all cards
but one, predicts that one's GEMMs, and prints the errors card by card. It needs the files of `configs/hardware` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from statistics import fmean, median

import numpy as np

from apex.cli.output import stdout_console, table
from apex.perf.model import Curve
from apex.simulator.hardware_files import (
    HARDWARE_DIR,
    POWER_FIGURES,
    Figure,
    Gpu,
    LayerShape,
    gemm_share,
    known_hardware,
    load_gpu,
    read_measured_layer,
)
from apex.simulator.predicted_profile import gemm_s

ITEMSIZE = 2
SIZES = (1, 2, 4, *range(8, 1025, 8), *range(1040, 2049, 16), *range(2080, 4097, 32))
"""Batch sizes of the error, as dense as those that were measured; of coarse tables only their own."""
COARSE = 20
LARGE_TOKENS = 512
MOST = 0.97  # shares above it are noise of the clock: the formula has no inverse for them


@dataclass(frozen=True)
class CardTable:
    """The GEMMs of one layer on a card: seconds over tokens."""

    card: str
    model: str
    shape: LayerShape
    gemm: Curve

    @property
    def sizes(self) -> np.ndarray:
        sizes = self.gemm.sizes
        return np.array(sizes if len(sizes) <= COARSE else [n for n in SIZES if n <= sizes[-1]])

    @property
    def seconds(self) -> np.ndarray:
        return np.array([self.gemm(n) for n in self.sizes])


@dataclass(frozen=True)
class CardError:
    """Relative errors of the GEMMs of a card that the fit has not seen; ``large``: the bias above 512 tokens."""

    table: CardTable
    median: float
    large: float
    share: float


@dataclass(frozen=True)
class PowerFit:
    """The coefficients of the formula: of cards without and with stacked memory, and of reading weights."""

    factor: float
    hbm_factor: float
    read_fraction: float

    def card(self, gpu: Gpu) -> Gpu:
        """The card with the fitted formula's shares in place of its own."""
        factor = self.factor * (self.hbm_factor if "has_hbm" in gpu.figures else 1.0)
        share = gemm_share(factor, gpu["board_watts"], gpu["tensor_tflops"], gpu["process_nm"])
        return with_shares(gpu, self.read_fraction, share)


def card_tables() -> list[CardTable]:
    """Every measured layer in ``configs/hardware`` of a card whose power is known."""
    tables = []
    for name in known_hardware("gpu"):
        gpu = load_gpu(name)
        if not set(POWER_FIGURES) <= set(gpu.figures):
            continue
        tables += [CardTable(name, model, m.shape, m.times.gemm) for model, m in gpu.operators.items()]
        for path in sorted((HARDWARE_DIR / "measured").rglob(f"{name}_*.yaml")):
            layer = read_measured_layer(path)
            tables.append(CardTable(name, layer.model, layer.shape, layer.gemm))
    return tables


def own_share(table: CardTable, read_fraction: float) -> float:
    """The share of FLOPS with which the formula's median error of a table is least."""
    gpu = load_gpu(table.card)
    read_s, multiply_s = (predicted(with_shares(gpu, *shares), table) for shares in ((read_fraction, inf), (inf, 1.0)))

    seconds = table.seconds

    def error(share: float) -> float:
        return float(np.median(np.abs(np.hypot(read_s, multiply_s / share) / seconds - 1)))

    return min((0.005 * i for i in range(50, 210)), key=error)


def with_shares(gpu: Gpu, read_fraction: float, gemm_fraction: float) -> Gpu:
    """The card without its tables, with other shares of its data sheet."""
    values = {"weight_read_fraction": read_fraction, "gemm_fraction": gemm_fraction}
    figures = {name: Figure(value, "1", "fitted", "assumed") for name, value in values.items()}
    return replace(gpu, figures={**gpu.figures, **figures}, layers=(), operators={}, from_power=True)


def predicted(gpu: Gpu, table: CardTable) -> np.ndarray:
    return np.array([gemm_s(gpu, table.shape.gemm_weights, ITEMSIZE, n) for n in table.sizes])


def fit(tables: Sequence[CardTable]) -> PowerFit:
    """The formula fitted to tables; a card counts once, however many tables it has."""
    cards = list(dict.fromkeys(table.card for table in tables))
    of_card = {card: [table for table in tables if table.card == card] for card in cards}
    reads = [fmean(_read_fraction(table) for table in of_card[card]) for card in cards]
    read_fraction = median(reads)
    terms, logs = [], []
    for card in cards:
        gpu = load_gpu(card)
        share = min(MOST, fmean(own_share(table, read_fraction) for table in of_card[card]))
        power = gpu["board_watts"] / (gpu["tensor_tflops"] * gpu["process_nm"])
        terms.append([1.0, float("has_hbm" in gpu.figures)])
        logs.append(log(-log(1.0 - share) / power))
    factor, hbm_factor = np.linalg.lstsq(np.array(terms), np.array(logs), rcond=None)[0]
    return PowerFit(exp(factor), exp(hbm_factor), read_fraction)


def _read_fraction(table: CardTable) -> float:
    bytes_per_s = ITEMSIZE * table.shape.gemm_weights / table.gemm(1)
    return bytes_per_s / (load_gpu(table.card)["memory_bandwidth_gb_s"] * 1e9)


def leave_one_out(tables: Sequence[CardTable]) -> Iterator[CardError]:
    for left_out in tables:
        card = fit([other for other in tables if other.card != left_out.card]).card(load_gpu(left_out.card))
        off = predicted(card, left_out) / left_out.seconds - 1
        large = off[left_out.sizes > LARGE_TOKENS]
        yield CardError(left_out, float(np.median(np.abs(off))), float(np.median(large)), card["gemm_fraction"])


def main() -> int:
    console, tables = stdout_console(), card_tables()
    errors = list(leave_one_out(tables))
    rows = [
        (e.table.card, e.table.model, str(len(e.table.sizes)), f"{e.median:.1%}", f"{e.large:+.1%}", f"{e.share:.2f}")
        for e in errors
    ]
    titles = ("card", "model", "sizes", "median error", "above 512 tokens", "share of FLOPS")
    console.print("Linear layers of a card that the fit has not seen", highlight=False)
    console.print(table(titles, rows, left=("card", "model")))
    medians = [error.median for error in errors]
    console.print(f"median {median(medians):.1%}, worst {max(medians):.1%}", highlight=False)
    fitted = fit(tables)
    console.print(
        f"fitted to all cards: gemm_power_factor {fitted.factor:.3g}, gemm_power_hbm_factor {fitted.hbm_factor:.3g}, "
        f"gemm_power_read_fraction {fitted.read_fraction:.3g}",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
