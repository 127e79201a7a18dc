"""Answers in gpt-oss' form over HTTP, streamed and not; a grammar makes the tiny model write them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService, ServiceLimits
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.api.contract.test_tools import TOOLS
from tests.swiftllm.server.api.test_errors import CHAT, HELLO
from tests.swiftllm.server.conftest import OPTIONS
from tests.swiftllm.server.http_server import RunningServer, running

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}{% if message.thinking %}<|channel|>analysis<|message|>"
    "{{ message.thinking }}<|end|>{% endif %}<|message|>{{ message.content }}<|end|>{% endfor %}<|start|>assistant"
)
CALL = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}'
SAID = "<|channel|>analysis<|message|>Look it up<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>Sun"


@pytest.fixture(scope="module")
def server(tiny_chat_dir, tmp_path_factory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    with running(EngineService(engine, ServiceLimits()), ServerSettings(chat_template=str(template))) as running_server:
        yield running_server


def body_of(said: str, **fields: object) -> dict:
    return {"messages": HELLO, "max_tokens": 400, "structured_outputs": {"choice": [said]}, **fields}


def test_reasoning_content_and_calls_of_an_answer_whole_and_streamed(server) -> None:
    for said, reason, content in ((SAID + FINAL, "stop", "Sun"), (SAID + CALL, "tool_calls", None)):
        choice = server.post(CHAT, body_of(said, tools=TOOLS)).json()["choices"][0]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Look it up", content)
        assert choice["finish_reason"] == reason
        deltas = []
        for chunk in server.client().chat.completions.create(
            model="", messages=HELLO, tools=TOOLS, stream=True, max_tokens=400,
            extra_body={"structured_outputs": {"choice": [said]}},
        ):  # fmt: skip
            deltas.append(chunk.choices[0].delta)
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Look it up"
        assert "".join(delta.content or "" for delta in deltas) == (content or "")
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        if content is None:
            (called,) = message["tool_calls"]
            assert called["function"]["name"] == "weather" == "".join(call.name or "" for call in calls)
            arguments = called["function"]["arguments"], "".join(call.arguments for call in calls)
            assert [json.loads(text) for text in arguments] == [{"city": "Paris"}] * 2


def test_reasoning_before_a_call_goes_back_into_the_prompt(server) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [call]}
    tokens = server.post("/tokenize", {"messages": [*HELLO, said], "add_special_tokens": False}).json()["tokens"]
    assert "analysis<|message|>Hm<|end|>" in server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_special_tokens_are_read(server, monkeypatch) -> None:
    """In gpt-oss' vocabulary the marks are, and a text without them has no form."""
    seen = []
    monkeypatch.setattr("swiftllm.server.protocol.OutputText", lambda *a, **how: seen.append(how) or make(*a, **how))
    server.post(CHAT, body_of(SAID + FINAL))
    assert [how["skip_special_tokens"] for how in seen] == [False]


def make(*arguments: object, **how: object) -> object:
    from swiftllm.server.output_text import OutputText

    return OutputText(*arguments, **how)
