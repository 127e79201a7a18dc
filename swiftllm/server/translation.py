"""What the translated APIs, `/v1/messages` and `/v1/responses`, have in common."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from fastapi import Request
from fastapi.responses import Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.answer import AnyAnswer, Choice, Generation, as_json
from swiftllm.server.output_text import Piece, parts_of
from swiftllm.server.parsing import ApiError, as_api_error, parse_body
from swiftllm.server.protocol import ChatRequest, GenerationRequest, TextPart, refuse
from swiftllm.server.tool_calls import Part

# -- bodies ------------------------------------------------------------------------------------------------------------
# What the bodies of the translated APIs have in common.

logger = logging.getLogger(__name__)

MAX_LEFT_OUT_LOGGED = 100  # bounds the log: clients choose these types
_left_out: set[str] = set()  # types already logged

CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}
"""Chat's fields for a conversation whose last message is to be continued."""
REFUSED: Mapping[str, tuple[Any, ...]] = {"n": (1,), "prompt_logprobs": (), "return_token_ids": (False,)}


class TranslatedRequest(GenerationRequest):
    """A body of another API. The fields of :class:`GenerationRequest` are taken as in chat."""

    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change the answer and are not implemented, each with its values without effect."""
    names: ClassVar[Mapping[str, str]] = {}
    """Chat's fields by the names that this API has for them."""

    def check_fields(self) -> None:
        for name, harmless in {**REFUSED, **self.refused}.items():
            refuse(name, getattr(self, name, None), harmless)
        super().check_fields()

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat body that has the same meaning.

        Raises:
            ApiError: something in it is not implemented, or missing.
        """
        raise NotImplementedError

    def as_chat(self) -> ChatRequest:
        """The chat body with the same meaning."""
        shared = self.model_fields_set & GenerationRequest.model_fields.keys() - REFUSED.keys() - {"stream_options"}
        own = {name: value for name, value in self.chat_fields().items() if value is not None}
        for name in self.names.keys() & shared & own.keys():
            if getattr(self, name) is not None:
                own_name = self.name_of(name)
                raise ApiError(400, f"give one of {own_name} and {name}", own_name, "invalid_value")
        chat = parse_body(ChatRequest, {name: getattr(self, name) for name in shared} | own)
        chat.check_fields()
        return chat

    def name_of(self, field: str | None) -> str | None:
        """This API's name of a field of chat, if that is another one."""
        return self.names.get(field or "")

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors raised inside say this API's names of fields."""
        try:
            yield
        except ApiError as error:
            name = self.name_of(error.param)
            if name is not None:
                error.message, error.param = error.message.replace(error.param or "", name, 1), name
            raise


def required(value: Any, where: str, param: str) -> Any:
    """A value that must be there."""
    if value is None:
        raise ApiError(400, f"{where}: Field required", param, "missing")
    return value


def not_implemented(where: str, kind: str, param: str) -> ApiError:
    """The error for an item, block or tool of a type that this server does not have."""
    return ApiError(400, f"{where}: type {kind[:100]!r} is not implemented", param, "unsupported_parameter")


def log_left_out(kind: str) -> None:
    """Say in the log, once for each type, that tools of a type are left out: coding agents send some by default."""
    kind = kind[:100]
    if kind not in _left_out and len(_left_out) < MAX_LEFT_OUT_LOGGED:
        _left_out.add(kind)
        logger.warning(
            "a request has a tool of type %r, which is left out: only functions are done (logged once)", kind
        )


def text_of(content: str | Sequence[str | TextPart] | None, where: str, param: str) -> str:
    """A text that came whole or in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif part.content is not None:
            texts.append(part.content)
        else:
            raise not_implemented(where, part.type, param)
    return "".join(texts)


# -- answers -----------------------------------------------------------------------------------------------------------
# Answers whose streams have typed events: an output is a list of items, each opened, continued and closed.

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
