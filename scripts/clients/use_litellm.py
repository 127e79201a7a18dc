"""LiteLLM, for a server of OpenAI's API and for one of Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import litellm

from scripts.clients.shared import (
    KEY,
    MAX_TOKENS,
    MESSAGES,
    QUESTION,
    TIMEOUT_S,
    Colour,
    Place,
    Server,
    WeatherTool,
    require,
    require_text,
)

PACKAGE = "litellm"
litellm.suppress_debug_info = True  # it prints to standard output
FUNCTION = {"name": "weather", "description": "The weather of a place", "parameters": Place.model_json_schema()}
TOOLS = [{"type": "function", "function": FUNCTION}]


def ask(server: Server, messages: list[Any], **options: Any) -> Any:
    how: dict[str, Any] = dict(api_base=server.openai_url, api_key=KEY, timeout=TIMEOUT_S, max_tokens=MAX_TOKENS)
    return litellm.completion(f"openai/{server.model}", messages, **how, **options)


def answer(server: Server) -> None:
    """an answer."""
    require_text(ask(server, MESSAGES).choices[0].message.content)


def streamed(server: Server) -> None:
    """an answer, streamed."""
    require_text("".join(chunk.choices[0].delta.content or "" for chunk in ask(server, MESSAGES, stream=True)))


def loop(server: Server) -> None:
    """a loop with a tool."""
    weather, messages = WeatherTool(), list(MESSAGES)
    asked = ask(server, messages, tools=TOOLS, tool_choice="required").choices[0].message
    require(asked.tool_calls, asked)
    messages.append(asked)
    for call in asked.tool_calls:
        output = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    require_text(ask(server, messages, tools=TOOLS, tool_choice="none").choices[0].message.content)


def structured(server: Server) -> None:
    """`response_format`."""
    Colour.model_validate_json(ask(server, MESSAGES, response_format=Colour).choices[0].message.content)


def responses(server: Server) -> None:
    """`responses`."""
    how: dict[str, Any] = dict(api_base=server.openai_url, api_key=KEY, max_output_tokens=MAX_TOKENS)
    require_text(litellm.responses(input=QUESTION, model=f"openai/{server.model}", **how).output[0].content[0].text)


def messages(server: Server) -> None:
    """Anthropic's messages, a tool."""
    how: dict[str, Any] = dict(api_base=server.url, api_key=KEY, timeout=TIMEOUT_S, max_tokens=MAX_TOKENS)
    options: dict[str, Any] = dict(tools=TOOLS, tool_choice="required")
    message = litellm.completion(f"anthropic/{server.model}", MESSAGES, **how, **options).choices[0].message
    require(message.tool_calls, message)
    Place.model_validate_json(message.tool_calls[0].function.arguments)


CHECKS = [answer, streamed, loop, structured, responses, messages]
