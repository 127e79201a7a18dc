"""pydantic-ai over chat, over responses, and over Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from anthropic import AsyncAnthropic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from scripts.clients.shared import KEY, MAX_TOKENS, QUESTION, Colour, Server, WeatherTool, require, require_text

PACKAGE = "pydantic-ai-slim"


def chat_model(server: Server) -> Model:
    return OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.openai_url, api_key=KEY))


def agent_of(model: Model, **options: Any) -> Agent[None, Any]:
    return Agent(model, retries=0, model_settings={"max_tokens": MAX_TOKENS}, **options)


def answer(server: Server) -> None:
    """chat, an answer, streamed."""

    async def run() -> str:
        async with agent_of(chat_model(server)).run_stream(QUESTION) as result:
            return await result.get_output()

    require_text(asyncio.run(run()))


def loop_of(model: Model) -> None:
    """A tool, and an output whose form forces a call: the model may call either, the last ends the loop."""
    weather = WeatherTool()
    agent = agent_of(model, output_type=Colour)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a place."""
        return weather(city)

    colour = agent.run_sync(QUESTION).output
    require(isinstance(colour, Colour), colour)


def loop(server: Server) -> None:
    """chat, a loop with a tool and `output_type`."""
    loop_of(chat_model(server))


def native(server: Server) -> None:
    """chat, `NativeOutput`."""
    colour = agent_of(chat_model(server), output_type=NativeOutput(Colour)).run_sync(QUESTION).output
    require(isinstance(colour, Colour), colour)


def responses(server: Server) -> None:
    """responses, a loop with a tool and `output_type`."""
    loop_of(OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.openai_url, api_key=KEY)))


def messages(server: Server) -> None:
    """Anthropic's messages, a loop with a tool and `output_type`."""
    client = AsyncAnthropic(base_url=server.url, api_key=KEY)
    loop_of(AnthropicModel(server.model, provider=AnthropicProvider(anthropic_client=client)))


CHECKS = [answer, loop, native, responses, messages]
