"""`/v1/chat/completions`: conversations, rendered with the model's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from swiftllm.core.request import TokenLogprob
from swiftllm.model.folder.tokenizer import Tokenizer
from swiftllm.server.api.answers.answer import Answer, as_json, finite, text_as_json, token_text
from swiftllm.server.api.answers.generation import Choice, Generation, Prompt
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.contract.protocol import ChatRequest
from swiftllm.server.api.contract.tools import may_follow, parameters_of
from swiftllm.server.formats.output_text import Piece, parts_of
from swiftllm.server.formats.parts import Part, joined

TEXT_FIELDS = {"content": ("content",), "reasoning": ("reasoning_content", "reasoning")}


async def answer_chat(context: ServingContext, body: ChatRequest, request: Request) -> Response:
    """Answer a request for the next message. Raises what :class:`Generation` and :meth:`AnyAnswer.respond` raise."""
    return await ChatAnswer(await start_chat(context, body)).respond(request)


async def start_chat(context: ServingContext, body: ChatRequest, id_prefix: str = "chatcmpl") -> Generation:
    """Submit a request for the next message of a conversation.

    Raises:
        ApiError, QueueFull, ServiceStopping: see :class:`Generation`.
    """
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    text, tokens = await chat_prompt(context, body)
    prompt = Prompt(body.kept_tokens(tokens, max_tokens, context.admission.longest_of(body.service_class)))
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
    """The text of a conversation, and its tokens.

    Raises:
        ApiError: it cannot be rendered, or is too long.
    """
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
