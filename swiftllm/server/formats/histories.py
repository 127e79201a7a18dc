"""Calls of a conversation as the templates of their models read them, where that is not OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from swiftllm.server.formats.written_calls import as_text

Message = dict[str, Any]


def with_name_lines(messages: Sequence[Message]) -> list[Message]:
    """As GLM-4's templates read them: each call is a message with the tool's name as its ``metadata``, and the role of
    what it returned is ``observation``. Of messages in OpenAI's form they would show neither."""
    return [found for message in messages for found in split(message)]


def split(message: Message) -> Iterator[Message]:
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        yield {**message, "role": "observation"}
    elif not isinstance(calls, list):
        yield message
    else:
        if message["content"]:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                arguments = function.get("arguments", "{}")
                written = as_text(arguments) if isinstance(arguments, dict) else arguments
                yield {"role": message["role"], "metadata": function.get("name", ""), "content": written}
