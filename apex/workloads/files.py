"""Trace files: request lengths and arrivals as CSV, those written here with a JSON file of their provenance."""

from __future__ import annotations

import csv
import datetime
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from swiftllm.core.request import ServiceClass
from swiftllm.files import write_atomically

logger = logging.getLogger(__name__)

COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The same in Azure's inference traces; the first is a date and time."""
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

    def __post_init__(self) -> None:
        """Raises ValueError: there is no such arrival."""
        if self.arrival_s is not None and not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"arrival_s={self.arrival_s} must be a number of seconds, at least 0")

    @property
    def start_s(self) -> float:
        """``arrival_s``, and 0 where there is none."""
        return self.arrival_s or 0.0

    @property
    def prompt(self) -> tuple[int, ...]:
        """Token ids of a prompt that has segments, cut to its length."""
        return tuple(chain.from_iterable(repeat(token, count) for token, count in self.segments))[: self.input_tokens]


def read_rows(path: Path) -> tuple[TraceRow, ...]:
    """Read a trace file with the columns arrival_s (may be blank), input_tokens, output_tokens, maybe prefix_ids; or
    one with Azure's columns TIMESTAMP, ContextTokens, GeneratedTokens.

    Rows are by arrival, sorted with a warning if they are not; where one has no arrival, as they are. Blank lines and a
    byte-order mark do not count. Azure's rows of no tokens are left out with a warning.

    Raises:
        ValueError: a column is missing, a cell is no number, an arrival is negative or not finite, a length is below 1,
            or there are no rows; the message names the file and the line.
    """
    rows: list[TraceRow] = []
    left_out = 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            columns = [name.strip() for name in next(lines, [])]
            is_azure = set(AZURE_COLUMNS) <= set(columns)
            if not is_azure and (missing := [name for name in COLUMNS if name not in columns]):
                raise ValueError(f"it needs columns {','.join(COLUMNS)}, and lacks {','.join(missing)}: {columns}")
            for cells in lines:
                if not any(cell.strip() for cell in cells):
                    continue
                by_name = _by_name(columns, cells)
                if is_azure:
                    moment, *lengths = (by_name[name] for name in AZURE_COLUMNS)
                    if "0" in lengths:
                        left_out += 1
                        continue
                    by_name |= dict(zip(COLUMNS, (str(seconds_of(moment)), *lengths), strict=True))
                rows.append(_row(by_name))
        except (ValueError, csv.Error) as error:  # bytes that are not UTF-8, too
            raise ValueError(f"{path}:{max(1, lines.line_num)}: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no rows")
    if left_out:
        logger.warning("%s: %d rows without a prompt or an output are left out", path, left_out)
    if is_azure:
        first_s = min(row.start_s for row in rows)
        rows = [replace(row, arrival_s=row.start_s - first_s) for row in rows]
    return by_arrival(path, rows)


def by_arrival(path: Path, rows: list[TraceRow]) -> tuple[TraceRow, ...]:
    """The rows of a file in the order of arrival, with a warning if they are not; as they are where one has none."""
    arrivals = [row.arrival_s for row in rows if row.arrival_s is not None]
    if len(arrivals) == len(rows) and arrivals != sorted(arrivals):
        logger.warning("%s: its rows are not in the order of arrival, and are sorted", path)
        rows = sorted(rows, key=lambda row: row.start_s)
    return tuple(rows)


def seconds_of(text: str) -> float:
    """Seconds since 1970 of a date and time in ISO 8601, by UTC where no zone is named."""
    moment = datetime.datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _by_name(columns: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    """
    Raises:
        ValueError: cells are missing.
    """
    if len(cells) < len(columns):
        raise ValueError(f"{len(cells)} cells where the header has {len(columns)}")
    return dict(zip(columns, map(str.strip, cells), strict=False))


def _row(by_name: Mapping[str, str]) -> TraceRow:
    """
    Raises:
        ValueError: cells have no meaning.
    """
    arrival, given, out = COLUMNS
    ids = by_name.get(PREFIX_COLUMN, "").split()
    segments = tuple((1 + _number(PREFIX_COLUMN, one, int), PREFIX_TOKENS) for one in ids)  # 0: of simulated outputs
    row = TraceRow(
        _number(given, by_name[given], int),
        _number(out, by_name[out], int),
        _number(arrival, by_name[arrival], float) if by_name[arrival] else None,
        segments=segments,
    )
    if row.input_tokens < 1 or row.output_tokens < 1:
        raise ValueError("lengths must be at least 1 token")
    return row


def _number(column: str, cell: str, kind: type[int] | type[float]) -> Any:
    try:
        return kind(cell)
    except ValueError:
        raise ValueError(f"{column}={cell!r} is no {'whole number' if kind is int else 'number'}") from None


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
