"""The answer of `/v1/responses`: a response object, and the events of its stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.api.answers.chat import logprobs_of, start_chat
from swiftllm.server.api.answers.generation import Generation
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.translations.responses_body import ResponsesRequest
from swiftllm.server.api.translations.responses_tools import NamespacedFunction
from swiftllm.server.api.translations.typed_answer import Event, Item, TypedAnswer

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
