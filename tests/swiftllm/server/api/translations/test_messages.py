"""`/v1/messages`, beside the same conversation in chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from httpx_sse import connect_sse

from swiftllm.server.anthropic import MessagesRequest
from swiftllm.server.parsing import parse_body
from tests.swiftllm.server.api.test_errors import HELLO, error_of

MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"
HOW = {"model": "tiny-chat", "temperature": 0, "max_tokens": 7}


def chat_of(messages: Any = HELLO, **body: Any) -> dict[str, Any]:
    """The chat body of a body, in JSON's values and without what is not set."""
    chat = parse_body(MessagesRequest, json.dumps({"messages": messages, **body}).encode()).as_chat()
    return chat.model_dump(exclude_unset=True, by_alias=True)


def streamed(server, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The names of a stream's events, and the message that they make."""
    names: list[str] = []
    message: dict[str, Any] = {}
    with connect_sse(server.http, "POST", MESSAGES, json={**body, "stream": True}) as source:
        for sse in source.iter_sse():
            event = sse.json()
            assert event["type"] == sse.event
            names.append(sse.event)
            match event:
                case {"type": "message_start"}:
                    message = event["message"]
                    assert message["content"] == [] and message["stop_reason"] is None
                case {"type": "content_block_start", "index": index, "content_block": block}:
                    assert index == len(message["content"])
                    message["content"].append(block)
                case {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}:
                    message["content"][index]["text"] += text
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    message |= delta | {"usage": usage}
    return names, message


def test_a_message_is_the_answer_of_chat_streamed_or_not(server):
    conversation = [{"role": "system", "content": "Be\n\nbrief"}, *HELLO]
    chat = server.post(CHAT, {**HOW, "messages": conversation}).json()
    blocks = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}]
    body = {**HOW, "system": blocks, "messages": HELLO, "request_id": "same"}
    message = server.post(MESSAGES, body).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert message["stop_reason"] == "max_tokens" and message["stop_sequence"] is None
    usage = message["usage"]
    assert usage["output_tokens"] == 7
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    names, by_events = streamed(server, body)
    assert {**by_events, "usage": usage} == message
    opening, closing = ["message_start", "content_block_start"], ["content_block_stop", "message_delta", "message_stop"]
    deltas = ["content_block_delta"] * (len(names) - 5)  # a part of a character is no text
    assert deltas and names == [*opening, *deltas, *closing]


def test_it_says_why_it_stopped(server):
    body = {**HOW, "messages": HELLO}
    text = server.post(MESSAGES, body).json()["content"][0]["text"]
    stopped = server.post(MESSAGES, {**body, "stop_sequences": ["no", text[2:4]]}).json()
    assert stopped["stop_reason"] == "stop_sequence" and stopped["stop_sequence"] == text[2:4]
    assert stopped["content"][0]["text"] == text[: text.index(text[2:4])]
    for how in ({"logit_bias": {"2": 100}}, {"logit_bias": {"2": 100}, "stop_token_ids": [2]}):
        ended = server.post(MESSAGES, {**body, **how}).json()
        assert ended["stop_reason"] == "end_turn" and ended["stop_sequence"] is None
        assert ended["content"] == [{"type": "text", "text": ""}]


def test_outputs_follow_a_schema(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    config = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    message = server.post(MESSAGES, {**HOW, "messages": HELLO, "max_tokens": 50, **config}).json()
    assert json.loads(message["content"][0]["text"])["a"] in (1, 2)


def test_tokens_are_counted(server):
    body = {"messages": HELLO, "system": "Be brief"}
    count = server.post(f"{MESSAGES}/count_tokens", body).json()
    usage = server.post(MESSAGES, {**HOW, **body, "cache_salt": "alone"}).json()["usage"]
    assert count == {"input_tokens": usage["input_tokens"]}


def test_blocks_of_a_message_become_those_of_chat():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Look", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "2", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "Noon"},
            {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "Late"}]},
            {"type": "text", "text": "And now?"},
        ]},
        {"role": "assistant", "content": "Noon"},
    ]  # fmt: skip
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    assert chat_of(messages)["messages"] == [
        {"role": "user", "content": "What time?"},
        {"role": "assistant", "content": "I look", "reasoning_content": "Look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Noon"},
        {"role": "tool", "tool_call_id": "2", "content": "Late"},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Noon"},
    ]


def test_parameters_become_those_of_chat():
    chat = chat_of(
        max_tokens=5, top_k=3, stop_sequences=["a"], thinking={"type": "disabled"}, service_tier="standard_only",
        metadata={"user_id": "u"}, chat_template_kwargs={"thoughts": "b"},
    )  # fmt: skip
    del chat["messages"]
    options = {"enable_thinking": False, "thoughts": "b"}
    expected = {"max_tokens": 5, "top_k": 3, "stop": ["a"], "service_tier": "default"}
    assert chat == {**expected, "chat_template_kwargs": options}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"messages": []}, "messages", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0: type", "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, ".id: F", "messages"),
        ({"system": [{"type": "image"}]}, "system.0: type 'image'", "system"),
        ({"stop_sequences": [""]}, "stop_sequences must be", "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1", "max_tokens"),
        ({"mcp_servers": [{"url": "a"}]}, "mcp_servers is not implemented", "mcp_servers"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: type 'bash_20250124'", "tools"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required", "tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}}, "", "output_config.format"),
        ({"chat_template_kwargs": "a"}, "should be an object", "chat_template_kwargs"),
        ({"model": "other"}, "does not exist", "model"),
    ],
)  # fmt: skip
def test_errors_have_anthropics_form_and_name_its_fields(server, body, message, param):
    answer = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 1, **body})
    error = error_of(answer, 404 if param == "model" else 400)
    assert answer.json()["type"] == "error" and message in error["message"] and error["param"] == param
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")


def test_a_turn_of_the_model_at_the_end_is_continued(server):
    """As Anthropic's API does; the prompt is that of chat's `continue_final_message`."""
    begun = {"role": "assistant", "content": "My name is"}
    chat = {"messages": [*HELLO, begun], "continue_final_message": True, "add_generation_prompt": False}
    expected = server.post(CHAT, {**HOW, **chat}).json()
    for content in ("My name is", [{"type": "text", "text": "My "}, {"type": "text", "text": "name is"}]):
        body = {"messages": [*HELLO, {"role": "assistant", "content": content}]}
        message = server.post(MESSAGES, {**HOW, **body}).json()
        assert message["content"][0]["text"] == expected["choices"][0]["message"]["content"]
        count = server.post(f"{MESSAGES}/count_tokens", body).json()["input_tokens"]
        assert count == expected["usage"]["prompt_tokens"]


def test_a_turn_of_the_model_without_text_is_answered():
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for content in (" ", [], [use], [{"type": "text", "text": "I look"}, use]):
        assert "continue_final_message" not in chat_of([*HELLO, {"role": "assistant", "content": content}])


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "title": None}, "D"),
        ({"type": "document", "source": {"type": "content", "content": "D"}, "title": "T", "context": "C"}, "T\nC\nD"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "D"}]}}, "D"),
        ({"type": "search_result", "source": "S", "title": "T", "content": [{"type": "text", "text": "D"}]}, "T\nS\nD"),
    ],
)
def test_documents_of_text_are_text(block, text):
    (message,) = chat_of([{"role": "user", "content": [block, {"type": "text", "text": "?"}]}])["messages"]
    assert message["content"] == f"{text}?"
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    (message,) = chat_of([{"role": "user", "content": [result]}])["messages"]
    assert message["content"] == text


def test_output_format_is_an_older_name_of_the_form(server):
    fields = {"output_format": {"type": "json_schema", "schema": {"const": 1}}}
    assert server.post(MESSAGES, {**HOW, "messages": HELLO, **fields}).json()["content"][0]["text"] == "1"
    both = {**fields, "output_config": {"format": fields["output_format"]}}
    bad = {"output_format": {"type": "json_schema", "schema": {"type": "no such"}}}
    for body in (both, bad):
        assert error_of(server.post(MESSAGES, {**HOW, "messages": HELLO, **body}))["param"] == "output_format"
