"""A figure as a declaration: which fields of rows are its axes, panels and series. ``charts.py`` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evaluation.results.folder import FlatRecord


@dataclass(frozen=True)
class Axis:
    """A vertical axis: a field of rows, and its name."""

    field: str
    label: str
    log: bool = False


@dataclass(frozen=True)
class Figure:
    """Panels of lines over ``x``, or of groups of bars by ``x``, with the notes that all figures have.

    Attributes:
        y: a row of panels for each.
        panel: fields whose values make up a panel.
        series: fields whose values make up a line, or a bar of each group.
        title_of, label_of: words for a panel and for a line, from one of its rows; by default the values of its fields.
        look_of: further arguments of a line or a bar, from one of its rows.
        is_drawn: whether a row is.
        notes: those that come first.
    """

    title: str
    kind: Literal["lines", "bars"]
    x: str
    x_label: str
    y: Sequence[Axis]
    panel: Sequence[str]
    series: Sequence[str] = ("system",)
    title_of: Callable[[FlatRecord], str] | None = None
    label_of: Callable[[FlatRecord], str] | None = None
    look_of: Callable[[FlatRecord], Mapping[str, Any]] = lambda row: {}
    is_drawn: Callable[[FlatRecord], bool] = lambda row: True
    log_x: bool = False
    notes: str = ""
