"""Groups of the rows of a summary, and ratios between rows, in pandas.

A frame squares its rows and turns counts into floats, so rows take no more than new fields from it. pandas is imported
late: it takes 0.2 s, which no process that only runs points should spend.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from evaluation.results.folder import FlatRecord

if TYPE_CHECKING:
    import pandas as pd


def grouped(rows: Iterable[FlatRecord], *by: str | Callable[[FlatRecord], Any]) -> dict[Any, list[FlatRecord]]:
    """The rows by a field or by what a function makes of them, in the order of the first of each.

    Of several fields or functions the keys are tuples.
    """
    groups: dict[Any, list[FlatRecord]] = {}
    for row in rows:
        values = tuple(row.get(one) if isinstance(one, str) else one(row) for one in by)
        groups.setdefault(values if len(by) > 1 else values[0], []).append(row)
    return groups


def frame_of(rows: Iterable[FlatRecord], fields: Sequence[str] | None = None) -> pd.DataFrame:
    """A line for each row, numbered from 0; ``fields`` are its columns, also those that no row has."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=fields)


def with_columns(rows: Sequence[FlatRecord], **columns: pd.Series) -> list[FlatRecord]:
    """The rows with further fields, in the frame's order; None where a column has no value."""
    values = [column.astype(object).where(column.notna(), None) for column in columns.values()]
    return [row | dict(zip(columns, fields, strict=True)) for row, *fields in zip(rows, *values, strict=True)]


def bases(
    frame: pd.DataFrame,
    to: pd.Series,
    at: Collection[str],
    any_of: Collection[str] = (),
    best: pd.Series | None = None,
    lines: pd.Series | None = None,
) -> pd.Series:
    """For each line the number of the line that it is compared with, or nothing.

    Args:
        to: whether a line is one that others are compared with.
        at: fields in which the two are equal. None is a value like others.
        any_of: fields in which they are equal too, but for lines that have None there: those do not depend on the
            field, and count at each of its values.
        best: of several lines the one where this is highest; the first of equals.
        lines: whether a line is compared at all; by default all are.

    Raises:
        ValueError: several lines fit, and ``best`` does not choose.
    """
    keys = frame[[*at, *any_of]]
    mine = keys if lines is None else keys[lines]
    pairs = mine.reset_index(names="line").merge(
        keys[to].reset_index(names="base"), on=list(at), suffixes=("", " of base")
    )
    for field in any_of:
        theirs = pairs[f"{field} of base"]
        pairs = pairs[theirs.isna() | (theirs == pairs[field])]
    if best is not None:
        pairs = pairs.loc[pairs["base"].map(best).groupby(pairs["line"]).idxmax()]
    if (several := pairs["line"].duplicated()).any():
        where = keys.loc[pairs["line"][several].iloc[0]].to_dict()
        raise ValueError(f"several rows to compare with at {where}")
    return pairs.set_index("line")["base"].reindex(frame.index)


def over(values: pd.Series, base: pd.Series) -> pd.Series:
    """Values over those of the lines of :func:`bases`; nothing where either is None, or the other is 0."""
    numbers = values.astype(float)
    return numbers / base.map(numbers.where(numbers != 0))
