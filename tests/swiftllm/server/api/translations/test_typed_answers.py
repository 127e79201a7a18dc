"""Reasoning, text and calls of tools become items and blocks, in events and in whole answers alike."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swiftllm.server.anthropic import MessageAnswer
from swiftllm.server.output_text import Piece
from swiftllm.server.protocol import ChatRequest
from swiftllm.server.responses import ResponseAnswer, ResponsesRequest
from swiftllm.server.tool_calls import Part
from swiftllm.server.translation import TypedAnswer

PARTS = [
    [Part("reasoning", "Look "), Part("reasoning", "it up")],
    [Part("reasoning", ".")],
    [],
    [Part("content", "I look"), Part("tool_call", "", 0, "call-a", "weather")],
    [Part("tool_call", '{"city": ', 0), Part("tool_call", '"Paris"}', 0)],
    [Part("tool_call", "", 1, "call-b", "weather"), Part("tool_call", '{"city": "Rome"}', 1)],
    [Part("content", "Wait"), Part("content", "")],
]


def pieces_of(parts: list[list[Part]], reason: str) -> list[Piece]:
    kinds = [{part.kind for part in of_piece} for of_piece in parts]
    pieces = [
        Piece("", token_ids=[5], parts=of_piece, num_reasoning_tokens=int("reasoning" in of_kinds))
        for of_piece, of_kinds in zip(parts, kinds, strict=True)
    ]
    return [*pieces, Piece("", finish_reason=reason, token_ids=[2], parts=[])]


def answer_of(kind: type[TypedAnswer]) -> TypedAnswer:
    choice = SimpleNamespace(
        prompt=SimpleNamespace(token_ids=[1] * 7),
        stream=SimpleNamespace(num_cached_tokens=4),
        text=SimpleNamespace(num_tokens=8),
    )
    generation = SimpleNamespace(
        choices=[choice],
        request_id="r",
        body=ChatRequest(messages=[{"role": "user", "content": "a"}]),
        context=SimpleNamespace(model_name="m", caches_prefixes=True),
    )
    asked = [ResponsesRequest(input="a")] if kind is ResponseAnswer else []
    return kind(generation, *asked)


def events_of(answer: TypedAnswer, pieces: list[Piece]) -> list[dict[str, Any]]:
    """The events of a stream; each says its type twice."""
    text = answer.opening_events(answer.choice)
    text += "".join(answer.chunk_event(answer.choice, piece) for piece in pieces)
    text += answer.closing_events()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_response_has_an_item_for_each_part():
    answer = answer_of(ResponseAnswer)
    events = events_of(answer, pieces_of(PARTS, "tool_calls"))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Look it up."}] and output[0]["summary"] == []
    assert output[1]["content"][0]["text"] == "I look" and output[4]["content"][0]["text"] == "Wait"
    calls = [(item["call_id"], item["name"], json.loads(item["arguments"])["city"]) for item in output[2:4]]
    assert calls == [("call-a", "weather", "Paris"), ("call-b", "weather", "Rome")]
    assert len({item["id"] for item in output}) == 5
    assert all(item["status"] == "completed" for item in output)
    usage = events[-1]["response"]["usage"]
    assert (
        usage["input_tokens_details"]["cached_tokens"] == 4 and usage["output_tokens_details"]["reasoning_tokens"] == 2
    )


def test_the_events_of_a_response_build_its_items_one_after_the_other():
    events = events_of(answer_of(ResponseAnswer), pieces_of(PARTS, "tool_calls"))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        match event["type"].removeprefix("response.").split("."):
            case ["output_item", "added"]:
                assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
                assert event["item"].get("content") in (None, [])
                items.append(event["item"])
                texts.append("")
            case [_, "delta"]:
                assert event["output_index"] == len(items) - 1 and event["item_id"] == items[-1]["id"]
                texts[-1] += event["delta"]
            case ["output_text" | "reasoning_text", "done"]:
                assert event["text"] == texts[-1]
            case ["function_call_arguments", "done"]:
                assert event["arguments"] == texts[-1]
            case ["output_item", "done"]:
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
    assert items == events[-1]["response"]["output"]


def test_a_message_has_a_block_for_each_part():
    answer = answer_of(MessageAnswer)
    events = events_of(answer, pieces_of(PARTS, "tool_calls"))
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks) == len(texts)
                blocks.append(block)
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(blocks) - 1
                texts = [*texts[:index], "".join(texts[index:]) + list(delta.values())[1]]
            case {"type": "content_block_stop", "index": index}:
                assert index == len(blocks) - 1
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert texts == ["Look it up.", "I look", '{"city": "Paris"}', '{"city": "Rome"}', "Wait"]
    whole = answer.whole()
    assert whole["stop_reason"] == "tool_use"
    assert [{**block, "input": {}} if "input" in block else block["type"] for block in whole["content"]] == [
        "thinking", "text", blocks[2], blocks[3], "text",
    ]  # fmt: skip
    assert [block["input"] for block in whole["content"][2:4]] == [{"city": "Paris"}, {"city": "Rome"}]
    assert whole["usage"]["input_tokens"] == 3 and whole["usage"]["cache_read_input_tokens"] == 4


@pytest.mark.parametrize(
    ("arguments", "given"), [('{"a": "\\ud800"}', "\ud800"), ('{"a": 1e999}', sys.float_info.max), ('{"a": NaN}', None)]
)
def test_a_whole_message_can_be_sent_whatever_its_calls_hold(arguments, given):
    answer = answer_of(MessageAnswer)
    answer.generation.read_outputs = read_outputs = AsyncMock()
    parts = [[Part("tool_call", arguments, 0, "call-a", "weather")]]
    read_outputs.side_effect = lambda on_piece, _: [on_piece(answer.choice, p) for p in pieces_of(parts, "tool_calls")]
    response = asyncio.run(answer.whole_response(SimpleNamespace(receive=None)))
    (block,) = json.loads(response.body, parse_constant=pytest.fail)["content"]
    assert block["input"].get("a") == given and response.media_type == "application/json"


@pytest.mark.parametrize("kind", [ResponseAnswer, MessageAnswer])
def test_a_call_that_is_cut_says_so(kind):
    answer = answer_of(kind)
    events = events_of(answer, pieces_of([PARTS[3], [Part("tool_call", '{"city": "Par', 0)]], "length"))
    if kind is ResponseAnswer:
        item = events[-1]["response"]["output"][-1]
        assert events[-1]["type"] == "response.incomplete"
        assert item["arguments"] == '{"city": "Par' and item["status"] == "incomplete"
    else:
        assert answer.whole()["stop_reason"] == "max_tokens" and answer.whole()["content"][-1]["input"] == {}


def test_only_the_last_item_of_a_cut_answer_is_incomplete():
    """As OpenAI's: an item is `completed` once another has begun."""
    parts = [[Part("reasoning", "Look it up")], [Part("content", "I lo")]]
    answer = answer_of(ResponseAnswer)
    events = events_of(answer, pieces_of(parts, "length"))
    response = events[-1]["response"]
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["completed", "incomplete"]
    assert [item["status"] for item in answer.whole()["output"]] == ["completed", "incomplete"]


def test_an_answer_says_when_it_was_completed_only_if_it_was():
    """OpenAI: `completed_at` is set only where the status is `completed`."""
    for reason, status in (("stop", "completed"), ("length", "incomplete")):
        answer = answer_of(ResponseAnswer)
        assert answer.whole()["status"] == "in_progress" and answer.whole()["completed_at"] is None
        events_of(answer, pieces_of([[Part("content", "I")]], reason))
        whole = answer.whole()
        assert whole["status"] == status and (whole["completed_at"] is not None) == (status == "completed")
        assert (whole["incomplete_details"] is None) == (status == "completed")


def test_reasoning_tokens_are_those_of_pieces_with_reasoning():
    answer = answer_of(ResponseAnswer)
    reasoning = Piece("", token_ids=[5, 6, 7], parts=[Part("reasoning", "Look")], num_reasoning_tokens=3)
    content = Piece("", token_ids=[8, 9], parts=[Part("content", "I")])
    events_of(answer, [reasoning, reasoning, content, *pieces_of([], "stop")])
    assert answer.whole()["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}


def test_fields_that_were_asked_for_come_back_with_their_defaults():
    """OpenAI's response object: what was left out or null has the value that was used."""
    for given, used in ((None, True), (True, True), (False, False)):
        for asked in ({"parallel_tool_calls": given}, {} if given is None else {"parallel_tool_calls": given}):
            answer = ResponseAnswer(answer_of(ResponseAnswer).generation, ResponsesRequest(input="a", **asked))
            assert answer.whole()["parallel_tool_calls"] is used
    whole = answer.whole()
    assert (whole["tool_choice"], whole["tools"], whole["metadata"]) == ("auto", [], {})
    assert whole["text"] == {"format": {"type": "text"}} and whole["truncation"] == "disabled"
