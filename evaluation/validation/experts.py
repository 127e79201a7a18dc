"""Fits the time of an FFN of experts to measured rows, and tells the error on rows left out.

``python -m evaluation.validation.experts`` prints both for ``moe.csv`` of the run of Qwen3-30B-A3B (vLLM 0.19,
bfloat16, on an RTX PRO 6000; configs/groundtruth/ORIGIN.txt). Rows with 8 experts came from its L2 cache: left out.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apex.perf.model import ExpertTimes
from apex.source_tree import configs_folder

HIDDEN, FFN, PER_TOKEN, ITEMSIZE = 2048, 768, 8, 2  # Qwen3-30B-A3B in bfloat16
ELEMENTS = 3 * HIDDEN * FFN  # of an expert
FITTED, LEFT_OUT = (16, 128), (32, 64)
MOST_FIXED_US = 100


@dataclass(frozen=True)
class ExpertsRow:
    tokens: int
    touched: int
    seconds: float


def read_rows(path: Path, touched: Sequence[int]) -> list[ExpertsRow]:
    """The rows of a moe.csv with these numbers of experts."""
    with path.open(encoding="utf-8") as file:
        rows = [
            ExpertsRow(int(row["tokens"]), int(row["activated_experts"]), float(row["time_us"]) * 1e-6)
            for row in csv.DictReader(file)
        ]
    return [row for row in rows if row.touched in touched]


def predicted_s(times: ExpertTimes, row: ExpertsRow) -> float:
    return times.seconds(row.touched, ELEMENTS * ITEMSIZE, row.tokens * PER_TOKEN, ELEMENTS)


def fit(rows: Sequence[ExpertsRow]) -> ExpertTimes:
    """Least squares of relative errors. For each fixed time the squares are linear in the other two constants."""
    candidates = [_with_fixed(rows, microseconds * 1e-6) for microseconds in range(MOST_FIXED_US)]
    return min(
        (times for times in candidates if times is not None),
        key=lambda times: sum((predicted_s(times, row) / row.seconds - 1) ** 2 for row in rows),
    )


def _with_fixed(rows: Sequence[ExpertsRow], fixed_s: float) -> ExpertTimes | None:
    """From (t - fixed)^2 = (bytes / B)^2 + (operations / F)^2, each row over t^2."""
    a11 = a12 = a22 = b1 = b2 = 0.0
    for row in rows:
        read = (row.touched * ELEMENTS * ITEMSIZE / row.seconds) ** 2
        multiply = (2 * row.tokens * PER_TOKEN * ELEMENTS / row.seconds) ** 2
        wanted = ((row.seconds - fixed_s) / row.seconds) ** 2
        a11, a12, a22 = a11 + read * read, a12 + read * multiply, a22 + multiply * multiply
        b1, b2 = b1 + read * wanted, b2 + multiply * wanted
    determinant = a11 * a22 - a12 * a12
    squares = (b1 * a22 - b2 * a12) / determinant, (a11 * b2 - a12 * b1) / determinant
    return None if min(squares) <= 0 else ExpertTimes(fixed_s, squares[0] ** -0.5, squares[1] ** -0.5)


def errors(times: ExpertTimes, rows: Sequence[ExpertsRow]) -> list[float]:
    return [abs(predicted_s(times, row) / row.seconds - 1) for row in rows]


def main() -> None:
    path = configs_folder("groundtruth") / "rtxpro6000-qwen3-30b-a3b" / "moe.csv"
    times = fit(read_rows(path, FITTED))
    found = errors(times, read_rows(path, LEFT_OUT))
    print(
        f"fitted on {' and '.join(map(str, FITTED))} experts: {times.fixed_s * 1e6:.0f} us, "
        f"{times.read_bytes_per_s / 1e9:.0f} GB/s, {times.flops_per_s / 1e12:.0f} TFLOP/s"
    )
    print(
        f"on {' and '.join(map(str, LEFT_OUT))} experts: median error {statistics.median(found):.1%}, "
        f"worst {max(found):.1%} of {len(found)}"
    )


if __name__ == "__main__":
    main()
