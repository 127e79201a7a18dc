"""The loop that replays requests through an engine, with a fake engine on a virtual clock."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from apex.replay.loop import ReplayStalled, check_requests, replay_requests
from apex.replay.records import ReplayRequest
from swiftllm.core.request import RequestRefused
from tests.apex.replay.fake_engine import FakeEngine
from tests.reference.fake_backend import expected_output
from tests.reference.fake_engine import fake_engine


def requests(*rows: tuple[int, int, float]) -> list[ReplayRequest]:
    """One request per row (prompt length, output length, arrival)."""
    return [ReplayRequest(str(i), at_s, (5,) * length, out) for i, (length, out, at_s) in enumerate(rows)]


def test_all_at_once():
    engine = FakeEngine(step_s=0.5)
    result = replay_requests(engine, requests((4, 2, 0.0), (5, 3, 0.0)))
    assert [record.request_id for record in result.records] == ["0", "1"]
    assert [record.token_times_s for record in result.records] == [(0.5, 1.0), (0.5, 1.0, 1.5)]
    assert result.wall_s == 1.5
    assert result.stats["output_tokens"] == 5 and result.stats["gpu_batch_busy_s"] == pytest.approx(0.75)
    assert result.stats["strategy_iterations"] == {"gpu-only": 3}


def test_stats_are_those_of_this_replay_alone():
    engine = FakeEngine()
    replay_requests(engine, requests((4, 2, 0.0)))
    second = replay_requests(engine, requests((4, 3, 0.0)))
    assert second.stats["output_tokens"] == 3 and second.stats["strategy_iterations"] == {"gpu-only": 3}
    assert second.records[0].token_times_s == (0.5, 1.0, 1.5)


def test_open_loop_arrivals():
    engine = FakeEngine(step_s=0.4)
    result = replay_requests(engine, requests((4, 2, 5.0), (4, 3, 0.0), (4, 1, 0.5)), wait=engine.wait)
    seen = dict(engine.arrivals_seen)
    assert seen["1"] == 100.0
    assert 100.5 <= seen["2"] <= 100.9  # it arrived while the engine was busy
    assert 105.0 <= seen["0"] <= 105.06  # it arrived while the engine was idle
    assert [record.arrival_s for record in result.records] == pytest.approx([5.0, 0.0, 0.5])


def test_a_turn_goes_on_from_the_answer_that_was_given():
    """Not from what stands for it: tokens of earlier answers are kept, and lengths too."""
    engine = fake_engine("swiftllm", num_gpu_blocks=40, num_cpu_blocks=0)
    prompts = (5,) * 6, (5,) * 12, (5,) * 20  # 6 tokens and an answer of 3, then a message of 3; and again, of 5
    turns = [ReplayRequest(str(i), 0.0, prompt, 3, after=str(i - 1) if i else None) for i, prompt in enumerate(prompts)]
    asked, make_request = {}, engine.make_request
    engine.make_request = lambda name, prompt, *args, **options: make_request(
        name, asked.setdefault(name, prompt), *args, **options
    )
    result = replay_requests(engine, turns)
    assert all(record.completed for record in result.records)
    answers = [tuple(expected_output(list(asked[str(i)]), 3, ignore_eos=True)) for i in range(3)]
    assert asked["1"] == (*prompts[0], *answers[0], 5, 5, 5)
    assert asked["2"] == (*asked["1"], *answers[1], 5, 5, 5, 5, 5)


def test_a_request_that_follows_another_waits_for_its_end_whatever_that_is():
    first, second, refused, third = requests((4, 2, 1.0), (4, 2, 2.0), (30, 2, 0.0), (4, 1, 3.0))
    turns = [first, replace(second, after="0"), refused, replace(third, after="2")]
    engine = FakeEngine(step_s=0.5, max_tokens=20)
    result = replay_requests(engine, turns, wait=engine.wait)
    assert [record.completed for record in result.records] == [True, True, False, True]
    one, two, _, four = result.records
    assert two.arrival_s == pytest.approx(one.token_times_s[-1] + 2.0)
    assert two.token_times_s[0] == pytest.approx(two.arrival_s + 0.5, abs=0.51)
    assert four.arrival_s == pytest.approx(3.0)


def test_refusal_is_a_failed_record_with_the_message():
    result = replay_requests(FakeEngine(max_tokens=20), requests((4, 2, 0.0), (30, 2, 0.0)))
    good, bad = result.records
    assert good.completed and not bad.completed
    assert bad.failure == "refused: 30 + 2 tokens exceed 20" and bad.prompt_len == 30


def test_stall_is_an_error_with_the_state():
    with pytest.raises(ReplayStalled, match=r'no progress for 0.2 s.*"waiting": 1'):
        replay_requests(FakeEngine(stuck=True), requests((4, 2, 0.0)), stall_timeout_s=0.2)


def test_step_that_never_returns_is_a_stall_too():
    engine, returned = FakeEngine(), []
    engine.step = lambda: returned.append(threading.Event().wait(60))
    with pytest.raises(ReplayStalled, match="no progress"):
        replay_requests(engine, requests((4, 2, 0.0)), stall_timeout_s=0.2)
    assert not returned  # it was interrupted


def test_slow_progress_is_no_stall():
    engine = FakeEngine()
    step = engine.step
    engine.step = lambda: (time.sleep(0.3), step())[1]
    assert replay_requests(engine, requests((4, 6, 0.0)), stall_timeout_s=1.5).records[0].completed


STOPPED = """
import time
from apex.replay.loop import replay_requests
from tests.apex.replay.fake_engine import FakeEngine
from tests.apex.replay.test_loop import requests

engine = FakeEngine()
step = engine.step

def slow_step():
    print("in a step", flush=True)
    time.sleep(0.1)
    return step()

engine.step = slow_step
print(replay_requests(engine, requests((4, 2, 0.0)), stall_timeout_s=1.5).records[0].completed)
"""


def test_a_process_that_was_stopped_goes_on():
    """Ctrl-Z for longer than the timeout, and fg."""
    process = subprocess.Popen([sys.executable, "-c", STOPPED], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in a step\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=300)[0].splitlines()[-1] == "True"


def test_progress_is_reported_after_each_step():
    seen: list[int] = []
    replay_requests(FakeEngine(), requests((4, 2, 0.0), (4, 3, 0.0)), seen.append)
    assert seen == [2, 4, 5]


def test_a_limit_cuts_requests_short_and_leaves_the_engine_empty():
    engine = fake_engine("swiftllm", num_gpu_blocks=64, num_cpu_blocks=0)
    work = requests((4, 2, 0.0), (4, 50, 0.0), (4, 2, 1e6))
    clock = iter(range(10**6))
    engine.now = lambda: float(next(clock))
    result = replay_requests(engine, work, limit_s=40.0, wait=lambda seconds: None)
    whole, cut, unsent = result.records
    assert whole.completed
    assert not cut.completed and 0 < cut.output_len < 50 and cut.finish_reason == "abort"
    assert unsent.failure == "not sent within 40 s" and unsent.arrival_s == 1e6
    assert result.stats["output_tokens"] == 2 + cut.output_len and result.wall_s >= 40.0
    assert not engine.has_unfinished()
    assert replay_requests(engine, work[:1], wait=lambda seconds: None).records[0].completed


def test_what_would_be_refused_is_known_before_anything_runs():
    engine = fake_engine("swiftllm", num_gpu_blocks=4, num_cpu_blocks=0, max_model_len=20)
    check_requests(engine, requests((4, 2, 0.0)))
    with pytest.raises(RequestRefused, match="max_model_len"):
        check_requests(engine, requests((4, 2, 0.0), (30, 2, 0.0)))
    assert not engine.has_unfinished()
