"""The outputs of one HTTP request: submitted, read and aborted together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from swiftllm.core.request import RequestRefused, SamplingParams
from swiftllm.sampling.trial import TriedGrammar
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.contract.protocol import GenerationRequest
from swiftllm.server.api.errors import ApiError
from swiftllm.server.formats.output_text import OutputText, Piece, ReadText
from swiftllm.server.formats.parts import Reader
from swiftllm.server.service.limits import NewRequest
from swiftllm.server.service.token_streams import Delta, RequestFailed, TokenStream

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
        longest = context.admission.longest_of(body.service_class)
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
