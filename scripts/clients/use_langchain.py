"""LangChain's chat models: OpenAI's for chat, and Anthropic's."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from scripts.clients.shared import KEY, MAX_TOKENS, QUESTION, Colour, Place, Server, WeatherTool, require, require_text

PACKAGE = "langchain-openai"


def model_of(server: Server, **options: Any) -> ChatOpenAI:
    how: dict[str, Any] = dict(base_url=server.openai_url, api_key=KEY, max_retries=0)
    return ChatOpenAI(model=server.model, max_tokens=MAX_TOKENS, **how, **options)


def answer(server: Server) -> None:
    """an answer."""
    require_text(model_of(server).invoke(QUESTION).content)


def streamed(server: Server) -> None:
    """an answer, streamed."""
    require_text("".join(chunk.content for chunk in model_of(server).stream(QUESTION)))


def loop(server: Server) -> None:
    """`bind_tools`, a loop with a tool."""
    weather = WeatherTool()

    @tool
    def get_weather(place: Place) -> str:
        """The weather of a place."""
        return weather(place.city)

    model, messages = model_of(server), [HumanMessage(QUESTION)]
    asked = model.bind_tools([get_weather], tool_choice="any").invoke(messages)
    require(asked.tool_calls and not asked.invalid_tool_calls, asked)
    results = [get_weather.invoke(call) for call in asked.tool_calls]
    require(weather.cities and all(isinstance(result, ToolMessage) for result in results), results)
    require_text(model.bind_tools([get_weather], tool_choice="none").invoke([*messages, asked, *results]).content)


def structured(server: Server, method: str) -> None:
    chain = model_of(server).with_structured_output(Colour, method=method)
    colour = chain.invoke(QUESTION)
    require(isinstance(colour, Colour), colour)


def json_schema(server: Server) -> None:
    """`with_structured_output`, `json_schema`."""
    structured(server, "json_schema")


def function_calling(server: Server) -> None:
    """`with_structured_output`, `function_calling`."""
    structured(server, "function_calling")


def json_mode(server: Server) -> None:
    """`with_structured_output`, `json_mode`."""
    chain = model_of(server).with_structured_output(Colour, method="json_mode", include_raw=True)
    raw = chain.invoke('Answer with {"colour": "red"} or {"colour": "blue"} in JSON.')["raw"]
    require(isinstance(json.loads(raw.content), dict), raw.content)  # which object is the model's affair


def responses(server: Server) -> None:
    """`use_responses_api`, streamed."""
    chunks = list(model_of(server, use_responses_api=True).stream(QUESTION))
    require_text("".join(chunk.text for chunk in chunks))


CHECKS = [answer, streamed, loop, json_schema, function_calling, json_mode, responses]
