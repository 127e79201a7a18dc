"""The answer to a generation request: its outputs, as one JSON object or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from swiftllm.core.request import RequestRefused, SamplingParams, TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.trial import TriedGrammar
from swiftllm.server.context import ServingContext
from swiftllm.server.messages import Delta, NewRequest, RequestFailed, TokenStream
from swiftllm.server.output_text import OutputText, Piece, ReadText
from swiftllm.server.parsing import ApiError, as_api_error
from swiftllm.server.protocol import GenerationRequest
from swiftllm.server.tool_calls import Reader

# -- server-sent events ------------------------------------------------------------------------------------------------
# Sends server-sent events; it needs no asyncio task while the client keeps up.

SERVER_SEND = "swiftllm.send"  # key of the server's own ``send`` in an ASGI scope
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from buffering the events
]


class EventWriter:
    """The body of one response. Headers go before the first event.

    Text written in one pass of the event loop is sent in the next one. So the texts of all streams of a step are made
    before the first is sent, which suits the processor's caches. Text for a slow client is kept here, until its
    connection is dropped (``ClientConnection``).
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._texts: list[str] = []
        self._has_begun = False
        self._sender: asyncio.Task[None] | None = None  # while a slow client blocks the sending
        self._send_handle: asyncio.Handle | None = None

    def write(self, text: str) -> None:
        """Add text to the body. Never waits; must be called on the event loop's thread."""
        self._texts.append(text)
        if self._send_handle is None and self._sender is None:
            self._send_handle = asyncio.get_running_loop().call_soon(self._send_pending)

    def _send_pending(self) -> None:
        self._send_handle = None
        rest = run_until_wait(self._send(self._body(more=True)) if self._has_begun else self._send_first())
        if rest is not None:
            self._sender = asyncio.create_task(self._send_rest(rest))

    async def _send_first(self) -> None:
        await self._begin_body()
        await self._send(self._body(more=True))

    async def _send_rest(self, rest: Awaitable[None]) -> None:
        await rest
        while self._texts:
            await self._send(self._body(more=True))
        self._sender = None

    async def _begin_body(self) -> None:
        self._has_begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})

    def _body(self, more: bool) -> Message:
        body = "".join(self._texts).encode()
        self._texts.clear()
        return {"type": "http.response.body", "body": body, "more_body": more}

    async def close(self) -> None:
        """Send the remaining text and end the body."""
        if self._sender is not None:
            await self._sender
        self.cancel()
        if not self._has_begun:
            await self._begin_body()
        await self._send(self._body(more=False))

    def cancel(self) -> None:
        """Cancel all sending that is scheduled or blocked."""
        for under_way in (self._send_handle, self._sender):
            if under_way is not None:
                under_way.cancel()


def run_until_wait(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run a coroutine until it first waits. Returns the rest of it, or None if it is done."""
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return resume_coroutine(coroutine, awaited)


@types.coroutine
def resume_coroutine(coroutine: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that has yielded ``awaited`` and waits for it."""
    try:
        yield awaited
    except BaseException:
        coroutine.close()
        raise
    yield from coroutine


# -- the outputs of a request ------------------------------------------------------------------------------------------
# The outputs of one HTTP request: submitted, read and aborted together.

# Of request ids. A generator of its own, which no library seeds; uuid4 would give up the interpreter's lock each time.
ID_BITS = random.Random()


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens. ``text`` is the original text, None if the client sent tokens."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """One output: its index in the answer, its prompt, the stream of its tokens and the text made of them."""

    index: int
    prompt: Prompt
    stream: TokenStream
    text: OutputText | ReadText


PieceListener = Callable[[Choice, Piece], object]


class Generation:
    """All outputs of one HTTP request, ``n`` for each prompt: output i of prompt p is choice ``p * n + i``.

    Raises:
        ApiError: one of them can never be served.
        QueueFull, ServiceStopping: see :meth:`EngineClient.submit`. After any error no output has been started.
    """

    def __init__(
        self,
        context: ServingContext,
        name: str,
        body: GenerationRequest,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        grammar: TriedGrammar | None = None,
        make_reader: Callable[[], Reader | None] = lambda: None,
    ) -> None:
        """``max_tokens``: output tokens of each prompt, cut to what fits beside it; None is as many as the model's
        ``generation_config.json`` says, or all that fits.
        ``make_reader`` makes what reads the parts of one output."""
        self.request_id = f"{name}-{body.request_id or format(ID_BITS.getrandbits(128), '032x')}"
        self.context = context
        self.body = body
        self.prompts = prompts
        longest = context.request_limits.longest_of(body.service_class)
        others: dict[str, Any] = {**context.sampling_defaults, "grammar": grammar}
        if body.bad_words:
            others["bad_words"] = tuple(body.bad_token_ids(context.require_tokenizer()))
        own_most = context.sampling_defaults.get("max_tokens", longest)
        lengths = [that_fit(max_tokens, longest, len(prompt.token_ids), own_most) for prompt in prompts]
        shared = body.sampling(min(lengths), others)  # checked with the length that allows least
        samplings = [shared.varied(max_tokens=length) for length in lengths]
        n = body.n
        requests = [
            NewRequest(
                f"{self.request_id}-{prompt_number * n + number}",
                prompt.token_ids,
                with_own_seed(sampling, number),
                body.timeout,
                body.service_class,
                body.cache_salt,
            )
            for prompt_number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
            for number in range(n)
        ]
        try:
            streams = context.service.submit(requests)
        except RequestRefused as error:
            pairs = zip(prompts, samplings, strict=True)
            is_too_long = any(len(prompt.token_ids) + how.max_tokens > longest for prompt, how in pairs)
            code = "context_length_exceeded" if is_too_long else "request_refused"
            param = None if error.about is None else body.param(error.about)
            raise ApiError(400, str(error), param, code) from None
        self.choices = [
            Choice(index, prompts[index // n], stream, with_reader(body.output_text(context.tokenizer), make_reader()))
            for index, stream in enumerate(streams)
        ]

    async def read_outputs(self, on_piece: PieceListener, receive: Receive) -> None:
        """Read all outputs to their ends and pass each piece to ``on_piece``, which must not block.

        Outputs that have not finished by then are aborted, whatever ends the reading.

        Raises:
            ClientDisconnect: ``receive`` reports it; the request's body must have been read from it before.
            RequestFailed: the engine failed one of the outputs.
        """
        self._num_open, self._over = len(self.choices), asyncio.get_running_loop().create_future()
        hang_up = asyncio.create_task(wait_for_hang_up(receive))
        try:
            for choice in self.choices:
                choice.stream.set_listener(partial(self._read_delta, choice, on_piece))
            await asyncio.wait((self._over, hang_up), return_when=asyncio.FIRST_COMPLETED)
            if not self._over.done():
                raise ClientDisconnect
            self._over.result()
        finally:
            self._over.cancel()
            hang_up.cancel()
            for choice in self.choices:
                choice.stream.set_listener(None)
            self.context.service.abort_requests([choice.stream.request_id for choice in self.choices])
            await asyncio.gather(hang_up, return_exceptions=True)

    def _read_delta(self, choice: Choice, on_piece: PieceListener, delta: Delta) -> None:
        """Pass on the new tokens of an output. Called without a task: waking one costs more than all other work."""
        try:
            if delta.token_ids or delta.finish_reason is not None:
                piece = choice.text.append_delta(delta)
                on_piece(choice, piece)
                if piece.finish_reason is not None:
                    self._end(choice)
                    return
            if delta.failure is not None:
                raise RequestFailed(*delta.failure)
        except Exception as error:
            choice.stream.set_listener(None)
            if not self._over.done():
                self._over.set_exception(error)

    def _end(self, choice: Choice) -> None:
        choice.stream.set_listener(None)
        # A stop string may have ended it, and then the engine would continue.
        self.context.service.end_request(choice.stream.request_id, "stop")
        self._num_open -= 1
        if not self._num_open:
            self._over.set_result(None)


def with_reader(text: OutputText, reader: Reader | None) -> OutputText | ReadText:
    return text if reader is None else ReadText(text, reader)


def that_fit(max_tokens: int | None, longest: int, prompt_len: int, by_default: int) -> int:
    """The output tokens asked for, or as many ``by_default`` as fit beside the prompt. The engine refuses more than
    ``longest``, and a prompt that leaves no room."""
    room = max(1, longest - prompt_len)
    if max_tokens is None:
        return min(by_default, room)
    return max_tokens if max_tokens > longest else min(max_tokens, room)


async def wait_for_hang_up(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def with_own_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    """Sampling of a prompt's output ``number``. Seeds count up, wrapping at 64 bits: outputs differ reproducibly."""
    if sampling.seed is None or number == 0:
        return sampling
    return sampling.varied(seed=(sampling.seed + number + 2**63) % 2**64 - 2**63)


# -- answers -----------------------------------------------------------------------------------------------------------
# The answer to a generation request: one JSON object, or a stream of server-sent events.
#
# An event costs one f-string and the JSON of its text: the rest is formatted before the first token.

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
