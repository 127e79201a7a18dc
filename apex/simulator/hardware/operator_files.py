"""Reads the measured operator times of a card: a folder of CSV files, in microseconds, each possibly with ``.gz``.

- ``dense.csv``: layer, tokens, time_us. One layer's linear and elementwise operators; embedding and last norm.
- ``attention.csv``: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us. A layer's attention of one prompt chunk
  after so many cached tokens, of decodes of so many context tokens each, or of both in one call.
- ``per_sequence.csv``: layer, sequences, time_us. Head and sampler over the rows that get a token.
- ``moe.csv``, of mixtures of experts: tokens, activated_experts, time_us. A layer's experts.
- ``skew.csv``, optional: regime (pure or mixed), n, alpha. What unequal contexts cost, see
  :class:`apex.perf.operator_tables.UnequalContexts`.
"""

from __future__ import annotations

import csv
import gzip
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from apex.perf.model import Curve, Surface
from apex.perf.operator_tables import TimeGrid, UnequalContexts

GEMMS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LAYER_NORM = "layernorm"
NORMS_PER_LAYER = 2
ELEMENTWISE = ("rotary_emb", "act_fn", "qk_norm")
TOKEN_ENDS = ("embedding", "final_layernorm")
ROW_ENDS = ("lm_head", "sampler")
US = 1e-6

Row = dict[str, str]


@dataclass(frozen=True)
class Operators:
    """Seconds of the operators of one model on one card.

    Of a layer: ``gemm`` and ``elementwise`` over tokens, ``experts`` over (tokens, activated experts); ``decode`` over
    (requests, context of each), ``prefill`` over (new tokens, tokens cached before), ``mixed`` over both pairs.
    Of an iteration: ``token_ends`` over tokens, ``row_ends`` over sampled rows.
    """

    gemm: Curve
    elementwise: Curve
    decode: Surface
    prefill: Surface
    mixed: TimeGrid | None
    token_ends: Curve
    row_ends: Curve
    unequal: UnequalContexts | None
    experts: TimeGrid | None


def read_operators(folder: Path) -> Operators:
    """Read a folder of operator times.

    Raises:
        ValueError: a file is missing or malformed; the message names the file and what it lacks.
    """
    dense = _by_layer(folder, "dense.csv", "tokens")
    ends = _by_layer(folder, "per_sequence.csv", "sequences")
    experts = _experts(folder)
    gemms = [name for name in GEMMS if name in dense] if experts is not None else list(GEMMS)
    elementwise = [name for name in ELEMENTWISE if name in dense]
    known = {*GEMMS, LAYER_NORM, *ELEMENTWISE, *TOKEN_ENDS}
    if unknown := set(dense) - known:
        raise ValueError(
            f"{folder / 'dense.csv'}: unknown layers {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}"
        )
    decode, prefill, mixed = _attention(folder)
    norms = [LAYER_NORM] * NORMS_PER_LAYER
    return Operators(
        _sum(folder / "dense.csv", dense, gemms),
        _sum(folder / "dense.csv", dense, [*norms, *elementwise]),
        decode,
        prefill,
        mixed,
        _sum(folder / "dense.csv", dense, TOKEN_ENDS),
        _sum(folder / "per_sequence.csv", ends, ROW_ENDS),
        _unequal(folder),
        experts,
    )


def table_file(folder: Path, name: str) -> Path | None:
    """A table of a folder, plain or compressed; None: there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_table(folder: Path, name: str, columns: Sequence[str]) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        ValueError: the file is missing, is no text, has no row, or lacks a column.
    """
    path = table_file(folder, name)
    if path is None:
        raise ValueError(f"{folder / name} is missing: it needs the columns {', '.join(columns)}")
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no row below its header")
    if missing := [column for column in columns if column not in rows[0]]:
        raise ValueError(f"{path} lacks the columns {', '.join(missing)}; it has {', '.join(map(str, rows[0]))}")
    return rows


def number(path: Path, line: int, row: Mapping[str, str], column: str, least: float = 0.0) -> float:
    """A finite number of a row.

    Raises:
        ValueError: it is none, or below ``least``; the message names file, line and column.
    """
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError):
        value = float("nan")
    if not isfinite(value) or value < least:
        found = row.get(column)
        raise ValueError(f"{path}, line {line}: {column}={found!r} must be a number from {least:g} on")
    return value


def _numbers(folder: Path, name: str, columns: Sequence[str], least: float = 0.0) -> list[list[float]]:
    rows = read_table(folder, name, columns)
    return [[number(folder / name, i, row, column, least) for column in columns] for i, row in enumerate(rows, 2)]


def _by_layer(folder: Path, name: str, size: str) -> dict[str, dict[float, float]]:
    """Seconds over sizes of each operator."""
    seconds: dict[str, dict[float, float]] = {}
    for line, row in enumerate(read_table(folder, name, ("layer", size, "time_us")), 2):
        path = folder / name
        seconds.setdefault(row["layer"], {})[number(path, line, row, size)] = number(path, line, row, "time_us") * US
    return seconds


def _sum(path: Path, by_layer: Mapping[str, Mapping[float, float]], names: Sequence[str]) -> Curve:
    if missing := [name for name in names if name not in by_layer]:
        raise ValueError(f"{path} lacks the layers {', '.join(missing)}")
    sizes = sorted(set.intersection(*(set(by_layer[name]) for name in names)))
    if len(sizes) < 2:
        raise ValueError(f"{path}: {', '.join(names)} have fewer than two sizes in common")
    return Curve(tuple(sizes), tuple(sum(by_layer[name][size] for name in names) for size in sizes))


def _attention(folder: Path) -> tuple[Surface, Surface, TimeGrid | None]:
    decode: dict[tuple[float, float], float] = {}
    prefill: dict[tuple[float, float], float] = {}
    mixed: dict[tuple[float, ...], float] = {}
    columns = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    for chunk, cached, decodes, context, us in _numbers(folder, "attention.csv", columns):
        if chunk and decodes:
            mixed[chunk, cached, decodes, context] = us * US
        elif chunk:
            prefill[chunk, cached] = us * US
        elif decodes:
            decode[decodes, context] = us * US
    path = folder / "attention.csv"
    alone = _surface(path, "decodes", decode), _surface(path, "prompt chunks", prefill)
    return *alone, TimeGrid.of(mixed) if mixed else None


def _surface(path: Path, what: str, seconds: Mapping[tuple[float, float], float]) -> Surface:
    curves: dict[float, dict[float, float]] = {}
    for (first, second), value in seconds.items():
        curves.setdefault(first, {})[second] = value
    if len(curves) < 2 or any(len(curve) < 2 for curve in curves.values()):
        raise ValueError(f"{path} needs at least two batch sizes of {what} alone, each with two contexts")
    firsts = sorted(curves)
    return Surface(
        tuple(firsts),
        tuple(Curve(tuple(sorted(curves[n])), tuple(curves[n][c] for c in sorted(curves[n]))) for n in firsts),
    )


def _experts(folder: Path) -> TimeGrid | None:
    if table_file(folder, "moe.csv") is None:
        return None
    rows = _numbers(folder, "moe.csv", ("tokens", "activated_experts", "time_us"))
    by_tokens: dict[float, int] = {}
    for tokens, _, _ in rows:
        by_tokens[tokens] = by_tokens.get(tokens, 0) + 1
    return TimeGrid(tuple((tokens, active, us * US) for tokens, active, us in rows if by_tokens[tokens] > 1))


def _unequal(folder: Path) -> UnequalContexts | None:
    """Medians over the measured rows, by the number of decodes."""
    if table_file(folder, "skew.csv") is None:
        return None
    shares: dict[str, dict[int, list[float]]] = {"pure": {}, "mixed": {}}
    for line, row in enumerate(read_table(folder, "skew.csv", ("regime", "n", "alpha")), 2):
        if row["regime"] not in shares:
            raise ValueError(f"{folder / 'skew.csv'}, line {line}: regime {row['regime']!r} is neither pure nor mixed")
        if row["alpha"]:  # without a value where mean and longest take the same time
            decodes = int(number(folder / "skew.csv", line, row, "n", 1))
            shares[row["regime"]].setdefault(decodes, []).append(
                number(folder / "skew.csv", line, row, "alpha", float("-inf"))
            )
    if not all(shares.values()):
        raise ValueError(f"{folder / 'skew.csv'} needs rows of both regimes, pure and mixed")
    medians = ({n: statistics.median(values) for n, values in by_n.items()} for by_n in shares.values())
    return UnequalContexts(*medians)
