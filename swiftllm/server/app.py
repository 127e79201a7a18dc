"""The application: every path, its access rule, and the reading of request bodies."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swiftllm import __version__
from swiftllm.server.answer import SERVER_SEND
from swiftllm.server.anthropic import MessagesRequest, answer_message
from swiftllm.server.client import EngineClient
from swiftllm.server.completions import answer_chat, answer_completion, chat_prompt
from swiftllm.server.context import ServingContext
from swiftllm.server.metrics import Metrics, log_activity
from swiftllm.server.parsing import ApiError, Body, handle_errors, json_body, parse_body, schemas_of
from swiftllm.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from swiftllm.server.responses import InputTokensRequest, ResponsesRequest, answer_response
from swiftllm.server.settings import ServerSettings
from swiftllm.server.status_page import StatusPage
from swiftllm.server.translation import TranslatedRequest

logger = logging.getLogger(__name__)

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Answerer = Callable[[ServingContext, Any, Request], Awaitable[Response]]

GENERATING: dict[str, tuple[type[GenerationRequest], Answerer]] = {
    "/v1/completions": (CompletionRequest, answer_completion),
    "/v1/chat/completions": (ChatRequest, answer_chat),
    "/v1/responses": (ResponsesRequest, answer_response),
    "/v1/messages": (MessagesRequest, answer_message),
}
BODIES = (TokenizeRequest, DetokenizeRequest, InputTokensRequest, *(kind for kind, _ in GENERATING.values()))


class Application(FastAPI):
    """Keeps overhead off the tokens: streams get the server's own ``send``.

    Every layer of Starlette wraps ``send`` to learn whether a response has begun. Each wrapper would run for every
    token of every stream.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The description of all paths. Bodies are parsed by their paths, so their schemas are added here."""
        schema = super().openapi()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas_of(*BODIES))
        return schema


def create_app(service: EngineClient, settings: ServerSettings) -> ASGIApp:
    """The HTTP application of an engine."""
    context = ServingContext(service, settings)
    metrics = Metrics(service, context.model_name)
    page = StatusPage(service, context.model_name)
    lifespan = lifespan_of(page.sample_snapshots, partial(log_activity, service), client=service)
    app = Application(title="SwiftLLM", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    handle_errors(app, metrics)
    for router in (open_routes(context), metrics.router, page.router, api_routes(context, metrics)):
        app.include_router(router)
    if not settings.allowed_origins:
        return app
    return CORSMiddleware(
        app, settings.allowed_origins, allow_methods=["*"], allow_headers=["*"]
    )  # wraps ``send`` of streams too


def lifespan_of(
    *works: Callable[[], Coroutine[Any, Any, None]], client: EngineClient | None = None
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """The lifespan of an application: ``works`` run as tasks on its event loop, and are cancelled at its end. So long
    ``client`` is connected."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if client is not None:
            await client.connect()
        tasks = [asyncio.create_task(work()) for work in works]
        for task in tasks:
            task.add_done_callback(log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if client is not None:
                client.close()

    return lifespan


def log_failure(task: asyncio.Task[None]) -> None:
    """Nothing awaits such a task before the server ends, so its error would not be seen until then."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a background task of the server has failed, and serving goes on without it", exc_info=error)


def api_routes(context: ServingContext, metrics: Metrics) -> APIRouter:
    """Paths that require the API key if one is set."""

    async def check_key(request: Request) -> None:  # async, as FastAPI would run a plain function in a thread
        key = context.settings.api_key
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = [request.headers.get("x-api-key", ""), token if scheme.lower() == "bearer" else ""]
        if key is not None and not any([is_key(text, key) for text in given]):
            message = "no valid API key: send the header `Authorization: Bearer KEY`"
            raise ApiError(401, message, code="invalid_api_key", www_authenticate="Bearer")

    router = APIRouter(dependencies=[Depends(check_key)])

    async def body_of(request: Request, kind: type[Body]) -> Body:
        check_media_type(request.headers.get("content-type", ""))
        body = parse_body(kind, await read_body(request, context.settings.max_body_bytes))
        context.check_model(body.model)
        if isinstance(body, GenerationRequest):
            body.check_fields()
        return body

    async def generation_of(request: Request, kind: type[Body]) -> Body:
        body = await body_of(request, kind)
        context.check_num_outputs(body)
        return body

    def add_generation(path: str, kind: type[Body], answer: Answerer) -> None:
        @router.post(path, openapi_extra=json_body(kind))
        async def generate(request: Request) -> Response:
            body = await generation_of(request, kind)
            response = await answer(context, body, request)
            metrics.count_choices(body.n)
            return response

    for path, (kind, answer) in GENERATING.items():
        add_generation(path, kind, answer)

    async def count_input(body: TranslatedRequest) -> int:
        with body.own_names():
            _, tokens = await chat_prompt(context, body.as_chat())
        return len(tokens)

    @router.post("/v1/messages/count_tokens", openapi_extra=json_body(MessagesRequest))
    async def count_tokens(request: Request) -> Response:
        return JSONResponse({"input_tokens": await count_input(await body_of(request, MessagesRequest))})

    @router.post("/v1/responses/input_tokens", openapi_extra=json_body(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        body = await body_of(request, InputTokensRequest)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": await count_input(body)})

    @read(router, "/v1/models")
    async def models() -> Response:
        return JSONResponse(
            {"object": "list", "data": [{**model_card(context), "id": name} for name in context.model_names]}
        )

    @read(router, "/v1/models/{name:path}")
    async def model(name: str) -> Response:
        context.check_model(name)
        return JSONResponse({**model_card(context), "id": name})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> Response:
        check_origin(request.headers.get("origin"), context.settings.allowed_origins)
        context.service.reset_prefix_cache()
        return Response()

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = await body_of(request, TokenizeRequest)
        if body.messages is not None:
            text = await context.render_chat(body.messages, body)
            (tokens,) = await context.encode([text], "messages", add_special_tokens=False)
        elif body.prompt is not None:
            (tokens,) = await context.encode([body.prompt], "prompt", body.add_special_tokens)
        else:
            raise ApiError(400, "give a prompt, or the messages of a conversation", "prompt", "missing")
        strings = None
        if body.return_token_strs:
            strings = await context.run_in_thread(context.require_tokenizer().token_strings, tokens)
        count = {"count": len(tokens), "max_model_len": context.request_limits.longest_request}
        return JSONResponse({**count, "tokens": tokens, "token_strs": strings})

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = await body_of(request, DetokenizeRequest)
        return JSONResponse({"prompt": await context.decode(body.tokens)})

    return router


def open_routes(context: ServingContext) -> APIRouter:
    """Paths that answer without an API key: they are cheap and reveal no secret."""
    router = APIRouter()

    @read(router, "/health")
    @read(router, "/ping")
    @router.post("/ping", include_in_schema=False)
    async def health() -> Response:
        state = context.service.health
        line = state.status if not state.reason else f"{state.status}: {state.reason}"
        return PlainTextResponse(line, 200 if state.status == "ok" else 503)

    @read(router, "/load")
    async def load() -> Response:
        return JSONResponse({"server_load": context.service.num_open})

    @read(router, "/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return router


def read(router: APIRouter, path: str) -> Callable[[Endpoint], Endpoint]:
    """Registers what answers GET, and HEAD, which some load balancers send."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.head(path, include_in_schema=False)(endpoint)
        return router.get(path)(endpoint)

    return register


def model_card(context: ServingContext) -> dict[str, Any]:
    """The model's entry in `/v1/models`, with the fields of OpenAI and vLLM."""
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "swiftllm",
        "root": context.model_path,
        "parent": None,
        "max_model_len": context.request_limits.longest_request,
    }


def is_key(given: str, key: str) -> bool:
    """Whether a header has the key, in UTF-8 or in Latin-1: clients differ in how they send letters beyond ASCII.
    Starlette has read it as Latin-1."""
    readings = (given.encode(), given.encode("latin-1"))
    return any([hmac.compare_digest(reading, key.encode()) for reading in readings])


def check_media_type(content_type: str) -> None:
    """Check that a body is said to be JSON. Web pages of other sites can send other types without being asked first."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"bodies must have the header `Content-Type: application/json`, not {media_type[:100] or 'none'}"
        raise ApiError(415, message, code="unsupported_media_type")


def check_origin(origin: str | None, allowed: Sequence[str]) -> None:
    """Check that a request without a body does not come from a web page of another site, which browsers say."""
    if origin is not None and origin not in allowed and "*" not in allowed:
        message = f"web pages of {origin[:100]} may not do this (--allowed-origins)"
        raise ApiError(403, message, code="origin_not_allowed")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            message = f"the body exceeds the {max_bytes} bytes that this server reads (--max-body-bytes)"
            raise ApiError(413, message, code="body_too_large")
        parts.append(part)
    return b"".join(parts)
