"""The answer to a generation request: one JSON object, or a stream of server-sent events.

An event costs one f-string and the JSON of its text: the rest is formatted before the first token.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from swiftllm.core.request import TokenLogprob
from swiftllm.model.folder.tokenizer import Tokenizer
from swiftllm.server.api.answers.event_writer import SERVER_SEND, EventWriter
from swiftllm.server.api.answers.generation import Choice, Generation
from swiftllm.server.api.errors import as_api_error
from swiftllm.server.formats.output_text import Piece
from swiftllm.server.service.token_streams import RequestFailed

logger = logging.getLogger(__name__)

as_json = json.JSONEncoder(separators=(",", ":")).encode
text_as_json = json.encoder.encode_basestring_ascii  # the same of a text, in a fifth of the time
MANY_LOGPROBS = 100  # with twenty likely tokens each these take 2 ms to format
LEAST_LOGPROB = -9999.0  # vLLM's value for a probability of zero


class AnyAnswer(ABC):
    """An answer: one JSON object, or the events of each moment as text."""

    generation: Generation

    async def respond(self, request: Request) -> Response:
        """The HTTP response: a stream if the client asked for one, else one JSON object.

        Raises:
            ClientDisconnect, RequestFailed: see :meth:`Generation.read_outputs`; only without a stream.
        """
        return EventStream(self) if self.generation.body.stream else await self.whole_response(request)

    @abstractmethod
    async def whole_response(self, request: Request) -> Response:
        """All outputs in one JSON object, once they are complete."""

    @abstractmethod
    def opening_events(self, choice: Choice) -> str:
        """The events of a stream before the first text of a choice; may be empty."""

    @abstractmethod
    def chunk_event(self, choice: Choice, piece: Piece) -> str:
        """The events of one piece."""

    @abstractmethod
    def closing_events(self) -> str:
        """The last events of a stream."""

    @abstractmethod
    def error_event(self, error: Exception) -> str:
        """The last event of a stream that failed."""


class Answer(AnyAnswer):
    """Formats the outputs of one request for one endpoint of OpenAI's."""

    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.body = generation.body
        self.tokenizer = generation.context.tokenizer
        self._has_usage = self.body.usage_wanted.include_usage
        self._has_usage_always = self._has_usage and self.body.usage_wanted.continuous_usage_stats
        self._has_token_ids = self.body.return_token_ids
        self._envelope = {
            "id": generation.request_id,
            "created": int(time.time()),
            "model": generation.context.model_name,
            "system_fingerprint": generation.context.fingerprint,
        }
        if self.body.tier_served is not None:
            self._envelope["service_tier"] = self.body.tier_served
        envelope = as_json({"object": self.chunk_object_name, **self._envelope})
        self._chunk_head = f'data: {envelope[:-1]},"choices":['

    # -- what endpoints differ in -----------------------------------------------------------------------------------

    @abstractmethod
    def chunk_text(self, piece: Piece) -> str:
        """The text of a chunk as JSON fields, without braces."""

    @abstractmethod
    def text_fields(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The fields of a choice that hold its text."""

    @abstractmethod
    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, list[Any]]:
        """The log-probabilities of the next tokens of a choice, of which ``piece`` has some."""

    def prompt_pieces(self, choice: Choice) -> list[Piece]:
        """Pieces to put before the text of a choice: its prompt if it is echoed."""
        return []

    def opening_events(self, choice: Choice) -> str:
        return "".join(self.chunk_event(choice, piece) for piece in self.prompt_pieces(choice))

    def output_details(self) -> dict[str, Any]:
        """What is said of the output tokens beside their number, once all are there."""
        return {}

    def extra_fields(self) -> dict[str, Any]:
        """Further fields of an answer that is not a stream."""
        return {}

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """The field `prompt_logprobs` of a choice in vLLM's form; null if the client did not ask for it."""
        if self.body.prompt_logprobs is None:
            return {"prompt_logprobs": None}
        return {"prompt_logprobs": [None, *map(self._ranked, choice.stream.prompt_logprobs)]}

    def _ranked(self, entry: TokenLogprob) -> dict[int, dict[str, Any]]:
        """The prompt's token first, then the most likely ones."""
        top = ((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1))
        return {
            token_id: {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(self.tokenizer, token_id)}
            for token_id, logprob, rank in ((entry.token_id, entry.logprob, entry.rank), *top)
        }

    def prompt_token_ids(self, choice: Choice) -> dict[str, list[int]]:
        """The field `prompt_token_ids` of a choice in vLLM's form, if the client asked for it."""
        return {"prompt_token_ids": list(choice.prompt.token_ids)} if self.body.return_token_ids else {}

    # -- one JSON object --------------------------------------------------------------------------------------------

    async def whole_response(self, request: Request) -> Response:
        pieces: list[list[Piece]] = [[] for _ in self.generation.choices]

        def on_piece(choice: Choice, piece: Piece) -> None:
            pieces[choice.index].append(piece)

        await self.generation.read_outputs(on_piece, request.receive)
        if sum(len(choice.stream.prompt_logprobs) for choice in self.generation.choices) > MANY_LOGPROBS:
            return await self.generation.context.run_in_thread(self._build_json, pieces)
        return self._build_json(pieces)

    def _build_json(self, pieces: Sequence[Sequence[Piece]]) -> Response:
        choices = [self._choice_fields(*pair) for pair in zip(self.generation.choices, pieces, strict=True)]
        body = {"object": self.object_name, **self._envelope, "choices": choices, "usage": self._total_usage()}
        return JSONResponse(body | self.extra_fields())

    def _choice_fields(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        pieces = [*self.prompt_pieces(choice), *pieces]
        parts = [self.logprobs(choice, piece) for piece in pieces if piece.logprobs]
        logprobs = {name: [value for part in parts for value in part[name]] for name in (parts[0] if parts else ())}
        fields = {
            "index": choice.index,
            **self.text_fields(choice, pieces),
            "logprobs": logprobs or None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if self.body.return_token_ids:
            fields["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return fields

    # -- a stream of events -----------------------------------------------------------------------------------------

    def chunk_event(self, choice: Choice, piece: Piece) -> str:
        _, entries, finish_reason, stop_reason, token_ids, *_ = piece
        end = '"logprobs":null,"finish_reason":null,"stop_reason":null'
        if entries or finish_reason is not None:
            logprobs = as_json(self.logprobs(choice, piece)) if entries else "null"
            end = f'"logprobs":{logprobs},"finish_reason":{as_json(finish_reason)},"stop_reason":{as_json(stop_reason)}'
        if self._has_token_ids:
            end += f',"token_ids":{as_json(token_ids)}'
        return self.choice_event(choice, f"{self.chunk_text(piece)},{end}")

    def choice_event(self, choice: Choice, fields: str, beside: str = "") -> str:
        """An event with these fields, JSON without braces, for one choice; ``beside`` are more, outside the choice."""
        usage = ""
        if self._has_usage_always:
            prompt, output = len(choice.prompt.token_ids), choice.text.num_tokens
            total = prompt + output
            usage = f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output}}}'
        return f'{self._chunk_head}{{"index":{choice.index},{fields}}}]{usage}{beside}}}\n\n'

    def closing_events(self) -> str:
        usage = f'{self._chunk_head}],"usage":{as_json(self._total_usage())}}}\n\n'
        return f"{usage if self._has_usage else ''}data: [DONE]\n\n"

    def error_event(self, error: Exception) -> str:
        return f"data: {as_json(as_api_error(error).body())}\n\n"

    def _total_usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt.token_ids) for prompt in self.generation.prompts)
        output = sum(choice.text.num_tokens for choice in self.generation.choices)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
        usage |= self.output_details()
        if not self.generation.context.caches_prefixes:
            return usage
        cached = sum(choice.stream.num_cached_tokens for choice in self.generation.choices[:: self.body.n])
        return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}  # of each prompt's first output


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Text of a token in log-probabilities; U+FFFD stands for bytes that are not a whole character."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def finite(logprob: float) -> float:
    """A log-probability that JSON can express: it has neither infinities nor NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


class EventStream(Response):
    """An answer as server-sent events. It begins with the first piece, so an earlier error gets its HTTP status."""

    def __init__(self, answer: AnyAnswer) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, writer = self._answer, EventWriter(scope[SERVER_SEND])
        opened: set[int] = set()

        def on_piece(choice: Choice, piece: Piece) -> None:
            if choice.index not in opened:
                opened.add(choice.index)
                writer.write(answer.opening_events(choice))
            writer.write(answer.chunk_event(choice, piece))

        try:
            await answer.generation.read_outputs(on_piece, receive)
            writer.write(answer.closing_events())
        except ClientDisconnect:
            writer.cancel()
            return
        except Exception as error:
            if not opened:
                raise
            if not isinstance(error, RequestFailed):
                logger.exception("a stream failed in the server")
            writer.write(answer.error_event(error))
        await writer.close()
