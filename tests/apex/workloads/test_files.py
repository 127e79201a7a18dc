"""Trace files as people write them: read in the order of arrival, or refused with the file and the line.

RFC 4180 is the form of CSV (quoted cells, CRLF). What spreadsheets add is a byte-order mark and rows of commas.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.workloads.catalogue import Origin, RecordedTrace
from apex.workloads.files import TraceRow, read_rows

HEAD = "arrival_s,input_tokens,output_tokens\n"
ROWS = "0.0,10,5\n1.0,20,5\n2.0,30,5\n"
READ = {
    "plain": HEAD + ROWS,
    "a byte-order mark": "\ufeff" + HEAD + ROWS,
    "CRLF": (HEAD + ROWS).replace("\n", "\r\n"),
    "a mark and CRLF": "\ufeff" + (HEAD + ROWS).replace("\n", "\r\n"),
    "blank lines": HEAD + "\n" + ROWS + "  \n,,\n\n",
    "no end of line": (HEAD + ROWS)[:-1],
    "quotes": 'arrival_s,"input_tokens","output_tokens"\n"0.0","10","5"\n1.0,20,5\n2.0,30,5\n',
    "spaces": "arrival_s, input_tokens, output_tokens\n 0.0, 10, 5\n1.0 ,20 ,5\n2.0,30,5\n",
    "more columns": "id,input_tokens,output_tokens,arrival_s\na,10,5,0\nb,20,5,1\nc,30,5,2\n",
    "not sorted": HEAD + "2.0,30,5\n0.0,10,5\n1.0,20,5\n",
}
REFUSED = {
    "infinite": (HEAD + "0.0,10,5\ninf,20,5\n", 3, "arrival_s=inf"),
    "minus infinity": (HEAD + "-inf,10,5\n", 2, "arrival_s=-inf"),
    "not a number": (HEAD + "0.0,10,5\n\nnan,20,5\n", 4, "arrival_s=nan"),
    "before the beginning": (HEAD + "-1.0,10,5\n", 2, "arrival_s=-1.0"),
    "letters for a time": (HEAD + "soon,10,5\n", 2, "arrival_s='soon' is no number"),
    "letters for a length": (HEAD + ROWS + "3.0,ten,5\n", 5, "input_tokens='ten' is no whole number"),
    "no length": (HEAD + "0.0,,5\n", 2, "input_tokens='' is no whole number"),
    "an infinite length": (HEAD + "0.0,10,inf\n", 2, "output_tokens='inf' is no whole number"),
    "a part of a token": (HEAD + "0.0,10.5,5\n", 2, "input_tokens='10.5' is no whole number"),
    "no token": (HEAD + "0.0,0,5\n", 2, "at least 1 token"),
    "cells are missing": (HEAD + "0.0,10\n", 2, "2 cells where the header has 3"),
    "letters for a prefix": ("arrival_s,input_tokens,output_tokens,prefix_ids\n0,9,9,1 b\n", 2, "prefix_ids='b'"),
    "no header": (ROWS, 1, "needs columns"),
    "semicolons": ((HEAD + ROWS).replace(",", ";"), 1, "needs columns"),
    "empty": ("", 1, "needs columns"),
}


@pytest.mark.parametrize("name", READ)
def test_rows_are_read_by_arrival(tmp_path: Path, name: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(READ[name].encode())
    assert read_rows(path) == tuple(TraceRow(10 * n, 5, n - 1.0) for n in (1, 2, 3))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_file_and_the_line(tmp_path: Path, name: str) -> None:
    text, line, why = REFUSED[name]
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode())
    with pytest.raises(ValueError) as refused:
        read_rows(path)
    assert str(refused.value).startswith(f"{path}:{line}: ") and why in str(refused.value)


def test_bytes_of_another_encoding_are_refused_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes((HEAD + ROWS).encode("utf-16"))
    with pytest.raises(ValueError, match=r"trace.csv:\d+: 'utf-8' codec can't decode"):
        read_rows(path)


def test_sorting_is_told_and_equal_arrivals_keep_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "1.0,1,5\n0.5,2,5\n1.0,3,5\n0.5,4,5\n")
    assert [row.input_tokens for row in read_rows(path)] == [2, 4, 1, 3]
    assert "trace.csv: its rows are not in the order of arrival" in caplog.text


def test_rows_without_arrivals_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "3.0,1,5\n,2,5\n1.0,3,5\n")
    assert [row.input_tokens for row in read_rows(path)] == [1, 2, 3]


def test_a_window_of_a_trace_that_was_not_sorted_has_no_negative_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEAD + "5.0,1,5\n2.0,2,5\n4.0,3,5\n")
    window = RecordedTrace("t", "t", Origin("measured", ""), read_rows(path)).window(3, seed=0)
    assert [row.arrival_s for row in window] == [0.0, 2.0, 3.0]
