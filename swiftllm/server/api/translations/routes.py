"""The paths of the translated APIs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from swiftllm.server.api.chat import chat_prompt, start_chat
from swiftllm.server.api.context import ServingContext
from swiftllm.server.api.parsing import Body
from swiftllm.server.api.schema import json_body
from swiftllm.server.api.translations.messages_answer import MessageAnswer
from swiftllm.server.api.translations.messages_body import MessagesRequest
from swiftllm.server.api.translations.responses_answer import ResponseAnswer
from swiftllm.server.api.translations.responses_body import ResponsesRequest

BODIES = (ResponsesRequest, MessagesRequest)


class BodyReader(Protocol):
    """Reads, parses and checks the body of a request."""

    def __call__(self, request: Request, kind: type[Body]) -> Awaitable[Body]: ...


def translated_routes(context: ServingContext, body_of: BodyReader, count_choices: Callable[[int], None]) -> APIRouter:
    """Paths of other APIs than OpenAI's chat. ``count_choices`` is told the outputs of each request."""
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = await body_of(request, ResponsesRequest)
        with body.own_names():
            generation = await start_chat(context, body.as_chat(), "resp")
        answer = await ResponseAnswer(generation, body).respond(request)
        count_choices(1)
        return answer

    @router.post("/v1/messages", openapi_extra=json_body(MessagesRequest))
    async def messages(request: Request) -> Response:
        body = await body_of(request, MessagesRequest)
        with body.own_names():
            generation = await start_chat(context, body.as_chat(), "msg")
        answer = await MessageAnswer(generation).respond(request)
        count_choices(1)
        return answer

    @router.post("/v1/messages/count_tokens", openapi_extra=json_body(MessagesRequest))
    async def count_tokens(request: Request) -> Response:
        body = await body_of(request, MessagesRequest)
        with body.own_names():
            _, tokens = await chat_prompt(context, body.as_chat())
        return JSONResponse({"input_tokens": len(tokens)})

    return router
