"""`/v1/responses` through the `openai` client, beside the same conversation in chat."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from swiftllm.server.parsing import ApiError, parse_body
from swiftllm.server.responses import ResponsesRequest
from tests.swiftllm.server.api.test_errors import error_of

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
HOW = {"model": "tiny-chat", "temperature": 0}


class Answer(BaseModel):
    colour: Literal["red", "blue"]


def chat_of(**body: Any) -> dict[str, Any]:
    """The chat body of a body, in JSON's values and without what is not set."""
    chat = parse_body(ResponsesRequest, json.dumps({"input": "a", **body}).encode()).as_chat()
    return chat.model_dump(exclude_unset=True, by_alias=True)


def test_a_response_is_the_answer_of_chat(server):
    conversation = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hello"}]
    chat = server.post(CHAT, {**HOW, "messages": conversation, "max_tokens": 7}).json()
    client = server.client()
    parts = [{"type": "input_text", "text": "Hel"}, {"type": "input_text", "text": "lo"}]
    for given in ("Hello", [{"role": "user", "content": parts}]):
        how = {**HOW, "instructions": "Be brief", "input": given, "max_output_tokens": 7}
        response = client.responses.create(**how)
        assert response.output_text == chat["choices"][0]["message"]["content"] != ""
        assert response.usage.total_tokens == chat["usage"]["total_tokens"]
        assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("bias", [{}, {"2": 100}], ids=["cut", "empty"])
def test_the_events_of_a_stream_make_the_response(server, bias):
    how = {**HOW, "input": "Hello", "max_output_tokens": 5, "extra_body": {"logit_bias": bias, "request_id": "same"}}
    whole = server.client().responses.create(**how)
    events = list(server.client().responses.create(**how, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed" if bias else "incomplete"]
    deltas = ["output_text.delta"] * (len(names) - 8)  # a part of a character is no text
    assert bool(deltas) is not bool(bias) and names == [*opening, *deltas, *closing]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-4].text
    last, first = events[-1].response.to_dict(), events[0].response.to_dict()
    assert first["output"] == [] and first["status"] == "in_progress" and first["id"] == last["id"]
    times = ("created_at", "completed_at")
    assert {**last, **dict.fromkeys(times)} == {**whole.to_dict(), **dict.fromkeys(times)}


def test_parsed_and_streamed_by_the_clients_own_helpers(server, llm):
    blanks = {llm.engine.tokenizer.encode(blank)[0]: -100 for blank in " \n"}  # which this model would go on with
    how = {**HOW, "input": "Red or blue?", "text_format": Answer, "extra_body": {"logit_bias": blanks}}
    parsed = server.client().responses.parse(**how).output_parsed
    with server.client().responses.stream(**how) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_parsed == parsed and streamed.status == "completed"

    async def run() -> str:
        async with server.async_client() as client:
            return (await client.responses.create(**HOW, input="Hi", max_output_tokens=3)).output_text

    assert asyncio.run(run())


def test_items_of_a_turn_become_one_message():
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": "What time?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {**call, "call_id": "1"},
        {**call, "call_id": "2", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "Noon"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Late"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Tell"}]},
        {"role": "assistant", "content": "Noon"},
        {"role": "assistant", "content": "Late"},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ]
    assert chat_of(input=items, instructions="Be kind")["messages"] == [
        {"role": "system", "content": "Be kind"},
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "What time?"},
        {"role": "assistant", "content": "I look", "reasoning_content": "Look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "Noon"},
        {"role": "tool", "tool_call_id": "2", "content": "Late"},
        {"role": "assistant", "content": "Noon", "reasoning_content": "Tell"},
        {"role": "assistant", "content": "Late"},
    ]


def test_parameters_become_those_of_chat():
    schema = {"type": "object"}
    chat = chat_of(
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}, "verbosity": "low"},
        max_output_tokens=5, top_p=0.5, seed=3, service_tier="flex", logit_bias={"5": 1}, store=True, n=1,
    )  # fmt: skip
    assert chat.pop("response_format")["schema"] == schema
    del chat["messages"]
    assert chat == {"max_tokens": 5, "top_p": 0.5, "seed": 3, "service_tier": "flex", "logit_bias": {5: 1.0}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp-1"), ("conversation", "c"), ("background", True), ("prompt", {"id": "p"}),
        ("n", 2), ("prompt_logprobs", 1),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(server, field, value):
    error = error_of(server.post(RESPONSES, {"input": "a", field: value}))
    assert error["param"] == field and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": []}, "input", "input"),
        ({"input": [{"role": "user"}]}, "input.0.content: Field required", "input"),
        ({"input": [{"content": "a"}]}, "input.0.role: Field required", "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0: type 'item_reference' is not implemented", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'", "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id: Field required", "input"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens=0 must be at least 1", "max_output_tokens"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "format.schema: Field required", "text.format"),
        ({"input": "a", "text": {"format": {"type": "text", "schema": {}}}}, "a schema needs the type", "text.format"),
        ({"input": "a", "text": {"format": {"type": "json_object"}}, "response_format": {"type": "json_object"}},
         "give one of text.format and response_format", "text.format"),
        ({"input": "a", "max_tokens": 3, "max_output_tokens": 4}, "give one of", "max_output_tokens"),
        ({"input": "a", "include": ["message"]}, "include.0: Input should be", "include"),
        ({"input": "a", "top_logprobs": 21}, "top_logprobs: Input should be less than or equal to 20", "top_logprobs"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice=required needs tools", "tool_choice"),
        ({"input": "a" * 600}, "maximum context length is 512", "input"),
    ],
)  # fmt: skip
def test_errors_name_this_apis_fields(server, body, message, param):
    error = error_of(server.post(RESPONSES, body))
    assert message in error["message"] and error["param"] == param


@pytest.mark.parametrize("stream", ["false", "true"])
def test_fields_that_come_back_are_json_even_if_they_were_not(server, stream):
    fields = '"metadata": {"a": NaN, "b": 1}, "tools": [], "text": {"format": {"type": "text", "x": -1e999}}'
    body = f'{{"input": "a", "max_output_tokens": 2, "stream": {stream}, {fields}}}'
    answer = server.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200 and "NaN" not in answer.text and "Infinity" not in answer.text
    assert '"metadata":{"a":null,"b":1}' in answer.text and '"x":null' in answer.text


def test_a_schema_that_does_not_compile_is_refused_by_its_field(server):
    text_format = {"type": "json_schema", "name": "a", "schema": {"type": "no such"}}
    error = error_of(server.post(RESPONSES, {"input": "a", "text": {"format": text_format}}))
    assert error["param"] == "text.format" and error["code"] == "invalid_grammar"


def test_a_stream_that_fails_ends_in_an_error_that_the_client_raises(server, monkeypatch):
    from swiftllm.server.translation import TypedAnswer

    written = TypedAnswer.chunk_event

    def fail_later(answer, choice, piece):
        if choice.text.num_tokens > 2:
            raise ApiError(503, "gone", code="shutdown")
        return written(answer, choice, piece)

    monkeypatch.setattr(TypedAnswer, "chunk_event", fail_later)
    with pytest.raises(openai.APIError, match="gone"):
        list(server.client().responses.create(**HOW, input="Hi", max_output_tokens=9, stream=True))


@pytest.mark.parametrize(
    "asked", [{"include": ["message.output_text.logprobs"], "top_logprobs": 2}, {"top_logprobs": 2}]
)
def test_log_probabilities_of_a_text_are_those_of_chat(server, asked):
    hello = [{"role": "user", "content": "Hello"}]
    chat = server.post(CHAT, {**HOW, "messages": hello, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}).json()
    expected = chat["choices"][0]["logprobs"]["content"]
    how = {**HOW, "input": "Hello", "max_output_tokens": 6, **asked}
    client = server.client().responses
    (part,) = client.create(**how).output[0].content
    assert [entry.to_dict() for entry in part.logprobs] == expected and len(expected) == 6
    events = list(client.create(**how, stream=True))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.to_dict() for entry in done.logprobs] == expected
    assert [entry.token for entry in deltas] == [entry["token"] for entry in expected[: len(deltas)]]


def test_include_of_items_that_no_answer_has_changes_nothing(server):
    how = {**HOW, "input": "Hello", "max_output_tokens": 2, "include": ["web_search_call.results"]}
    assert server.client().responses.create(**how).output[0].content[0].logprobs == []


def test_input_tokens_are_counted(server):
    how = {"model": "tiny-chat", "instructions": "Be brief", "input": "Hello"}
    used = server.client().responses.create(**how, max_output_tokens=1).usage.input_tokens
    assert server.client().responses.input_tokens.count(**how).input_tokens == used
    alone = server.client().responses.input_tokens.count(instructions="Be brief")
    assert alone.object == "response.input_tokens" and alone.input_tokens < used
    assert error_of(server.post("/v1/responses/input_tokens", {}))["param"] == "input"


def test_a_text_that_was_cut_is_continued_as_in_vllm():
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]}
    asked = {"role": "user", "content": "What time?"}
    for status in ("incomplete", "in_progress"):
        assert chat_of(input=[asked, {**said, "status": status}])["continue_final_message"] is True
    for last in ({**said, "status": "completed"}, said, {**asked, "status": "incomplete"}):
        assert "continue_final_message" not in chat_of(input=[asked, last])


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_an_output_follows_the_schema_of_its_form(server, kind):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    for where in ({"schema": schema}, {"json_schema": {"name": "a", "schema": schema}}):
        body = {"input": "a", "text": {"format": {"type": kind, **where}}}
        text = server.post(RESPONSES, body).json()["output"][0]["content"][0]["text"]
        assert json.loads(text) == {"a": 1}
