from __future__ import annotations

import io

from rich.console import Console

from evaluation.results import progress
from evaluation.results.progress import TokenProgress, format_s


def test_progress_prints_plain_lines_without_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_LINE_EVERY_S", 0.0)
    out = io.StringIO()
    with TokenProgress("point", 10, Console(file=out, force_terminal=False, width=200)) as bar:
        bar.update(0)
        bar.update(5)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("point: 0/10 tokens") and "unknown" in lines[0]
    assert lines[1].startswith("point: 5/10 tokens") and lines[1].endswith("s left")


def test_progress_bar_on_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with TokenProgress("point", 10, console) as bar:
        bar.update(10)
        bar.bar.refresh()
    assert "point" in out.getvalue() and "tok/s" in out.getvalue()


def test_format_s():
    assert format_s(42.2) == "42 s" and format_s(185) == "3 min 05 s"
