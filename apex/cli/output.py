"""Formats numbers and tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 120


def stdout_console() -> Console:
    """A console for standard output: plain and 120 columns wide if that is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def number(value: float | None, form: str) -> str:
    """A number as a table cell; None is a dash."""
    return "-" if value is None else format(value, form)


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def strategy_mix(strategy_iterations: Mapping[str, int]) -> str:
    """Strategies by their share of the iterations, most frequent first."""
    total = sum(strategy_iterations.values())
    ordered = sorted(strategy_iterations.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / total:.0%}" for name, count in ordered if count) or "-"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table whose columns are numbers, except those named in ``left``."""
    result = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in columns:
        result.add_column(title, justify="left" if title in left else "right", no_wrap=title not in left)
    for row in rows:
        result.add_row(*row)
    return result
