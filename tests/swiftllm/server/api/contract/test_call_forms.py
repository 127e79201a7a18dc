"""Calls in plain text and their ids over HTTP. A grammar with one choice makes the tiny model say what a test wants."""

from __future__ import annotations

import json

import pytest

from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService, ServiceLimits
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.api.test_errors import CHAT, HELLO
from tests.swiftllm.server.conftest import OPTIONS
from tests.swiftllm.server.http_server import running

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
FUNCTION = "<function=look>\n<parameter=city>\n5\n</parameter>\n<parameter=days>\n5\n</parameter>\n</function>"
CODER = "{{ tools | length }}{{ messages | length }}<tool_call>\n<function="
# Mistral's, with the check of ids that its real templates have.
MISTRAL = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids of calls have nine letters and digits') }}{% endif %}{% endfor %}{{ message.content }}"
    "{% endfor %}{% if tools %}[TOOL_CALLS]{% endif %}"
)


# GLM-4-0414's, in short: it shows no other roles, and no field `tool_calls`.
GLM4 = (
    "[gMASK]<sop>{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>\n"
    "{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>{{ m.metadata }}\n{{ m.content }}"
    "{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}<|assistant|>"
)


def serving(model_dir, folder, template: str):
    (folder / "template").write_text(template)
    settings = ServerSettings(chat_template=str(folder / "template"))
    return running(EngineService(LLM(str(model_dir), **OPTIONS).engine, ServiceLimits()), settings)


def test_values_in_plain_text_have_the_types_of_their_schema(tiny_chat_dir, tmp_path) -> None:
    said = {"choice": [f"Wait.\n<tool_call>\n{FUNCTION}\n</tool_call>"]}
    with serving(tiny_chat_dir, tmp_path, CODER) as server:
        body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 300, "structured_outputs": said}
        choice = server.post(CHAT, body).json()["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Wait."
        assert json.loads(call["function"]["arguments"]) == {"city": "5", "days": 5}
        lines = server.post(CHAT, {**body, "stream": True}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert streamed["function"] == call["function"]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}], ids=str)
def test_the_template_takes_the_ids_that_the_server_makes(tiny_chat_dir, tmp_path, choice) -> None:
    call = '[TOOL_CALLS][{"name": "look", "arguments": {}}]'
    with serving(tiny_chat_dir, tmp_path, MISTRAL) as server:
        body = {"messages": HELLO, "tools": [TOOL], "max_tokens": 90, "tool_choice": choice, "temperature": 0}
        how = {"structured_outputs": {"choice": [call]}} if choice == "auto" else {"logit_bias": {"2": 100}}
        message = server.post(CHAT, {**body, **how}).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"}
        body = {"messages": [*HELLO, message, result], "max_tokens": 2}
        assert server.post(CHAT, body).status_code == 200
        message["tool_calls"][0]["id"] = "call_of_another"
        assert server.post(CHAT, body).status_code == 400


def test_calls_and_results_are_in_a_prompt_that_has_other_names_for_them(tiny_chat_dir, tmp_path) -> None:
    function = {"name": "look", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": number, "type": "function", "function": function} for number in ("1", "2")]
    results = [{"role": "tool", "tool_call_id": number, "content": "Sun"} for number in ("1", "2")]
    messages = [*HELLO, {"role": "assistant", "content": "I look.", "tool_calls": calls}, *results]
    with serving(tiny_chat_dir, tmp_path, GLM4) as server:
        said = {"messages": messages, "tools": [TOOL], "add_special_tokens": False}
        tokens = server.post("/tokenize", said).json()["tokens"]
        prompt = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    call = '<|assistant|>look\n{"city": "Oslo"}'
    shown = f"<|assistant|>\nI look.{call}{call}<|observation|>\nSun<|observation|>\nSun<|assistant|>"
    assert prompt.endswith(shown)
