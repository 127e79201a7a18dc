"""The body of `/v1/responses`, and the chat body that has the same meaning."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from swiftllm.server.api.contract.parsing import Lenient
from swiftllm.server.api.contract.protocol import TextPart
from swiftllm.server.api.translations.request import TranslatedRequest, not_implemented, required, text_of

ROLES = {"developer": "system"}  # chat templates know no developers
ASSISTANT = "assistant"

Text = str | list[str | TextPart]


class InputItem(Lenient):
    """An item of a conversation: a message, the model's reasoning, its call of a function, or what that returned."""

    type: str = "message"
    role: str | None = None
    content: Text | None = None
    name: str | None = None
    arguments: str | None = None
    call_id: str | None = None
    output: Text | None = None
    summary: Text | None = None


class TextFormat(Lenient):
    """The form of the answer: chat's `response_format`, with the schema beside its name."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        schema = required(self.json_schema, "text.format.schema", "text")
        return {"type": self.type, "json_schema": {"schema": schema, "strict": self.strict}}


class ResponsesText(Lenient):
    format: TextFormat | None = None


class ReasoningOptions(Lenient):
    effort: str | None = None


class ResponsesTool(Lenient):
    """A tool: a function, as its fields are beside its type and not below it."""

    type: str
    name: str | None = None


class ResponsesRequest(TranslatedRequest):
    """OpenAI's. Nothing is stored, so that a conversation comes whole with each request."""

    refused: ClassVar = {
        "background": (False,),
        "conversation": (),
        "include": ([], ["reasoning.encrypted_content"]),
        "previous_response_id": (),
        "prompt": (),
        "top_logprobs": (0,),
    }
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: ResponsesText | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesTool | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    previous_response_id: str | None = None
    """Refused: nothing is stored."""

    def chat_fields(self) -> dict[str, Any]:
        text_format = self.text.format if self.text else None
        return {
            "messages": self._messages(),
            "max_tokens": self.max_output_tokens,
            "response_format": text_format.for_chat() if text_format else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            **self._tool_fields(),
        }

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        tools = []
        for number, tool in enumerate(self.tools):
            if tool.type != "function":
                raise not_implemented(f"tools.{number}", tool.type, "tools")
            name = required(tool.name, f"tools.{number}.name", "tools")
            tools.append({"type": "function", "function": {"name": name, **(tool.model_extra or {})}})
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesTool):
            if choice.type != "function":
                raise not_implemented("tool_choice", choice.type, "tool_choice")
            choice = {"type": "function", "function": {"name": choice.name}}
        return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation. Reasoning, text and calls of one turn of the model are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            self._add(messages, item, f"input.{number}")
        return messages

    def _add(self, messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
        def from_model(*fields: str) -> dict[str, Any]:
            """The model's last message, or a new one if there is none, or one that already has such fields."""
            last = messages[-1] if messages else {}
            if last.get("role") != ASSISTANT or any(last.get(field) for field in fields):
                messages.append({"role": ASSISTANT, "content": ""})
            return messages[-1]

        match item.type:
            case "message":
                text = text_of(required(item.content, f"{where}.content", "input"), f"{where}.content", "input")
                role = required(item.role, f"{where}.role", "input")
                if role == ASSISTANT:
                    from_model("content", "tool_calls")["content"] = text
                else:
                    messages.append({"role": ROLES.get(role, role), "content": text})
            case "reasoning":
                parts = item.content or item.summary or ()
                thoughts = "".join(part if isinstance(part, str) else part.text or "" for part in parts)
                if thoughts:
                    from_model("content", "tool_calls", "reasoning_content")["reasoning_content"] = thoughts
            case "function_call":
                call = {"name": required(item.name, f"{where}.name", "input"), "arguments": item.arguments or "{}"}
                call_id = required(item.call_id, f"{where}.call_id", "input")
                calls = from_model().setdefault("tool_calls", [])
                calls.append({"id": call_id, "type": "function", "function": call})
            case "function_call_output":
                call_id = required(item.call_id, f"{where}.call_id", "input")
                output = text_of(required(item.output, f"{where}.output", "input"), f"{where}.output", "input")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case other:
                raise not_implemented(where, other, "input")
