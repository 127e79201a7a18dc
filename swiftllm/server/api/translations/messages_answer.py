"""The answer of `/v1/messages`: a message, and the events of its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.api.answers.chat import start_chat
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.translations.messages_body import MessagesRequest
from swiftllm.server.api.translations.typed_answer import Event, Item, TypedAnswer
from swiftllm.server.formats.json_text import object_of

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
