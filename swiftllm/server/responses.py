"""`/v1/responses`, in terms of chat."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fastapi import Request, Response
from pydantic import Field

from swiftllm.core.request import TokenLogprob
from swiftllm.server.answer import Generation
from swiftllm.server.completions import logprobs_of, start_chat
from swiftllm.server.context import ServingContext
from swiftllm.server.parsing import ApiError, Lenient, Whole
from swiftllm.server.protocol import ResponseFormat, TextPart
from swiftllm.server.translation import (
    CONTINUED,
    Event,
    Item,
    TranslatedRequest,
    TypedAnswer,
    log_left_out,
    not_implemented,
    required,
    text_of,
)

# -- tools -------------------------------------------------------------------------------------------------------------
# The tools of `/v1/responses`: functions, alone or in namespaces, and the choice among them in chat's form.


class ResponsesTool(Lenient):
    """A tool: a function, as its fields are beside its type and not below it, or a namespace of tools."""

    type: str
    name: str | None = None
    tools: list[ResponsesTool] | None = None
    """Of a namespace."""


class ResponsesChoice(Lenient):
    """A tool that must be called, or some that may or must be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ResponsesChoice] | None = None


class NamespacedFunction(NamedTuple):
    """A function by its own name, and what its namespace is called, if it is in one."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """Its name for the model, vLLM's."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    @property
    def in_namespace(self) -> dict[str, str]:
        """The field of a call that says so."""
        return {} if self.namespace is None else {"namespace": self.namespace}


class ResponsesTools:
    """The functions among tools; the others, which this server cannot run, are left out with a line in the log."""

    def __init__(self, tools: Sequence[ResponsesTool]) -> None:
        self.functions: dict[str, NamespacedFunction] = {}
        """By their names for the model."""
        self.for_chat: list[dict[str, Any]] = []
        self._add(tools, "tools", None)

    def _add(self, tools: Sequence[ResponsesTool], where: str, namespace: str | None) -> None:
        for number, tool in enumerate(tools):
            place = f"{where}.{number}"
            if tool.type == "function":
                function = NamespacedFunction(required(tool.name, f"{place}.name", "tools"), namespace)
                self.functions[function.flat] = function
                self.for_chat.append(
                    {"type": "function", "function": {**(tool.model_extra or {}), "name": function.flat}}
                )
            elif tool.type == "namespace" and namespace is None:
                self._add(tool.tools or (), f"{place}.tools", required(tool.name, f"{place}.name", "tools"))
            else:
                log_left_out(tool.type)

    def choice(self, chosen: ResponsesChoice | str | None) -> Any:
        """A choice in chat's form."""
        if not isinstance(chosen, ResponsesChoice):
            return chosen
        if chosen.type == "function":
            return as_named(self._found(chosen, "tool_choice.name"))
        if chosen.type != "allowed_tools":
            raise not_implemented("tool_choice", chosen.type, "tool_choice")
        mode = required(chosen.mode, "tool_choice.mode", "tool_choice")
        names = self._allowed(required(chosen.tools, "tool_choice.tools", "tool_choice"))
        if not names and mode == "required":
            message = "tool_choice.tools has no function, and this server calls nothing else"
            raise ApiError(400, message, "tool_choice", "unsupported_parameter")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [as_named(name) for name in names]}}

    def _allowed(self, tools: Sequence[ResponsesChoice]) -> list[str]:
        names: list[str] = []
        for number, tool in enumerate(tools):
            if tool.type == "function":
                names.append(self._found(tool, f"tool_choice.tools.{number}.name"))
            elif tool.type == "namespace":
                names += [flat for flat, function in self.functions.items() if function.namespace == tool.name]
        return names

    def _found(self, chosen: ResponsesChoice, where: str) -> str:
        """A function's name for the model. Its namespace need not be said if no other function has its name."""
        wanted = NamespacedFunction(required(chosen.name, where, "tool_choice"), chosen.namespace)
        if wanted.flat in self.functions or wanted.namespace is not None:
            return wanted.flat
        found = [flat for flat, function in self.functions.items() if function.name == wanted.name]
        return found[0] if len(found) == 1 else wanted.flat


def as_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


# -- the body ----------------------------------------------------------------------------------------------------------
# The body of `/v1/responses`, and the chat body that has the same meaning.

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


# -- the answer --------------------------------------------------------------------------------------------------------
# The answer of `/v1/responses`: a response object, and the events of its stream.

ID_PREFIXES = {"content": "msg", "reasoning": "rs", "tool_call": "fc"}
PART_TYPES = {"content": "output_text", "reasoning": "reasoning_text"}


async def answer_response(context: ServingContext, body: ResponsesRequest, request: Request) -> Response:
    """Answer a request. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    with body.own_names():
        generation = await start_chat(context, body.as_chat(), "resp")
    return await ResponseAnswer(generation, body).respond(request)


class ResponseAnswer(TypedAnswer):
    """Formats the output as a response: messages, reasoning and calls of functions are items of its output."""

    def __init__(self, generation: Generation, asked: ResponsesRequest) -> None:
        super().__init__(generation)
        self._asked = asked
        self._created = int(time.time())
        self._num_events = 0

    def numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.created", "response": self.whole()}
        yield {"type": "response.in_progress", "response": self.whole()}

    def open(self, item: Item) -> Iterator[Event]:
        fields = {**self._item_fields(item, "in_progress"), **({} if item.kind == "tool_call" else {"content": []})}
        yield {"type": "response.output_item.added", "output_index": item.index, "item": fields}
        if item.kind != "tool_call":
            yield {"type": "response.content_part.added", **self._place(item), "part": self._part_of(item)}

    def add(self, item: Item, text: str, entries: Sequence[TokenLogprob]) -> Iterator[Event]:
        logprobs = {"logprobs": self._logprobs(entries)} if item.kind == "content" else {}
        yield {"type": f"{event_name(item)}.delta", **self._place(item), "delta": text, **logprobs}

    def close(self, item: Item) -> Iterator[Event]:
        done = {"type": f"{event_name(item)}.done", **self._place(item)}
        if item.kind == "tool_call":
            yield {**done, "name": self._function(item).name, "arguments": item.text}
        else:
            part = self._part_of(item)
            yield {**done, "text": item.text, **({"logprobs": part["logprobs"]} if item.kind == "content" else {})}
            yield {"type": "response.content_part.done", **self._place(item), "part": part}
        fields = self._item_fields(item, self._item_status(item))
        yield {"type": "response.output_item.done", "output_index": item.index, "item": fields}

    def finish(self) -> Iterator[Event]:
        response = self.whole()
        yield {"type": f"response.{response['status']}", "response": response}

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": self._item_id(item), "output_index": item.index}
        return place if item.kind == "tool_call" else {**place, "content_index": 0}

    def _item_id(self, item: Item) -> str:
        return f"{ID_PREFIXES[item.kind]}_{self.generation.request_id}_{item.index}"

    @property
    def _is_cut(self) -> bool:
        return self.end is not None and self.end.finish_reason == "length"

    def _item_status(self, item: Item) -> str:
        return "incomplete" if self._is_cut and item is self.items[-1] else "completed"

    def _item_fields(self, item: Item, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self._item_id(item), "status": status}
        match item.kind:
            case "content":
                return {"type": "message", **fields, "role": "assistant", "content": [self._part_of(item)]}
            case "reasoning":
                return {"type": "reasoning", **fields, "summary": [], "content": [self._part_of(item)]}
        function = self._function(item)
        call = {"call_id": item.call_id, "name": function.name, "arguments": item.text}
        return {"type": "function_call", **fields, **call, **function.in_namespace}

    def _function(self, item: Item) -> NamespacedFunction:
        """The function that an item calls, as the client knows it."""
        return self._asked.known_tools.functions.get(item.name) or NamespacedFunction(item.name)

    def _part_of(self, item: Item) -> dict[str, Any]:
        """The one part of a message's or of reasoning's content."""
        part: dict[str, Any] = {"type": PART_TYPES[item.kind], "text": item.text}
        return (
            {**part, "annotations": [], "logprobs": self._logprobs(item.logprobs)} if item.kind == "content" else part
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return logprobs_of(self.generation.context.tokenizer, entries) if entries else []

    def whole(self) -> dict[str, Any]:
        asked, body, is_over = self._asked, self.generation.body, self.end is not None
        return {
            "id": self.generation.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if is_over and not self._is_cut else None,
            "status": "incomplete" if self._is_cut else "completed" if is_over else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "model": self.generation.context.model_name,
            "output": [self._item_fields(item, self._item_status(item)) for item in self.items] if is_over else [],
            "usage": self._usage() if is_over else None,
            "service_tier": body.tier_served or "default",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": as_given(asked, "metadata") or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "text": as_given(asked, "text") or {"format": {"type": "text"}},
            "tool_choice": as_given(asked, "tool_choice") or "auto",
            "tools": as_given(asked, "tools") or [],
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


def event_name(item: Item) -> str:
    return "response.function_call_arguments" if item.kind == "tool_call" else f"response.{PART_TYPES[item.kind]}"


def as_given(asked: ResponsesRequest, name: str) -> Any:
    """A field as the client sent it; numbers that JSON cannot express are null."""
    return json.loads(asked.model_dump_json(include={name}, exclude_unset=True, by_alias=True)).get(name)
