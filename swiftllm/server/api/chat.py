"""`/v1/chat/completions`: conversations, rendered with the model's chat template."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.generation import Choice, Generation, Prompt
from swiftllm.server.api.output_text import Piece
from swiftllm.server.api.protocol import ChatRequest
from swiftllm.server.api.responses import Answer, as_json, finite, token_text


async def answer_chat(context: ServingContext, body: ChatRequest, request: Request) -> Response:
    """Answer a request for the next message of a conversation.

    Raises:
        ApiError, QueueFull, ServiceStopping, RequestFailed: see :class:`Generation`.
    """
    return await ChatAnswer(await start_chat(context, body)).respond(request)


async def start_chat(context: ServingContext, body: ChatRequest, id_prefix: str = "chatcmpl") -> Generation:
    """Submit a request for the next message of a conversation.

    Raises:
        ApiError, QueueFull, ServiceStopping: see :class:`Generation`.
    """
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tokens = await chat_tokens(context, body)
    prompt = Prompt(body.kept_tokens(tokens, max_tokens, context.longest_of(body.service_class)))
    grammar = await context.grammar_of(body)
    return Generation(context, id_prefix, body, [prompt], max_tokens, grammar)


async def chat_tokens(context: ServingContext, body: ChatRequest) -> list[int]:
    """The tokens of a conversation.

    Raises:
        ApiError: it cannot be rendered, or is too long.
    """
    text = await context.render_chat(body.messages, body)
    return await context.encode_prompt(text, body, "messages", add_special_tokens=False)


class ChatAnswer(Answer):
    """Formats the outputs as chat completions."""

    object_name, chunk_object_name = "chat.completion", "chat.completion.chunk"

    def opening_events(self, choice: Choice) -> str:
        role = '"delta":{"role":"assistant","content":""}'
        prompt = self.prompt_token_ids(choice)
        beside = f",{as_json(prompt)[1:-1]}" if prompt else ""
        return self.choice_event(choice, f'{role},"logprobs":null,"finish_reason":null', beside)

    def chunk_text(self, text: str) -> str:
        return f'"delta":{{"content":{as_json(text)}}}'

    def text_fields(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def extra_fields(self) -> dict[str, Any]:
        choice = self.generation.choices[0]  # all choices have the same prompt
        return self.prompt_logprobs(choice) | self.prompt_token_ids(choice)

    def logprobs(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in piece.logprobs
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        known = list(self.tokenizer.token_bytes(token_id))  # there is no chat without a tokenizer
        return {"token": token_text(self.tokenizer, token_id), "logprob": finite(logprob), "bytes": known}
