"""Rows of a run as CSV, in full, and as a LaTeX table, as they are printed."""

from __future__ import annotations

from evaluation.results.tables import as_csv, as_latex, write_tables

ROWS = [{"system": "a_b", "rate": 1234.5678, "share": 0.5}, {"system": "50% & more", "rate": None}]
COLUMNS = [("system", "system", "s"), ("tokens/s\nof all", "rate", ".1f"), ("share #1", "share", ".0%")]


def test_csv_has_the_fields_in_full_and_none_is_empty() -> None:
    assert as_csv(ROWS, ["system", "rate", "share"]) == "system,rate,share\na_b,1234.5678,0.5\n50% & more,,\n"


def test_latex_reads_no_command_in_any_text() -> None:
    lines = as_latex(ROWS, COLUMNS, r"100% of {all} & a_b^2 $ ~ # \\x").splitlines()
    assert lines[0] == r"\begin{table}" and lines[-1] == r"\end{table}"
    caption = r"100\% of \{all\} \& a\_b\textasciicircum{}2 \$ \textasciitilde{} \# "
    assert lines[2] == rf"\caption{{{caption}\textbackslash{{}}\textbackslash{{}}x}}"
    assert lines[3] == r"\begin{tabular}{lrr}" and lines[5] == r"system & tokens/s of all & share \#1 \\"
    assert lines[7:9] == [r"a\_b & 1234.6 & 50\% \\", r"50\% \& more & - & - \\"]


def test_both_are_written_beside_each_other(tmp_path) -> None:
    table, tex = write_tables(ROWS, COLUMNS, tmp_path, "rates", "Rates")
    assert table == tmp_path / "rates.csv" and tex == tmp_path / "rates.tex"
    assert table.read_text() == as_csv(ROWS, ["system", "rate", "share"])
    assert tex.read_text() == as_latex(ROWS, COLUMNS, "Rates")
