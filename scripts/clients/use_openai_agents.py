"""OpenAI's agents, which ask `/v1/responses` by default."""

from __future__ import annotations

import asyncio

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from scripts.clients.shared import (
    KEY,
    MAX_TOKENS,
    QUESTION,
    TIMEOUT_S,
    Colour,
    Place,
    Server,
    WeatherTool,
    require,
    require_text,
)

PACKAGE = "openai-agents"


def agent_of(server: Server, **options: object) -> Agent:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=server.openai_url, api_key=KEY, timeout=TIMEOUT_S, max_retries=0)
    settings = ModelSettings(max_tokens=MAX_TOKENS, tool_choice="required" if "tools" in options else None)
    model = OpenAIResponsesModel(server.model, client)
    return Agent(name="Assistant", instructions="Be brief", model=model, model_settings=settings, **options)


def answer(server: Server) -> None:
    """an answer."""
    require_text(Runner.run_sync(agent_of(server), QUESTION).final_output)


def structured(server: Server) -> None:
    """`output_type`."""
    output = Runner.run_sync(agent_of(server, output_type=Colour), QUESTION).final_output
    require(isinstance(output, Colour), output)


def loop(server: Server) -> None:
    """a loop with a tool."""
    weather = WeatherTool()

    @function_tool
    def get_weather(place: Place) -> str:
        """The weather of a place."""
        return weather(place.city)

    require_text(Runner.run_sync(agent_of(server, tools=[get_weather]), QUESTION).final_output)
    require(weather.cities, weather.cities)


def loop_streamed(server: Server) -> None:
    """a loop with a tool, streamed."""
    weather = WeatherTool()

    @function_tool
    def get_weather(place: Place) -> str:
        """The weather of a place."""
        return weather(place.city)

    async def run() -> tuple[list[str], object]:
        result = Runner.run_streamed(agent_of(server, tools=[get_weather]), QUESTION)
        return [event.type async for event in result.stream_events()], result.final_output

    types, output = asyncio.run(run())
    require(weather.cities and {"raw_response_event", "run_item_stream_event"} <= set(types), types)
    require_text(output)


CHECKS = [answer, structured, loop, loop_streamed]
