"""The prefix cache through the API: what answers, metrics and the status page tell of it, salts and resets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.conftest import OPTIONS
from tests.swiftllm.server.http_server import RunningServer, running

PROMPT = list(range(5, 55))  # three full blocks of 16, and two tokens


@pytest.fixture(scope="module")
def caching(tiny_chat_dir: Path) -> Iterator[RunningServer]:
    engine = LLM(str(tiny_chat_dir), "vllm", **OPTIONS).engine
    with running(EngineService(engine), ServerSettings()) as running_server:
        yield running_server
    engine.kv.check_blocks()


@pytest.fixture(autouse=True)
def empty(caching: RunningServer) -> None:
    assert caching.post("/reset_prefix_cache").status_code == 200


def ask(server: RunningServer, prompt: list[int] = PROMPT, **options):
    body = {"model": "tiny-chat", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, **options}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_answer_tells_what_was_cached_and_is_the_same(caching: RunningServer) -> None:
    first, second, longer = ask(caching), ask(caching), ask(caching, [*PROMPT[:40], *PROMPT])
    assert [cached(answer) for answer in (first, second, longer)] == [0, 48, 32]
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == 50


def test_the_usage_of_several_outputs_counts_each_prompt_once(caching: RunningServer) -> None:
    ask(caching)
    assert cached(ask(caching, [PROMPT, PROMPT[:34], [7, *PROMPT]], n=3)) == 48 + 32


def test_a_stream_tells_it_at_its_end(caching: RunningServer) -> None:
    ask(caching)
    stream = caching.client().completions.create(
        model="tiny-chat", prompt=PROMPT, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    assert list(stream)[-1].usage.prompt_tokens_details.cached_tokens == 48


def test_only_requests_with_the_same_salt_share(caching: RunningServer) -> None:
    answers = [ask(caching, **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})]
    assert [cached(answer) for answer in answers] == [0, 0, 0, 48, 48]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert caching.post("/v1/completions", {"prompt": PROMPT, "cache_salt": ""}).status_code == 400


def test_scored_prompts_are_computed_whole(caching: RunningServer) -> None:
    ask(caching)
    answer = ask(caching, prompt_logprobs=1)
    assert cached(answer) == 0 and len(answer["choices"][0]["prompt_logprobs"]) == len(PROMPT)


def test_after_a_reset_nothing_is_found(caching: RunningServer) -> None:
    ask(caching)
    caching.post("/reset_prefix_cache")
    assert cached(ask(caching)) == 0


def test_metrics_and_status_page_count_it(caching: RunningServer) -> None:
    def now() -> dict:
        return caching.http.get("/status.json").json()["now"]

    before = now()
    ask(caching)
    ask(caching)
    while (after := now())["gpu_blocks_cached"] < 3:  # the last step's end may come after its answer
        time.sleep(0.01)
    assert after["prefix_queries"] - before["prefix_queries"] == 100
    assert after["prefix_hits"]["gpu"] - before["prefix_hits"].get("gpu", 0) == 48
    assert after["cpu_blocks_cached"] == 0


def test_a_server_without_a_cache_says_nothing_of_it(server: RunningServer) -> None:
    assert "prompt_tokens_details" not in ask(server)["usage"]
    assert server.post("/reset_prefix_cache").status_code == 200
