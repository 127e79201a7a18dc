"""What kind of result a row is, and which rows belong to one comparison.

Rows of one comparison stand in one part of a figure, and ratios are taken between them. Simulated rows, rows of a small
model and rows measured in a paper's setting are three comparisons. So are simulated rows of each reading of a paper's
machine (``PaperSetting.reading``). A server that was started on this machine (backend ``server``) belongs to the rows
of the engines that were measured there in a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped

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
