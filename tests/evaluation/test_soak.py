"""A short soak of a real server, and the problems that a soak must report."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace

import httpx
import pytest

from evaluation.soak import (
    KINDS,
    MEMORY_FROM,
    QUEUE_FULL,
    SERVED,
    Options,
    RequestSource,
    SoakReport,
    Unexpected,
    memory_problems,
    run_soak,
    send_request,
)
from tests.evaluation.fake_server import FakeServer

SHORT = Options(requests=120)


@pytest.mark.parametrize("system", ["apex", "omniserve"])
def test_a_short_soak(system, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    report = run_soak(replace(SHORT, system=system))
    assert report.problems == []
    assert report.ends.total() == SHORT.requests and report.worker_restarts >= 1
    kinds = Counter()
    for (kind, _), count in report.ends.items():
        kinds[kind] += count
    assert len(kinds) >= len(KINDS) - 2  # the rarest may not have come
    assert report.ends["plain", SERVED] > 10 and report.ends["stream", SERVED] > 10


def test_memory_is_judged_in_long_runs_from_the_first_quarter_on():
    grown = SoakReport(resident_mib=[100.0, 400.0, 410.0, 420.0, 450.0])
    assert memory_problems(Options(requests=MEMORY_FROM, memory_allowance_mib=50), grown) == []
    (problem,) = memory_problems(Options(requests=MEMORY_FROM, memory_allowance_mib=49), grown)
    assert "memory grew by 50 MiB, more than 49" in problem
    assert memory_problems(Options(requests=MEMORY_FROM - 1, memory_allowance_mib=0), grown) == []


def answered(behave, kind: str) -> str:
    async def ask(url: str) -> str:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            return await send_request(client, RequestSource("m", 100, 50, random.Random(0)).request(kind))

    with FakeServer(behave) as fake:
        return asyncio.run(ask(fake.url))


def breaks_off(exchange, body, index):
    exchange.start()
    exchange.chunk("a")
    exchange.end()


def counts_wrong(exchange, body, index):
    exchange.start()
    exchange.done(body["max_tokens"] + 1)


def fails_in_the_middle(exchange, body, index):
    exchange.start()
    exchange.event({"error": {"message": "no", "code": "engine_error"}})
    exchange.end()


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        (breaks_off, "stream", "ended after 1 events without"),
        (counts_wrong, "stream", "tokens were asked for"),
        (fails_in_the_middle, "stream", "stream: stream: engine_error"),
        (lambda exchange, *_: exchange.refuse(500, {"error": {"code": "x"}}), "plain", "plain: 500 x"),
    ],
)
def test_what_must_not_happen_is_reported(behave, kind, words):
    with pytest.raises(Unexpected, match=words):
        answered(behave, kind)


def test_a_full_queue_is_a_documented_answer():
    full = {"error": {"code": "queue_full"}}
    assert answered(lambda exchange, *_: exchange.refuse(429, full), "plain") == QUEUE_FULL


def test_draws_are_the_same_for_the_same_seed():
    first, second = (RequestSource("m", 100, 50, random.Random(3)) for _ in range(2))
    assert [first.next_request() for _ in range(50)] == [second.next_request() for _ in range(50)]
    assert len({first.request("malformed").body for _ in range(60)}) > 5
