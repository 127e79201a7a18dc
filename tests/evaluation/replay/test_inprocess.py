from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from evaluation.replay.inprocess import ReplayStalled, replay
from evaluation.results import progress
from evaluation.results.progress import TokenProgress, format_s
from evaluation.traces.catalogue import Origin, TraceRow
from evaluation.traces.workloads import Lengths, PromptTokens, WorkloadSpec, make_workload
from tests.evaluation.fake_engine import FakeEngine


def workload(*rows):
    spec = WorkloadSpec("osc", len(rows))
    lengths = Lengths(spec, "OSC", Origin("fitted", "for tests"), tuple(TraceRow(*row) for row in rows))
    return make_workload(lengths, PromptTokens(100))


def test_all_at_once():
    engine = FakeEngine(step_s=0.5)
    result = replay(engine, workload((4, 2, 0.0), (5, 3, 0.0)))
    assert [record.request_id for record in result.records] == ["osc-0", "osc-1"]
    assert [record.token_times_s for record in result.records] == [(0.5, 1.0), (0.5, 1.0, 1.5)]
    assert result.wall_s == 1.5
    assert result.stats["output_tokens"] == 5 and result.stats["lane_busy_s"] == pytest.approx(0.75)
    assert result.stats["strategy_iterations"] == {"gpu-only": 3}


def test_stats_are_those_of_this_replay_alone():
    engine = FakeEngine()
    replay(engine, workload((4, 2, 0.0)))
    second = replay(engine, workload((4, 3, 0.0)))
    assert second.stats["output_tokens"] == 3 and second.stats["strategy_iterations"] == {"gpu-only": 3}
    assert second.records[0].token_times_s == (0.5, 1.0, 1.5)


def test_open_loop_arrivals():
    engine = FakeEngine(step_s=0.4)
    result = replay(engine, workload((4, 2, 5.0), (4, 3, 0.0), (4, 1, 0.5)), wait=engine.wait)
    seen = dict(engine.arrivals_seen)
    assert seen["osc-1"] == 100.0
    assert 100.5 <= seen["osc-2"] <= 100.9  # while the engine was busy with the other
    assert 105.0 <= seen["osc-0"] <= 105.06  # after the engine had stood idle
    assert [record.arrival_s for record in result.records] == pytest.approx([5.0, 0.0, 0.5])


def test_refusal_is_a_failed_record_with_the_message():
    result = replay(FakeEngine(max_tokens=20), workload((4, 2, 0.0), (30, 2, 0.0)))
    good, bad = result.records
    assert good.completed and not bad.completed
    assert bad.failure == "refused: 30 + 2 tokens exceed 20" and bad.prompt_len == 30


def test_stall_is_an_error_with_the_state():
    with pytest.raises(ReplayStalled, match=r'no progress for 0.2 s.*"waiting": 1'):
        replay(FakeEngine(stuck=True), workload((4, 2, 0.0)), stall_timeout_s=0.2)


def test_step_that_never_returns_is_a_stall_too():
    engine, returned = FakeEngine(), []
    engine.step = lambda: returned.append(threading.Event().wait(60))
    with pytest.raises(ReplayStalled, match="no progress"):
        replay(engine, workload((4, 2, 0.0)), stall_timeout_s=0.2)
    assert not returned  # it was interrupted


def test_slow_progress_is_no_stall():
    engine = FakeEngine()
    step = engine.step
    engine.step = lambda: (time.sleep(0.06), step())[1]
    assert replay(engine, workload((4, 6, 0.0)), stall_timeout_s=0.25).records[0].completed


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
