"""`/v1/completions`: continuations of prompts given as texts or token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.generation import Choice, Generation, Prompt
from swiftllm.server.api.output_text import Piece
from swiftllm.server.api.protocol import CompletionRequest
from swiftllm.server.api.responses import Answer, finite, respond, token_text


async def answer_completion(context: ServingContext, body: CompletionRequest, request: Request) -> Response:
    """Answer a request for completions.

    Raises:
        ApiError, QueueFull, ServiceStopping, RequestFailed: see :class:`Generation`.
    """
    prompts = [
        Prompt(await context.encode(prompt, body.add_special_tokens), prompt)
        if isinstance(prompt, str)
        else Prompt(prompt)
        for prompt in body.prompts
    ]
    generation = Generation(context, "cmpl", body, prompts, body.tokens_to_make)
    return await respond(CompletionAnswer(context, generation, body), body, request)


class CompletionAnswer(Answer):
    """Formats the outputs as completions."""

    object_name = chunk_object_name = "text_completion"
    text_before, text_after = '"text":', ""

    def __init__(self, context: ServingContext, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(context, generation, body)
        self._echo = body.echo
        self._with_logprobs = body.logprobs is not None
        self._offsets = [0] * len(generation.choices)

    def opening_events(self, choice: Choice) -> str:
        return "".join(self.chunk_event(choice, piece) for piece in self.prompt_pieces(choice))

    def prompt_pieces(self, choice: Choice) -> list[Piece]:
        if not self._echo:
            return []
        entries: list[TokenLogprob] = []
        if self._with_logprobs:
            entries = [TokenLogprob(choice.prompt.token_ids[0], math.nan), *choice.stream.prompt_logprobs]
        return [Piece(self._prompt_text(choice), entries)]

    def text_fields(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": text, **self.prompt_logprobs(choice)}

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        if prompt.text is not None or self.tokenizer is None:
            return prompt.text or ""
        return self.tokenizer.decode(
            prompt.token_ids, skip_special_tokens=False
        )  # so that it equals the tokens in `logprobs`

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [token_text(self.tokenizer, entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if math.isnan(entry.logprob) else finite(entry.logprob) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._likeliest(entry) for entry in entries],
        }

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one if it is not among them."""
        if math.isnan(entry.logprob):
            return None
        likeliest: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            likeliest.setdefault(
                token_text(self.tokenizer, token_id), finite(logprob)
            )  # of tokens with equal texts the likelier one
        return likeliest
