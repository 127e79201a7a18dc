"""Answers whose streams have typed events: an output is a list of items, each opened, continued and closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from swiftllm.server.api.errors import as_api_error
from swiftllm.server.api.generation import Choice, Generation
from swiftllm.server.api.output_text import Piece
from swiftllm.server.api.responses import EventStream, as_json

Event = dict[str, Any]


@dataclass
class Item:
    """A part of an output: text, reasoning, or a call of a tool, whose text are its arguments."""

    kind: Literal["text", "reasoning", "call"]
    index: int
    texts: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class TypedAnswer(ABC):
    """Formats the one output of a request. An answer that is no stream is what the last event of a stream says."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.choice = generation.choices[0]
        self.items: list[Item] = []
        self.end: Piece | None = None
        """The last piece, once there is one: it says why the output ended."""

    async def respond(self, request: Request) -> Response:
        """The HTTP response: a stream if the client asked for one, else one JSON object.

        Raises:
            ClientDisconnect, RequestFailed: see :meth:`Generation.read_outputs`; only without a stream.
        """
        if self.generation.body.stream:
            return EventStream(self)

        def on_piece(choice: Choice, piece: Piece) -> None:
            self.chunk_event(choice, piece)

        await self.generation.read_outputs(on_piece, request.receive)
        return JSONResponse(self.whole())

    # -- what the APIs differ in ------------------------------------------------------------------------------------

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer so far."""

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """The events before the first item."""

    @abstractmethod
    def open(self, item: Item) -> Iterator[Event]:
        """The events of a new item."""

    @abstractmethod
    def add(self, item: Item, text: str) -> Iterator[Event]:
        """The events of text that an item has got."""

    @abstractmethod
    def close(self, item: Item) -> Iterator[Event]:
        """The events of an item that is complete."""

    @abstractmethod
    def finish(self) -> Iterator[Event]:
        """The events after the last item."""

    def numbered(self, event: Event) -> Event:
        """An event as it is sent."""
        return event

    # -- a stream of events -----------------------------------------------------------------------------------------

    def opening_events(self, choice: Choice) -> str:
        return self._written(self.begin())

    def chunk_event(self, choice: Choice, piece: Piece) -> str:
        return self._written(self._events_of(piece))

    def closing_events(self) -> str:
        return self._written(self.finish())

    def error_event(self, error: Exception) -> str:
        """The last event of a stream that failed."""
        return self._written(iter([{"type": "error", **as_api_error(error).body()}]))

    def _written(self, events: Iterator[Event]) -> str:
        return "".join(f"event: {event['type']}\ndata: {as_json(self.numbered(event))}\n\n" for event in events)

    def _events_of(self, piece: Piece) -> Iterator[Event]:
        if piece.text:
            yield from self._continue("text", piece.text)
        if piece.finish_reason is not None:
            self.end = piece
            if not self.items:  # clients expect at least a text
                yield from self._continue("text", "")
            yield from self.close(self.items[-1])

    def _continue(self, kind: Literal["text", "reasoning", "call"], text: str) -> Iterator[Event]:
        if not self.items or self.items[-1].kind != kind:
            if self.items:
                yield from self.close(self.items[-1])
            self.items.append(Item(kind, len(self.items)))
            yield from self.open(self.items[-1])
        if text:
            self.items[-1].texts.append(text)
            yield from self.add(self.items[-1], text)

    # -- counts -----------------------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.choice.prompt.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return self.choice.stream.num_cached_tokens if self.generation.context.caches_prefixes else 0

    @property
    def num_output_tokens(self) -> int:
        return self.choice.text.num_tokens
