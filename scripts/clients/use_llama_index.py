"""LlamaIndex, as for any server of OpenAI's API."""

from __future__ import annotations

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from scripts.clients.shared import KEY, MAX_TOKENS, QUESTION, Colour, Place, Server, WeatherTool, require, require_text

PACKAGE = "llama-index-llms-openai-like"


def model_of(server: Server) -> OpenAILike:
    known = dict(is_chat_model=True, is_function_calling_model=True, context_window=4096, max_retries=0)
    return OpenAILike(model=server.model, api_base=server.openai_url, api_key=KEY, max_tokens=MAX_TOKENS, **known)


def answer(server: Server) -> None:
    """an answer."""
    require_text(model_of(server).chat([ChatMessage(QUESTION)]).message.content)


def streamed(server: Server) -> None:
    """an answer, streamed."""
    chunks = model_of(server).stream_chat([ChatMessage(QUESTION)])
    require_text("".join(chunk.delta or "" for chunk in chunks))


def loop(server: Server) -> None:
    """a loop with a tool."""
    weather, model = WeatherTool(), model_of(server)

    def call(city: str) -> str:
        return weather(city)

    tool = FunctionTool.from_defaults(call, name="weather", description="The weather of a place", fn_schema=Place)
    asked = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    calls = model.get_tool_calls_from_response(asked)
    history = [ChatMessage(QUESTION), asked.message]
    for wanted in calls:
        output = tool(**wanted.tool_kwargs).content
        history.append(ChatMessage(output, role="tool", additional_kwargs={"tool_call_id": wanted.tool_id}))
    require(weather.cities, asked)
    require_text(model.chat(history).message.content)


def structured(server: Server) -> None:
    """`as_structured_llm`."""
    colour = model_of(server).as_structured_llm(Colour).chat([ChatMessage(QUESTION)]).raw
    require(isinstance(colour, Colour), colour)


CHECKS = [answer, streamed, loop, structured]
