"""The rows of a run as a table: on the terminal, as CSV and in LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from apex.cli.output import number, table
from evaluation.results.folder import FlatRecord
from swiftllm.files import write_atomically

Columns = Sequence[tuple[str, str, str]]
"""Title, field and format of columns. Those of the format ``s`` are words."""
# Latencies at the clients of a server.
LATENCY_COLUMNS: Columns = (
    ("TTFT p50", "ttft_s_p50", ".2f"), ("p99 (s)", "ttft_s_p99", ".2f"), ("TPOT p50", "tpot_s_p50", ".3f"),
    ("p99 (s)", "tpot_s_p99", ".3f"),
)  # fmt: skip
SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
}
SPECIAL |= {"{": r"\{", "}": r"\}", "^": r"\textasciicircum{}"}


def rows_table(rows: Sequence[Mapping[str, Any]], columns: Columns) -> Table:
    """A line for each row, with a dash for None."""
    cells = [[number(row.get(field), form) for _, field, form in columns] for row in rows]
    return table([title for title, _, _ in columns], cells, left=[title for title, _, form in columns if form == "s"])


def write_tables(rows: Sequence[FlatRecord], columns: Columns, folder: Path, name: str, caption: str) -> list[Path]:
    """Write ``<name>.csv`` with the columns' fields in full, and ``<name>.tex`` as it is printed (needs booktabs)."""
    table, tex = folder / f"{name}.csv", folder / f"{name}.tex"
    write_atomically(table, as_csv(rows, [field for _, field, _ in columns]))
    write_atomically(tex, as_latex(rows, columns, caption))
    return [table, tex]


def as_csv(rows: Sequence[FlatRecord], fields: Sequence[str]) -> str:
    """The fields of the rows, a line for each; None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([row.get(field) for field in fields] for row in rows)
    return text.getvalue()


def as_latex(rows: Sequence[FlatRecord], columns: Columns, caption: str) -> str:
    """A ``table`` with booktabs' rules. Columns of the format ``s`` are aligned left, others right."""
    align = "".join("l" if form == "s" else "r" for _, _, form in columns)
    lines = [[title.replace("\n", " ") for title, _, _ in columns]]
    lines += [[number(row.get(field), form) for _, field, form in columns] for row in rows]
    head, *body = (" & ".join(map(escaped, line)) + r" \\" for line in lines)
    parts = (
        r"\begin{table}", r"\centering", rf"\caption{{{escaped(caption)}}}", rf"\begin{{tabular}}{{{align}}}",
        r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
    )  # fmt: skip
    return "\n".join(parts)


def escaped(text: str) -> str:
    """A text in which LaTeX reads no command."""
    return "".join(SPECIAL.get(letter, letter) for letter in text)
