"""Rows of a summary: groups of them, ratios between them, their kinds, and which are of one comparison.

A frame squares its rows and turns counts into floats, so rows take no more than new fields from it. pandas is imported
late: it takes 0.2 s, which no process that only runs points should spend.

Rows of one comparison stand in one part of a figure, and ratios are taken between them. Simulated rows, rows of a small
model and rows measured in a paper's setting are three comparisons. So are simulated rows of each reading of a paper's
machine (``PaperSetting.reading``). A server that was started on this machine (backend ``server``) belongs to the rows
of the engines that were measured there in a process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from evaluation.results.folder import FlatRecord

if TYPE_CHECKING:
    import pandas as pd


# -- groups and ratios ------------------------------------------------------------------------------------------------


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


# -- kinds of results -------------------------------------------------------------------------------------------------

SIMULATED, MEASURED, OVER_HTTP = "simulated", "measured here", "measured over HTTP"
UNSTATED = "origin not stated"


def kind_of(record: FlatRecord) -> str:
    """SIMULATED, MEASURED on this machine, measured OVER_HTTP on a server of the user, or UNSTATED."""
    backend = record.get("backend")
    if backend is None:
        return UNSTATED
    if backend.startswith("simulated"):
        return SIMULATED
    return OVER_HTTP if backend == "http" else MEASURED


def is_simulated(record: FlatRecord) -> bool:
    return kind_of(record) == SIMULATED


def in_papers_setting(record: FlatRecord) -> bool:
    """Whether the row was measured with a paper's model, lengths and limits. Other measured rows are of another
    model, with lengths scaled down."""
    return not is_simulated(record) and record.get("setting") is not None


def reading_of(record: FlatRecord) -> str | None:
    """How the paper's machine is read, "as APEX measured" for example, where there is more than one way."""
    return record.get("reading")


def of_kernels(record: FlatRecord) -> bool:
    """Whether the row was measured of a CPU attention kernel by itself, which has no model."""
    return record.get("kernel") is not None


def is_served(record: FlatRecord) -> bool:
    """Whether the row's times were taken at the client of a server."""
    return record.get("backend") in ("server", "http")


def comparisons(records: Iterable[FlatRecord]) -> list[list[FlatRecord]]:
    """The rows of each comparison, in the order of the first of them."""
    return list(grouped(records, kind_of, in_papers_setting, reading_of).values())


def claimable(records: Iterable[FlatRecord]) -> list[list[FlatRecord]]:
    """The comparisons that say something about the papers' claims: all but rehearsals, parts of models, and CPU runs
    in a paper's setting."""
    return [rows for rows in comparisons(records) if not in_papers_setting(rows[0]) or any(map(is_full_size, rows))]


def label_of(records: Sequence[FlatRecord]) -> str:
    """Kind of the rows of one comparison, with its reading, the setting and the card, or "another model"."""
    first = records[0]
    if kind_of(first) == MEASURED:
        return f"MEASURED here ({what_ran(records)})"
    if is_simulated(first) and (reading := reading_of(first)):
        return f"SIMULATED, {reading}"
    return {SIMULATED: "SIMULATED", OVER_HTTP: "MEASURED over HTTP"}.get(kind_of(first), kind_of(first))


def what_ran(records: Sequence[FlatRecord]) -> str:
    """The setting and the card of rows measured here, or "another model" with the backend; of kernels the CPU."""
    if of_kernels(records[0]):
        return " and ".join(distinct(records, "cpu"))
    if in_papers_setting(records[0]):
        return f"{' and '.join(distinct(records, 'setting_title'))}, {card_of(records)}"
    return f"{records[0]['backend']}, another model"


def is_full_size(record: FlatRecord) -> bool:
    """Whether a row of a paper's setting was measured on a GPU with the paper's model and lengths, or of a kernel,
    of which a claim asks for no more."""
    if of_kernels(record):
        return not is_simulated(record)
    as_in_paper = record.get("scale", 1) == 1 and record.get("papers_model", True)
    return in_papers_setting(record) and record.get("gpu") is not None and as_in_paper


def card_of(records: Iterable[FlatRecord]) -> str:
    """Product names of the GPUs on which the rows were measured."""
    return " and ".join(distinct(records, "gpu")) or "a CPU"


def distinct(records: Iterable[FlatRecord], field: str) -> list:
    """The values of a field, without None, in the order of the rows."""
    return list(dict.fromkeys(value for record in records if (value := record.get(field)) is not None))
