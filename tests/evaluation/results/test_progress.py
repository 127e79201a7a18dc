from __future__ import annotations

import io
from types import SimpleNamespace

from rich.console import Console

from evaluation.results import progress
from evaluation.results.progress import RunProgress, TokenProgress, format_s


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


def clocked(monkeypatch, work):
    """What ``work`` prints; it may move the clock by ``wait``."""
    now, out = [1000.0], io.StringIO()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds):
        now[0] += seconds

    work(RunProgress(5, Console(file=out, force_terminal=False, width=200)), wait)
    return out.getvalue().splitlines()


def test_the_time_left_counts_the_point_that_begins_and_those_after_it(monkeypatch):
    labels = []

    def work(run, wait):
        run.skip_point("a")
        for label, seconds in (("b", 10.0), ("c", 20.0), ("d", 30.0)):
            labels.append(run.start_point(label))
            wait(seconds)
            run.finish_point(label, "done")
        labels.append(run.start_point("e"))

    lines = clocked(monkeypatch, work)
    assert labels == ["2/5 b", "3/5 c (all: ~30 s left)", "4/5 d (all: ~30 s left)", "5/5 e (all: ~20 s left)"]
    assert lines == ["1/5 a: finished before", "2/5 b: done", "3/5 c: done", "4/5 d: done"]


def test_the_time_left_of_points_that_run_together_is_by_their_cost(monkeypatch):
    def work(run, wait):
        run.print_plan(4, 2, 1)
        with run.pool_progress(100.0) as pool:
            wait(30.0)
            pool.finish_point("a", "done", 25.0)
            wait(15.0)
            pool.finish_point("b", "done", 50.0)
            pool.finish_point("c", "done", 25.0)

    assert clocked(monkeypatch, work) == [
        "to run: 4 points 2 at a time, then 1 points one after the other",
        "1/5 a: done (~1 min 30 s left of these)",
        "2/5 b: done (~15 s left of these)",
        "3/5 c: done",
    ]
