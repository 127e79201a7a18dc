"""Answers whose streams have typed events: an output is a list of items, each opened, continued and closed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from fastapi.responses import Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.api.answers.answer import AnyAnswer, as_json
from swiftllm.server.api.answers.generation import Choice, Generation
from swiftllm.server.api.errors import as_api_error
from swiftllm.server.formats.output_text import Piece, parts_of
from swiftllm.server.formats.parts import Part

Event = dict[str, Any]


@dataclass
class Item:
    """Neighbouring parts of one kind. The text of a call are its arguments."""

    kind: Literal["content", "reasoning", "tool_call"]
    index: int
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of a text's tokens, if the client asked for them."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class TypedAnswer(AnyAnswer):
    """Formats the one output of a request. An answer that is no stream is what the last event of a stream says."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.choice = generation.choices[0]
        self.items: list[Item] = []
        self.end: Piece | None = None
        """The last piece, once there is one: it says why the output ended."""
        self.num_reasoning_tokens = 0
        self._logprobs_held: list[TokenLogprob] = []  # of tokens that have given no text yet

    async def whole_response(self, request: Request) -> Response:
        await self.generation.read_outputs(self.chunk_event, request.receive)
        return Response(as_json(self.whole()), media_type="application/json")  # may have half a surrogate pair

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
    def add(self, item: Item, text: str, entries: Sequence[TokenLogprob]) -> Iterator[Event]:
        """The events of text that an item has got, with its tokens' log-probabilities."""

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
        return self._written(iter([{"type": "error", **as_api_error(error).body()}]))

    def _written(self, events: Iterator[Event]) -> str:
        return "".join(f"event: {event['type']}\ndata: {as_json(self.numbered(event))}\n\n" for event in events)

    def _events_of(self, piece: Piece) -> Iterator[Event]:
        parts = parts_of(piece)
        self.num_reasoning_tokens += piece.num_reasoning_tokens
        self._logprobs_held += piece.logprobs
        told = [part for part in parts if part.text or part.call_id]
        for part in told[:-1]:
            yield from self._continue(part, ())
        if told:
            held, self._logprobs_held = self._logprobs_held, []
            yield from self._continue(told[-1], held)
        if piece.finish_reason is not None:
            self.end = piece
            if not self.items:  # clients expect at least a text
                yield from self._open(Part("content", ""))
            self.items[-1].logprobs += self._logprobs_held  # of the token that ended it
            yield from self.close(self.items[-1])

    def _continue(self, part: Part, entries: Sequence[TokenLogprob]) -> Iterator[Event]:
        last = self.items[-1] if self.items else None
        if last is None or last.kind != part.kind or part.call_id:
            if last is not None:
                yield from self.close(last)
            yield from self._open(part)
        if part.text:
            self.items[-1].texts.append(part.text)
            self.items[-1].logprobs += entries
            yield from self.add(self.items[-1], part.text, entries)

    def _open(self, part: Part) -> Iterator[Event]:
        self.items.append(Item(part.kind, len(self.items), part.call_id, part.name))
        yield from self.open(self.items[-1])

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
