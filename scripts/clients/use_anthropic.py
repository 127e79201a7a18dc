"""Anthropic's own client."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import Anthropic, AsyncAnthropic

from scripts.clients.shared import (
    KEY,
    MAX_TOKENS,
    MESSAGES,
    TIMEOUT_S,
    Colour,
    Place,
    Server,
    WeatherTool,
    require,
    require_text,
)

PACKAGE = "anthropic"
TOOLS = [{"name": "weather", "description": "The weather of a place", "input_schema": Place.model_json_schema()}]


def client_of(server: Server) -> Anthropic:
    return Anthropic(base_url=server.url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


def how(server: Server) -> dict[str, Any]:
    return dict(model=server.model, system="Be brief", max_tokens=MAX_TOKENS)


def answer(server: Server) -> None:
    """an answer, and `count_tokens`."""
    client = client_of(server)
    message = client.messages.create(**how(server), messages=MESSAGES)
    require_text(message.content[0].text)
    count = client.messages.count_tokens(model=server.model, system="Be brief", messages=MESSAGES).input_tokens
    usage = message.usage
    require(count == usage.input_tokens + (usage.cache_read_input_tokens or 0), usage)


def answer_async(server: Server) -> None:
    """an answer, async, streamed."""

    async def run() -> str:
        client = AsyncAnthropic(base_url=server.url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
        async with client, client.messages.stream(**how(server), messages=MESSAGES) as stream:
            text = "".join([text async for text in stream.text_stream])
            require((await stream.get_final_message()).content[0].text == text, text)
            return text

    require_text(asyncio.run(run()))


def continued(server: Server) -> None:
    """a turn to continue, and a document of text."""
    source = {"type": "text", "media_type": "text/plain", "data": "It is sunny."}
    asked = [{"type": "document", "source": source, "title": "Weather"}, {"type": "text", "text": "How is it?"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "It is"}]
    message = client_of(server).messages.create(**how(server), messages=messages)
    require_text(message.content[0].text)


def parse(server: Server) -> None:
    """`parse`."""
    message = client_of(server).messages.parse(**how(server), messages=MESSAGES, output_format=Colour)
    require(isinstance(message.parsed_output, Colour), message)


def loop(server: Server) -> None:
    """a loop with a tool, streamed."""
    weather, messages = WeatherTool(), list(MESSAGES)
    options: dict[str, Any] = {**how(server), "tools": TOOLS}
    with client_of(server).messages.stream(**options, messages=messages, tool_choice={"type": "any"}) as stream:
        asked = stream.get_final_message()
    uses = [block for block in asked.content if block.type == "tool_use"]
    require(uses and asked.stop_reason == "tool_use", asked)
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": weather(**use.input)} for use in uses]
    messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": results}]
    last = client_of(server).messages.create(**options, messages=messages, tool_choice={"type": "none"})
    require_text(last.content[0].text)


CHECKS = [answer, answer_async, continued, parse, loop]
