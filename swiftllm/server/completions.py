"""`/v1/completions`: prompts as texts or token ids, and what comes after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from swiftllm.request import TokenLogprob
from swiftllm.server.answer import Answer, finite, respond, token_text
from swiftllm.server.context import ServingContext
from swiftllm.server.generation import Choice, Generation, Prompt
from swiftllm.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from swiftllm.server.text import Piece


async def complete(context: ServingContext, body: CompletionRequest, request: Request) -> Response:
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
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    generation = Generation(context, "cmpl", body, prompts, max_tokens)
    return await respond(CompletionAnswer(context, generation, body), body, request)


class CompletionAnswer(Answer):
    object_name = chunk_object_name = "text_completion"
    text_before, text_after = '"text":', ""

    def __init__(self, context: ServingContext, generation: Generation, body: CompletionRequest) -> None:
        super().__init__(context, generation, body)
        self._echo = body.echo
        self._offsets = [0] * len(generation.choices)

    def opening(self, choice: Choice) -> str:
        return self.chunk(choice, Piece(self._prompt_text(choice))) if self._echo else ""

    def whole_text(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": self._prompt_text(choice) + text if self._echo else text}

    def _prompt_text(self, choice: Choice) -> str:
        prompt = choice.prompt
        if prompt.text is not None or self.tokenizer is None:
            return prompt.text or ""
        return self.tokenizer.decode(prompt.token_ids)

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [token_text(self.tokenizer, entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._likeliest(entry) for entry in entries],
        }

    def _likeliest(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the one that was chosen where it is none of them."""
        both = dict(entry.top) | {entry.token_id: entry.logprob}
        return {token_text(self.tokenizer, token_id): finite(logprob) for token_id, logprob in both.items()}
