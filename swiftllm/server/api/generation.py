"""One HTTP request's outputs: submitted together, read side by side, given up together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from swiftllm.core.request import RequestRefused, SamplingParams
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.errors import ApiError
from swiftllm.server.api.output_text import OutputText, Piece
from swiftllm.server.api.protocol import GenerationRequest
from swiftllm.server.service.service import Delta, NewRequest, TokenStream


@dataclass(frozen=True)
class Prompt:
    """``text`` is the prompt as it was given, None where it was given as tokens."""

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, eq=False)
class Choice:
    """One output: its place in the answer, where its tokens come from and what they become."""

    index: int
    prompt: Prompt
    stream: TokenStream
    text: OutputText


TakePiece = Callable[[Choice, Piece], None]


class Generation:
    """All outputs of one HTTP request, ``n`` for each prompt: output i of prompt p is choice ``p * n + i``.

    Raises:
        ApiError: there are more outputs than the server takes at once, or one of them can never be served.
        QueueFull, ServiceStopping: as the service says. In any case nothing has been started.
    """

    def __init__(
        self, context: ServingContext, name: str, body: GenerationRequest, prompts: Sequence[Prompt], max_tokens: int
    ) -> None:
        self.request_id = f"{name}-{uuid.uuid4().hex}"
        self.prompts = prompts
        self._service = context.service
        sampling = body.sampling(max_tokens)
        n, limit = body.num_choices, context.service.limits.max_queued_requests
        if n * len(prompts) > limit:
            message = f"{len(prompts)} prompts with n={n} exceed the {limit} requests that this server takes at once"
            raise ApiError(400, message, "n" if n > 1 else body.param("prompt"), "too_many_choices")
        requests = [
            NewRequest(
                f"{self.request_id}-{prompt_number * n + number}",
                prompt.token_ids,
                with_own_seed(sampling, number),
                body.timeout,
            )
            for prompt_number, prompt in enumerate(prompts)
            for number in range(n)
        ]
        try:
            streams = context.service.submit(requests)
        except RequestRefused as error:
            longest = max(len(prompt.token_ids) for prompt in prompts) + max_tokens
            code = "context_length_exceeded" if longest > context.longest_request else "request_refused"
            param = None if error.about is None else body.param(error.about)
            raise ApiError(400, str(error), param, code) from None
        self.choices = [
            Choice(index, prompts[index // n], stream, body.output_text(context.tokenizer))
            for index, stream in enumerate(streams)
        ]

    async def run(self, take: TakePiece, receive: Receive) -> None:
        """Read all outputs to their ends and hand each piece to ``take``, which must not wait for anything.

        However this ends, nothing of the request goes on in the engine.

        Raises:
            ClientDisconnect: ``receive``, the channel of a request whose body has been read, says so.
            RequestFailed: the engine failed one of the outputs.
        """
        self._num_open, self._over = len(self.choices), asyncio.get_running_loop().create_future()
        hang_up = asyncio.create_task(wait_for_hang_up(receive))
        try:
            for choice in self.choices:
                choice.stream.listen(partial(self._read, choice, take))
            await asyncio.wait((self._over, hang_up), return_when=asyncio.FIRST_COMPLETED)
            if not self._over.done():
                raise ClientDisconnect
            self._over.result()
        finally:
            self._over.cancel()
            hang_up.cancel()
            for choice in self.choices:
                choice.stream.listen(None)
            self._service.abort([choice.stream.request_id for choice in self.choices])
            await asyncio.gather(hang_up, return_exceptions=True)

    def _read(self, choice: Choice, take: TakePiece, delta: Delta) -> None:
        """Hand on what is new of an output. To wake a task for each token would take longer than all the rest."""
        try:
            if delta.token_ids or delta.finish_reason is not None:
                piece = choice.text.take(delta)
                take(choice, piece)
                if piece.finish_reason is not None:
                    self._end(choice)
                    return
            if delta.error is not None:
                raise delta.error
        except Exception as error:
            choice.stream.listen(None)
            if not self._over.done():
                self._over.set_exception(error)

    def _end(self, choice: Choice) -> None:
        choice.stream.listen(None)
        self._service.end(choice.stream.request_id, "stop")  # a stop string ends it before the engine would
        self._num_open -= 1
        if not self._num_open:
            self._over.set_result(None)


async def wait_for_hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def with_own_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    """The outputs of one prompt differ and can be reproduced all the same: seeds count up (and wrap, at 64 bits)."""
    if sampling.seed is None or number == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + number + 2**63) % 2**64 - 2**63)
