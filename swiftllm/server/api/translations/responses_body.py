"""The body of `/v1/responses`, and the chat body that has the same meaning."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from swiftllm.server.api.contract.parsing import Lenient, Whole
from swiftllm.server.api.contract.protocol import TextPart
from swiftllm.server.api.contract.structured import ResponseFormat
from swiftllm.server.api.translations.request import (
    CONTINUED,
    TranslatedRequest,
    not_implemented,
    required,
    text_of,
)
from swiftllm.server.api.translations.responses_tools import (
    NamespacedFunction,
    ResponsesChoice,
    ResponsesTool,
    ResponsesTools,
)

ROLES = {"developer": "system"}  # chat templates know no developers
ASSISTANT = "assistant"

LOGPROBS = "message.output_text.logprobs"

Text = str | list[str | TextPart]
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
"""What answers may have more of. But for the log-probabilities it is of items that these answers do not have."""


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
    namespace: str | None = None
    status: str | None = None

    @property
    def is_begun(self) -> bool:
        """Whether it is a text that the model has begun and not ended, which it then goes on with, as in vLLM."""
        return self.type == "message" and self.role == ASSISTANT and self.status in ("in_progress", "incomplete")


class ResponsesText(Lenient):
    format: ResponseFormat | None = None


class ReasoningOptions(Lenient):
    effort: str | None = None


class ResponsesRequest(TranslatedRequest):
    """OpenAI's. Nothing is stored, so that a conversation comes whole with each request."""

    refused: ClassVar = {
        "background": (False,),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
    }
    names: ClassVar = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    text: ResponsesText | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    include: list[Includable] | None = None
    top_logprobs: Whole | None = None
    """Likely tokens to report at each position of a text. Above 0 it asks for log-probabilities as ``include`` does."""
    previous_response_id: str | None = None
    """Refused: nothing is stored."""

    @cached_property
    def known_tools(self) -> ResponsesTools:
        return ResponsesTools(self.tools or ())

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def chat_fields(self) -> dict[str, Any]:
        tools, messages = self.known_tools, self._messages()
        last = self.input[-1] if isinstance(self.input, list) and self.input else None
        is_begun = last is not None and last.is_begun and messages[-1]["content"].strip()
        return {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "response_format": self.text.format if self.text else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "tools": tools.for_chat or None,
            "tool_choice": tools.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            **({"logprobs": True, "top_logprobs": self.top_logprobs} if self.has_logprobs else {}),
            **(CONTINUED if is_begun else {}),
        }

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation. Reasoning, text and calls of one turn of the model are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input or ()):
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
                function = NamespacedFunction(required(item.name, f"{where}.name", "input"), item.namespace)
                call = {"name": function.flat, "arguments": item.arguments or "{}"}
                call_id = required(item.call_id, f"{where}.call_id", "input")
                calls = from_model().setdefault("tool_calls", [])
                calls.append({"id": call_id, "type": "function", "function": call})
            case "function_call_output":
                call_id = required(item.call_id, f"{where}.call_id", "input")
                output = text_of(required(item.output, f"{where}.output", "input"), f"{where}.output", "input")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case other:
                raise not_implemented(where, other, "input")


class InputTokensRequest(ResponsesRequest):
    """A conversation to count the tokens of; there may be instructions alone."""

    input: str | list[InputItem] | None = None

    def _messages(self) -> list[dict[str, Any]]:
        return required(super()._messages() or None, "input", "input")
