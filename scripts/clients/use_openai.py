"""OpenAI's own client, for chat and for responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI, OpenAI, pydantic_function_tool

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

PACKAGE = "openai"
TOOLS = [pydantic_function_tool(Place, name="weather")]
FUNCTION = {"type": "function", "name": "weather", "strict": True, "parameters": TOOLS[0]["function"]["parameters"]}


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=server.openai_url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)


def chat(server: Server) -> None:
    """chat."""
    answer = client_of(server).chat.completions.create(model=server.model, messages=MESSAGES, max_tokens=MAX_TOKENS)
    require_text(answer.choices[0].message.content)


def chat_async(server: Server) -> None:
    """chat, async, streamed."""

    async def run() -> str:
        async with AsyncOpenAI(base_url=server.openai_url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0) as client:
            how: dict[str, Any] = dict(model=server.model, messages=MESSAGES, max_tokens=MAX_TOKENS, stream=True)
            chunks = await client.chat.completions.create(**how)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    require_text(asyncio.run(run()))


def chat_parse(server: Server) -> None:
    """chat, `parse`."""
    answer = client_of(server).chat.completions.parse(model=server.model, messages=MESSAGES, response_format=Colour)
    require(isinstance(answer.choices[0].message.parsed, Colour), answer)


def chat_tools(server: Server) -> None:
    """chat, a loop with a tool."""
    create, weather, messages = client_of(server).chat.completions.create, WeatherTool(), list(MESSAGES)
    how: dict[str, Any] = dict(model=server.model, tools=TOOLS, max_tokens=MAX_TOKENS, parallel_tool_calls=False)
    asked = create(**how, messages=messages, tool_choice="required").choices[0]
    require(asked.finish_reason == "tool_calls" and asked.message.tool_calls, asked)
    messages.append(asked.message.to_dict())
    for call in asked.message.tool_calls or ():
        output = weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    answer = create(**how, messages=messages, tool_choice="none").choices[0].message
    require(answer.tool_calls is None, answer)
    require_text(answer.content)


def chat_tools_streamed(server: Server) -> None:
    """chat, a tool, streamed."""
    how: dict[str, Any] = dict(
        model=server.model, messages=MESSAGES, tools=TOOLS, max_tokens=MAX_TOKENS, parallel_tool_calls=False
    )
    with client_of(server).chat.completions.stream(**how, tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    require(message.tool_calls and isinstance(message.tool_calls[0].function.parsed_arguments, Place), message)


def responses(server: Server) -> None:
    """responses, and `input_tokens`."""
    client, how = client_of(server).responses, dict(model=server.model, instructions="Be brief", input=QUESTION)
    answer = client.create(**how, max_output_tokens=MAX_TOKENS)
    require_text(answer.output_text)
    require(client.input_tokens.count(**how).input_tokens == answer.usage.input_tokens, answer.usage)


def responses_logprobs(server: Server) -> None:
    """responses, log-probabilities."""
    how: dict[str, Any] = dict(include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    (part,) = client_of(server).responses.create(model=server.model, input=QUESTION, **how).output[0].content
    require(part.logprobs and all(len(entry.top_logprobs) == 2 for entry in part.logprobs), part)


def responses_agent(server: Server) -> None:
    """responses, the tools of a coding agent."""
    space = {"type": "namespace", "name": "mcp__x", "description": "Of the weather", "tools": [FUNCTION]}
    how: dict[str, Any] = dict(max_output_tokens=MAX_TOKENS, parallel_tool_calls=False, tool_choice="required")
    answer = client_of(server).responses.create(
        model=server.model, input=QUESTION, tools=[{"type": "web_search"}, space], **how
    )
    (call,) = answer.output
    require((call.type, call.namespace, call.name) == ("function_call", "mcp__x", "weather"), answer)
    WeatherTool()(**json.loads(call.arguments))


def responses_parse(server: Server) -> None:
    """responses, `parse`, streamed."""
    with client_of(server).responses.stream(model=server.model, input=QUESTION, text_format=Colour) as stream:
        answer = stream.get_final_response()
    require(isinstance(answer.output_parsed, Colour), answer)


def responses_tools(server: Server) -> None:
    """responses, a loop with a tool, streamed."""
    weather, items = WeatherTool(), [{"role": "user", "content": QUESTION}]
    how: dict[str, Any] = dict(
        model=server.model, tools=[FUNCTION], max_output_tokens=MAX_TOKENS, parallel_tool_calls=False
    )
    with client_of(server).responses.stream(**how, input=items, tool_choice="required") as stream:
        output = stream.get_final_response().output
    calls = [item for item in output if item.type == "function_call"]
    require(calls, output)
    items += [item.to_dict() for item in output]
    for call in calls:
        result = weather(**json.loads(call.arguments))
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    require_text(client_of(server).responses.create(**how, input=items, tool_choice="none").output_text)


CHECKS = [
    chat, chat_async, chat_parse, chat_tools, chat_tools_streamed,
    responses, responses_logprobs, responses_agent, responses_parse, responses_tools,
]  # fmt: skip
