"""`/v1/completions`: continuations of prompts given as texts or token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.server.api.answers.answer import Answer, as_json, finite, text_as_json, token_text
from swiftllm.server.api.answers.generation import Choice, Generation, Prompt
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.contract.protocol import CompletionRequest
from swiftllm.server.formats.output_text import Piece, TokenTexts


async def answer_completion(context: ServingContext, body: CompletionRequest, request: Request) -> Response:
    """Answer a request for completions. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    given, max_tokens = body.prompts, body.tokens_to_make
    if body.max_tokens is None:  # the model's authors may say fewer
        max_tokens = min(max_tokens, context.sampling_defaults.get("max_tokens", max_tokens))
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoded = iter(await context.encode_prompts(texts, body, "prompt", body.add_special_tokens))
    longest, prompts = context.admission.longest_of(body.service_class), []
    for prompt in given:
        is_text = isinstance(prompt, str)
        tokens = next(encoded) if is_text else prompt
        kept = body.kept_tokens(tokens, max_tokens, longest)
        prompts.append(Prompt(kept, prompt if is_text and len(kept) == len(tokens) else None))
    grammar = await context.grammar_of(body)
    generation = Generation(context, "cmpl", body, prompts, max_tokens, grammar)
    return await CompletionAnswer(generation).respond(request)


class CompletionAnswer(Answer):
    """Formats the outputs as completions."""

    object_name = chunk_object_name = "text_completion"

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._offsets = [0] * len(generation.choices)  # of the next token in the text of each choice
        self._token_texts = [TokenTexts(self.tokenizer) for _ in generation.choices]

    def prompt_pieces(self, choice: Choice) -> list[Piece]:
        if not self.body.echo:
            return []
        entries: list[TokenLogprob] = []
        if self.body.logprobs is not None:
            entries = [TokenLogprob(choice.prompt.token_ids[0], math.nan), *choice.stream.prompt_logprobs]
        return [Piece(self._prompt_text(choice.prompt), entries)]

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None or self.tokenizer is None:
            return prompt.text or ""
        return self.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)  # as the tokens in `logprobs`

    def chunk_text(self, piece: Piece) -> str:
        return f'"text":{text_as_json(piece.text)}'

    def text_fields(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "text": "".join(piece.text for piece in pieces),
            **self.prompt_logprobs(choice),
            **self.prompt_token_ids(choice),
        }

    def opening_events(self, choice: Choice) -> str:
        opening, prompt = super().opening_events(choice), self.prompt_token_ids(choice)
        if prompt:
            end = '"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[]'
            opening = self.choice_event(choice, f"{self.chunk_text(Piece(''))},{end},{as_json(prompt)[1:-1]}") + opening
        return opening

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        entries, texts = piece.logprobs, self._token_texts[choice.index]
        tokens = [texts.push(entry.token_id) for entry in entries]
        if piece.finish_reason is not None or math.isnan(entries[0].logprob):  # the prompt's text ends, too
            tokens[-1] += texts.finish()
        offsets = list(accumulate(map(len, tokens), initial=self._offsets[choice.index]))
        self._offsets[choice.index] = offsets.pop()
        return {
            "text_offset": offsets,
            "token_logprobs": [None if math.isnan(entry.logprob) else finite(entry.logprob) for entry in entries],
            "tokens": tokens,
            "top_logprobs": [self._likeliest(*pair) for pair in zip(entries, tokens, strict=True)],
        }

    def _likeliest(self, entry: TokenLogprob, text: str) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one, of this text, if it is not among them."""
        if math.isnan(entry.logprob):
            return None
        likeliest: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            # Of tokens with equal texts the likelier one counts.
            known = text if token_id == entry.token_id else token_text(self.tokenizer, token_id)
            likeliest.setdefault(known, finite(logprob))
        return likeliest
