"""Messages of a conversation, as clients send them back and as chat templates expect them."""

from __future__ import annotations

import json

import pytest

from swiftllm.server.parsing import parse_body
from swiftllm.server.protocol import ChatMessage


def rendered(**fields: object) -> dict:
    return parse_body(ChatMessage, json.dumps({"role": "assistant", **fields}).encode()).for_template()


@pytest.mark.parametrize("calls", [[], None])
def test_a_message_without_calls_has_no_field_for_them(calls) -> None:
    """As in vLLM: Llama 3's template takes the field alone for a call."""
    assert rendered(content="a", tool_calls=calls) == {"role": "assistant", "content": "a"}


def test_nulls_and_empty_lists_of_a_history_say_nothing() -> None:
    """Clients dump messages with all fields that the API has."""
    nulls = dict.fromkeys(("refusal", "audio", "function_call", "name", "tool_call_id", "annotations"))
    for content in (None, "", [], [{"type": "text", "text": None}], [{"type": "refusal", "refusal": None}]):
        assert rendered(content=content, **nulls) == {"role": "assistant", "content": ""}
    assert rendered(content=[{"type": "text", "text": "a"}, "b"], name="x")["content"] == "ab"


@pytest.mark.parametrize(
    ("given", "seen"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), (..., {}), ({}, {}), ("no JSON", "no JSON")],
)
def test_arguments_are_an_object_for_templates(given: object, seen: object) -> None:
    function = {"name": "f"} if given is ... else {"name": "f", "arguments": given}
    message = rendered(tool_calls=[{"id": "1", "type": "function", "function": function}])
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": seen}}]
