"""`/v1/messages`, Anthropic's API, in terms of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import Request, Response
from pydantic import Field

from swiftllm.core.request import TokenLogprob
from swiftllm.server.completions import start_chat
from swiftllm.server.context import ServingContext
from swiftllm.server.parsing import ApiError, Lenient
from swiftllm.server.protocol import ResponseFormat, ServiceTier
from swiftllm.server.tool_calls import object_of
from swiftllm.server.translation import (
    CONTINUED,
    Event,
    Item,
    TranslatedRequest,
    TypedAnswer,
    not_implemented,
    required,
)

# -- the body ----------------------------------------------------------------------------------------------------------
# The body of `/v1/messages`, Anthropic's, and the chat body that has the same meaning.

TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Block(Lenient):
    """A part of a message: text, the model's thinking, its use of a tool, or what that returned."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: str | DocumentSource | None = None
    """Of a document; of a search result it is a name."""
    title: str | None = None
    context: str | None = None

    def as_text(self, where: str, param: str = "messages") -> str:
        """The text of a block that is one, such as a document of text."""
        match self.type, self.source:
            case "text", _:
                return self.text or ""
            case "document", DocumentSource(type="text"):
                text = required(self.source.data, f"{where}.source.data", param)
            case "document", DocumentSource(type="content"):
                text = text_of(self.source.content, f"{where}.source.content", param)
            case "document", DocumentSource():
                raise not_implemented(f"{where}.source", self.source.type, param)
            case "search_result", _:
                text = text_of(self.content, f"{where}.content", param)
            case _:
                raise not_implemented(where, self.type, param)
        about = (self.title, self.context, self.source if isinstance(self.source, str) else None)
        return "\n".join([*(word for word in about if word), text])


class DocumentSource(Lenient):
    """Where the content of a document is."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class InputMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def for_chat(self) -> str | dict[str, Any]:
        if self.type != "tool":
            return TOOL_CHOICES[self.type]
        name = required(self.name, "tool_choice.name", "tool_choice")
        return {"type": "function", "function": {"name": name}}


class MessagesTool(Lenient):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def for_chat(self, where: str) -> dict[str, Any]:
        if self.type not in (None, "custom"):
            raise not_implemented(where, self.type or "", "tools")
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        function["parameters"] = required(self.input_schema, f"{where}.input_schema", "tools")
        return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


class Thinking(Lenient):
    type: str


class OutputConfig(Lenient):
    effort: str | None = None
    format: ResponseFormat | None = None


class MessagesRequest(TranslatedRequest):
    """Anthropic's. ``max_tokens`` may be missing."""

    refused: ClassVar = {"container": (), "mcp_servers": ([],)}
    names: ClassVar = {
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "stop": "stop_sequences",
    }

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = None
    """An older name of ``output_config.format``."""
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: ServiceTier | Literal["standard_only"] | None = None

    def name_of(self, field: str | None) -> str | None:
        return "output_format" if field == "response_format" and self.output_format else super().name_of(field)

    def chat_fields(self) -> dict[str, Any]:
        output = self.output_config or OutputConfig()
        if output.format and self.output_format:
            raise ApiError(400, "give one of output_config.format and output_format", "output_format", "invalid_value")
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = [tool.for_chat(f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
        with_tools = {"tools": tools, "tool_choice": choice.for_chat(), "parallel_tool_calls": parallel}
        thinking = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}
        messages = self._messages()
        return {
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "service_tier": "default" if self.service_tier == "standard_only" else self.service_tier,
            "response_format": output.format or self.output_format,
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {**thinking, **(self.chat_template_kwargs or {})},
            **(with_tools if self.tools or self.tool_choice else {}),
            **(CONTINUED if is_begun(messages[-1]) else {}),
        }

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": text_of(self.system, "system", "system")})
        for number, message in enumerate(self.messages):
            where = f"messages.{number}.content"
            if message.role == "assistant":
                messages.append(from_model(message.content, where))
            else:
                messages.extend(from_user(message, where))
        return messages


def text_of(content: str | list[Block] | None, where: str, param: str = "messages") -> str:
    """A text that came whole or in blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [block.as_text(f"{where}.{number}", param) for number, block in enumerate(content)]
    return "\n\n".join(texts) if param == "system" else "".join(texts)


def from_model(content: str | list[Block], where: str) -> dict[str, Any]:
    """A message of the model: its thinking, its text and its calls are fields of one message in chat."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    text, thoughts, calls = "", "", []
    for number, block in enumerate(content):
        match block.type:
            case "text":
                text += block.text or ""
            case "thinking":
                thoughts += block.thinking or ""
            case "redacted_thinking":
                pass  # nobody but its author can read it
            case "tool_use":
                name = required(block.name, f"{where}.{number}.name", "messages")
                call_id = required(block.id, f"{where}.{number}.id", "messages")
                function = {"name": name, "arguments": json.dumps(block.input or {})}
                calls.append({"id": call_id, "type": "function", "function": function})
            case other:
                raise not_implemented(f"{where}.{number}", other, "messages")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"reasoning_content": thoughts} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def from_user(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """Messages of chat: one for each result of a tool, and one for the text beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts = [], []
    for number, block in enumerate(message.content):
        if block.type == "tool_result":
            call_id = required(block.tool_use_id, f"{where}.{number}.tool_use_id", "messages")
            output = text_of(block.content, f"{where}.{number}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            texts.append(block.as_text(f"{where}.{number}"))
    return results + ([{"role": message.role, "content": "".join(texts)}] if texts or not results else [])


def is_begun(message: dict[str, Any]) -> bool:
    """Whether a conversation that ends with this message of the model goes on with it, as in Anthropic's API."""
    return message["role"] == "assistant" and bool(message["content"].strip()) and not message.get("tool_calls")


# -- the answer --------------------------------------------------------------------------------------------------------
# The answer of `/v1/messages`: a message, and the events of its stream.

BLOCK_TYPES = {"content": "text", "reasoning": "thinking", "tool_call": "tool_use"}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def answer_message(context: ServingContext, body: MessagesRequest, request: Request) -> Response:
    """Answer a request. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    with body.own_names():
        generation = await start_chat(context, body.as_chat(), "msg")
    return await MessageAnswer(generation).respond(request)


class MessageAnswer(TypedAnswer):
    """Formats the output as a message: text, thinking and uses of tools are blocks of its content."""

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.whole()}

    def open(self, item: Item) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": item.index, "content_block": block_of(item)}

    def add(self, item: Item, text: str, entries: Sequence[TokenLogprob]) -> Iterator[Event]:
        match item.kind:
            case "content":
                delta = {"type": "text_delta", "text": text}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": item.index, "delta": delta}

    def close(self, item: Item) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": item.index}

    def finish(self) -> Iterator[Event]:
        end = {name: self.whole()[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def whole(self) -> dict[str, Any]:
        reason, stop = (None, None) if self.end is None else (self.end.finish_reason, self.end.stop_reason)
        has_stop = reason == "stop" and isinstance(stop, str)
        return {
            "id": self.generation.request_id,
            "type": "message",
            "role": "assistant",
            "model": self.generation.context.model_name,
            "content": [block_of(item) for item in self.items],
            "stop_reason": reason and ("stop_sequence" if has_stop else STOP_REASONS.get(reason, "end_turn")),
            "stop_sequence": stop if has_stop else None,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens read from the prefix cache are counted apart."""
        cached = self.num_cached_tokens
        counts = {"input_tokens": self.num_prompt_tokens - cached, "output_tokens": self.num_output_tokens}
        return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


def block_of(item: Item) -> dict[str, Any]:
    """A block of the content; arguments that are no object, as when they are cut, are none."""
    block: dict[str, Any] = {"type": BLOCK_TYPES[item.kind]}
    match item.kind:
        case "content":
            return {**block, "text": item.text}
        case "reasoning":
            return {**block, "thinking": item.text, "signature": ""}
    return {**block, "id": item.call_id, "name": item.name, "input": object_of(item.text) or {}}
