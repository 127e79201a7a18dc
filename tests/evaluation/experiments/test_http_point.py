"""Points on a server that the harness started: what warms it up, and what happens when it fails or ends."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from rich.console import Console

from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, make_workload
from evaluation.experiments import http_point
from evaluation.experiments.http_point import HttpTask, run_http_point, wide_warm_up
from evaluation.experiments.runner import Point
from evaluation.measure.server import ServerCommand, ServerEnded, launched_server
from evaluation.results.paths import REPO_ROOT

PROMPTS = PromptTokens(100)
SERVER = """
import os, sys
from tests.evaluation.fake_server import FakeServer, token_by_token

def behave(exchange, body, index):
    if index < 2:  # the warm-up
        return token_by_token(exchange, body, index)
    {last}

FakeServer(behave, int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
"""
DIES = """
    exchange.start(); exchange.chunk("a", None, 1)
    print("(Worker pid=1) ERROR 11-22 [x.py:1] torch.OutOfMemoryError: no memory left", "leaked " * 3, sep="\\n")
    print("leaked\\n" * 30, flush=True)
    os._exit(3)
"""
REFUSES = """
    if index == 2:
        return exchange.refuse(500, {"error": {"message": "not this one"}})
    token_by_token(exchange, body, index)
"""


def command(last: str) -> ServerCommand:
    return ServerCommand("vllm", (sys.executable, "-c", SERVER.replace("{last}", last)), {"PYTHONPATH": str(REPO_ROOT)})


def lengths(*rows: tuple[int, int]) -> Lengths:
    spec, origin = WorkloadSpec("osc", len(rows)), Origin("fitted", "for tests")
    return Lengths(spec, "OSC", origin, tuple(TraceRow(*row, 0.0) for row in rows))


def run(running, tmp_path, values=None):
    task = HttpTask(running.server, tmp_path, lengths(*[(4, 5)] * 4), values or {}, prompt_tokens=PROMPTS,
                    launched=running)  # fmt: skip
    return run_http_point(Point("a", "a", "a", task), "a", Console(quiet=True))


def test_the_end_of_a_launched_server_is_an_error_with_its_log(tmp_path):
    log = tmp_path / "log"
    with launched_server(command(DIES), log, 30.0) as running:
        assert running.ended() is None
        running.check_running()
        with pytest.raises(ServerEnded) as error:
            run(running, tmp_path)
    text = str(error.value)
    assert text.startswith("vllm: it ended with status 3 while it was measured\n")
    assert "torch.OutOfMemoryError: no memory left" in text  # printed long before the last lines
    assert text.endswith(f"the whole log is {log}") and len(text.splitlines()) < 25


def test_failed_requests_of_a_server_that_goes_on_are_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(http_point, "END_GRACE_S", 0.1)
    known = {"backend": "server", "server": "vllm 0.32.0", "num_gpu_blocks": 54}
    with launched_server(command(REFUSES), tmp_path / "log", 30.0) as running:
        values = run(running, tmp_path, known).values
    assert values["completed"] == 3 and values["failed"] == 1
    assert {name: values[name] for name in known} == known  # better known than from the server


def test_a_wide_warm_up_has_the_longest_prompt_and_batches_of_many_sizes():
    workload = make_workload(lengths((20, 9), (700, 100), (2, 9)), PROMPTS)
    requests = wide_warm_up(workload).requests
    assert len({request.request_id for request in requests}) == len(requests)
    assert {request.arrival_s for request in requests} == {0.0}
    assert max(len(request.prompt_token_ids) for request in requests) == 700
    batch = requests[1:]
    assert all(len(request.prompt_token_ids) + request.output_len <= 16 for request in batch)  # a block each
    ends = Counter(request.output_len for request in batch)
    left = [len(batch) - sum(count for length, count in ends.items() if length <= step) for step in range(13)]
    assert left[0] > 32 and 16 in left and left[-1] == 0 and left == sorted(left, reverse=True)
