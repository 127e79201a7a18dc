"""`/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.answer import Answer, Choice, Generation, Prompt, as_json, finite, text_as_json, token_text
from swiftllm.server.context import ServingContext
from swiftllm.server.output_text import Piece, TokenTexts, parts_of
from swiftllm.server.protocol import ChatRequest, CompletionRequest
from swiftllm.server.tool_calls import Part, joined
from swiftllm.server.tools import may_follow, parameters_of

# -- completions -------------------------------------------------------------------------------------------------------
# `/v1/completions`: continuations of prompts given as texts or token ids.


async def answer_completion(context: ServingContext, body: CompletionRequest, request: Request) -> Response:
    """Answer a request for completions. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    given, max_tokens = body.prompts, body.tokens_to_make
    if body.max_tokens is None:  # the model's authors may say fewer
        max_tokens = min(max_tokens, context.sampling_defaults.get("max_tokens", max_tokens))
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    encoded = iter(await context.encode_prompts(texts, body, "prompt", body.add_special_tokens))
    longest, prompts = context.request_limits.longest_of(body.service_class), []
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


# -- chat --------------------------------------------------------------------------------------------------------------
# `/v1/chat/completions`: conversations, rendered with the model's chat template.

TEXT_FIELDS = {"content": ("content",), "reasoning": ("reasoning_content", "reasoning")}


async def answer_chat(context: ServingContext, body: ChatRequest, request: Request) -> Response:
    """Answer a request for the next message. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    return await ChatAnswer(await start_chat(context, body)).respond(request)


async def start_chat(context: ServingContext, body: ChatRequest, id_prefix: str = "chatcmpl") -> Generation:
    """Submit a request for the next message of a conversation."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text, tokens = await chat_prompt(context, body)
    prompt = Prompt(body.kept_tokens(tokens, max_tokens, context.request_limits.longest_of(body.service_class)))
    grammar = await context.grammar_of(body, may_follow(body.tools_offered))
    bound_by = None if body.must_call or body.grammar is None else body.grammar[0]
    has_tools = bool(body.tools_offered) and bound_by != "response_format"  # what has its form is no call
    if context.formats.is_harmony or has_tools:  # marks may be special tokens
        body = body.model_copy(update={"skip_special_tokens": False})
    how = {"named": body.named_tool, "is_required": body.is_call_required, "is_parallel": body.is_parallel}
    how |= {"is_guided": grammar is not None and bound_by is None, "is_bound": bound_by is not None}
    how["tools"] = parameters_of(body.tools_offered)
    reader = partial(context.formats.reader, text, has_tools=has_tools, **how)
    return Generation(context, id_prefix, body, [prompt], max_tokens, grammar, reader)


async def chat_prompt(context: ServingContext, body: ChatRequest) -> tuple[str, list[int]]:
    """The text of a conversation, and its tokens."""
    text = await context.render_chat(body.messages, body)
    (tokens,) = await context.encode_prompts([text], body, "messages", add_special_tokens=False)
    return text, tokens


class ChatAnswer(Answer):
    """Formats the outputs as chat completions."""

    object_name, chunk_object_name = "chat.completion", "chat.completion.chunk"
    _num_reasoning_tokens = 0  # so far, of all choices

    def opening_events(self, choice: Choice) -> str:
        role = '"delta":{"role":"assistant","content":""}'
        prompt = self.prompt_token_ids(choice)
        beside = f",{as_json(prompt)[1:-1]}" if prompt else ""
        return self.choice_event(choice, f'{role},"logprobs":null,"finish_reason":null', beside)

    def chunk_text(self, piece: Piece) -> str:
        if piece.parts is None:
            return f'"delta":{{"content":{text_as_json(piece.text)}}}'
        self._num_reasoning_tokens += piece.num_reasoning_tokens
        return f'"delta":{as_json(self.delta_of(joined(piece.parts)))}'

    def delta_of(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The fields that parts add to a message in a stream."""
        delta = self._texts_of(parts)
        calls = [delta_of_call(part) for part in parts if part.kind == "tool_call"]
        return {**delta, "tool_calls": calls} if calls else delta

    def text_fields(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        self._num_reasoning_tokens += sum(piece.num_reasoning_tokens for piece in pieces)
        parts = joined(part for piece in pieces for part in parts_of(piece))
        texts = self._texts_of(parts)
        calls = [call_of(part) for part in parts if part.kind == "tool_call"]
        message = {"role": "assistant", "content": texts.pop("content", None if calls else ""), **texts}
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _texts_of(self, parts: Sequence[Part]) -> dict[str, str]:
        """Content and reasoning, if there are any. The reasoning has vLLM's name for it, too."""
        texts = {}
        for kind, names in TEXT_FIELDS.items():
            text = "".join(part.text for part in parts if part.kind == kind)
            if text and (kind == "content" or self.body.include_reasoning):
                texts |= dict.fromkeys(names, text)
        return texts

    def output_details(self) -> dict[str, Any]:
        return {"completion_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens}}

    def extra_fields(self) -> dict[str, Any]:
        choice = self.generation.choices[0]  # all choices have the same prompt
        return self.prompt_logprobs(choice) | self.prompt_token_ids(choice)

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"content": logprobs_of(self.tokenizer, piece.logprobs)}


def logprobs_of(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log-probabilities in OpenAI's form; there is no chat without a tokenizer."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        known = list(tokenizer.token_bytes(token_id))
        return {"token": token_text(tokenizer, token_id), "logprob": finite(logprob), "bytes": known}

    return [
        {**token(entry.token_id, entry.logprob), "top_logprobs": [token(*likely) for likely in entry.top]}
        for entry in entries
    ]


def call_of(part: Part) -> dict[str, Any]:
    """A call in OpenAI's form."""
    return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": part.text}}


def delta_of_call(part: Part) -> dict[str, Any]:
    """What a part adds to a call in a stream."""
    begun = call_of(part) if part.call_id else {"function": {"arguments": part.text}}
    return {"index": part.index, **begun}
