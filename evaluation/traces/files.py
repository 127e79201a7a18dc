"""Trace files: request lengths and arrivals as CSV, each with a JSON file of its provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from swiftllm.core.request import ServiceClass
from swiftllm.files import write_atomically

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
PREFIX_COLUMN, PREFIX_TOKENS = "prefix_ids", 512
"""A further column of some traces: ids of the prompt's blocks of so many tokens. Prompts share equal ones at the start.
"""
Segments = tuple[tuple[int, int], ...]
"""A prompt as its parts: a token id, and how many tokens have it."""


@dataclass(frozen=True)
class TraceRow:
    """Lengths in tokens; ``arrival_s`` is seconds from the first row, None if the source has no arrivals."""

    input_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    segments: Segments = ()
    """What the prompt shares with others; by default nothing. Ids stand for texts."""
    after: int | None = None
    """Place of the row that must have ended before; ``arrival_s`` is then seconds from its end."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of a prompt that has segments, cut to its length."""
        return tuple(chain.from_iterable(repeat(token, count) for token, count in self.segments))[: self.input_tokens]


def read_rows(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace file with the columns arrival_s (may be blank), input_tokens, output_tokens, maybe prefix_ids.

    Raises:
        ValueError: a column is missing, a length is below 1, or there are no rows; the message names the file.
    """
    with path.open() as lines:
        columns = next(lines, "").strip().split(",")
        try:
            arrival, given, out = (columns.index(name) for name in COLUMNS)
        except ValueError:
            raise ValueError(f"{path}: needs columns {','.join(COLUMNS)}, has {columns}") from None
        prefixes = columns.index(PREFIX_COLUMN) if PREFIX_COLUMN in columns else None
        rows = []
        for number, line in enumerate(lines, start=2):
            cells = line.rstrip("\n").split(",")
            if len(cells) < len(columns):
                raise ValueError(f"{path}:{number}: {len(cells)} cells where the header has {len(columns)}")
            ids = () if prefixes is None else map(int, cells[prefixes].split())
            segments = tuple((1 + block, PREFIX_TOKENS) for block in ids)  # 0 is the token of simulated outputs
            arrived = float(cells[arrival]) if cells[arrival] else None
            row = TraceRow(int(cells[given]), int(cells[out]), arrived, segments=segments)
            if row.input_tokens < 1 or row.output_tokens < 1:
                raise ValueError(f"{path}:{number}: lengths must be at least 1 token")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return tuple(rows)


def write_rows(path: Path, rows: Iterable[TraceRow], provenance: Mapping[str, Any]) -> None:
    """Write a trace file and its provenance. The provenance has the suffix .json and is written first."""
    rows = list(rows)
    has_prefixes = any(row.segments for row in rows)
    lines = [",".join((*COLUMNS, PREFIX_COLUMN) if has_prefixes else COLUMNS)]
    for row in rows:
        arrival = "" if row.arrival_s is None else f"{row.arrival_s:.6f}"
        ids = " ".join(str(token - 1) for token, _ in row.segments)
        lines.append(f"{arrival},{row.input_tokens},{row.output_tokens}" + (f",{ids}" if has_prefixes else ""))
    write_atomically(path.with_suffix(".json"), json.dumps(provenance, indent=2) + "\n")
    write_atomically(path, "\n".join(lines) + "\n")
