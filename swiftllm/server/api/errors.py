"""Errors in the form of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftllm.core.request import RequestRefused
from swiftllm.server.observe.metrics import Metrics
from swiftllm.server.service.places import QueueFull, ServiceStopping
from swiftllm.server.service.token_streams import RequestFailed

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
FAILURE_STATUS = {"invalid_grammar": 400, "deadline": 504, "shutdown": 503, "slo_unattainable": 429}
CLIENT_CLOSED_REQUEST = 499  # nginx's status, for logs


class ApiError(Exception):
    """An error response. ``param`` names the field that caused it; ``headers`` are HTTP's, with ``_`` for ``-``."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, **fields: str) -> Response:
        """``fields`` are put beside the error."""
        return JSONResponse({**fields, **self.body()}, self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """The error response for an exception."""
    match error:
        case ApiError():
            return error
        case RequestRefused():
            return ApiError(400, str(error), error.about, "request_refused")
        case QueueFull():
            return ApiError(429, str(error), code="queue_full", retry_after=str(error.retry_after_s))
        case ServiceStopping():
            return ApiError(503, str(error), code="not_serving")
        case RequestFailed():
            wait_s = error.retry_after_s
            headers = {} if wait_s is None else {"retry_after": str(max(1, math.ceil(wait_s)))}
            return ApiError(FAILURE_STATUS.get(error.reason, 500), str(error), code=error.reason, **headers)
        case HTTPException(status_code=404):
            return ApiError(404, "there is no such path: text is made by /v1/completions and /v1/chat/completions")
        case HTTPException():  # 405: the path does not have this method
            return ApiError(error.status_code, str(error.detail), **(error.headers or {}))
    return ApiError(500, f"the server failed: {type(error).__name__}; its log says more", code="internal_error")


def handle_errors(app: FastAPI, metrics: Metrics) -> None:
    """Answer every error of ``app`` with an OpenAI body, and count it in ``metrics``."""

    async def answer(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        metrics.count_refusal(api_error.status, api_error.code)
        has_type = request.url.path.startswith("/v1/messages")  # Anthropic's bodies say what they are
        return api_error.response(**({"type": "error"} if has_type else {}))

    async def client_disconnected(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientDisconnect, client_disconnected)
    for kind in (ApiError, RequestRefused, QueueFull, ServiceStopping, RequestFailed, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
