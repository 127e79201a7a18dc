"""The body of `/v1/messages`, Anthropic's, and the chat body that has the same meaning."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from swiftllm.server.api.contract.parsing import Lenient
from swiftllm.server.api.translations.request import TranslatedRequest, not_implemented, required

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


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, "json_schema": {"schema": self.json_schema}}


class OutputConfig(Lenient):
    effort: str | None = None
    format: OutputFormat | None = None


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
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only", "default", "flex", "priority"] | None = None

    def chat_fields(self) -> dict[str, Any]:
        output = self.output_config or OutputConfig()
        choice = self.tool_choice or ToolChoice(type="auto")
        tools = [tool.for_chat(f"tools.{number}") for number, tool in enumerate(self.tools or ())]
        parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
        with_tools = {"tools": tools, "tool_choice": choice.for_chat(), "parallel_tool_calls": parallel}
        thinking = {"enable_thinking": self.thinking.type != "disabled"} if self.thinking else {}
        return {
            "messages": self._messages(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "service_tier": "default" if self.service_tier == "standard_only" else self.service_tier,
            "response_format": output.format.for_chat() if output.format else None,
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {**thinking, **(self.chat_template_kwargs or {})},
            **(with_tools if tools else {}),
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
    """A text that came whole or in blocks.

    Raises:
        ApiError: one of the blocks is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, block in enumerate(content):
        if block.type != "text":
            raise not_implemented(f"{where}.{number}", block.type, param)
        texts.append(block.text or "")
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
        elif block.type == "text":
            texts.append(block.text or "")
        else:
            raise not_implemented(f"{where}.{number}", block.type, "messages")
    return results + ([{"role": message.role, "content": "".join(texts)}] if texts or not results else [])
