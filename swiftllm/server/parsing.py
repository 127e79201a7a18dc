"""JSON bodies of requests: parsed and validated, and the errors that clients get."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic.json_schema import models_json_schema
from pydantic_core import CoreSchema, PydanticCustomError, PydanticUseDefault
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftllm.core.request import RequestRefused, first_of
from swiftllm.server.client import QueueFull, ServiceStopping
from swiftllm.server.messages import RequestFailed
from swiftllm.server.metrics import Metrics

# -- errors ------------------------------------------------------------------------------------------------------------
# Errors in the form of OpenAI's API: ``{"error": {"message", "type", "param", "code"}}``.

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


# -- parsing -----------------------------------------------------------------------------------------------------------
# Parses, validates and describes JSON bodies.

UNION_MEMBERS = ("str", "int", "TextPart", "ResponsesChoice", "DocumentSource")
REFERENCE = "#/components/schemas/{model}"
MAX_OBJECTS = 10_000  # in a list: of messages, or of their parts
MAX_NAME_CHARS = 100  # of a client's text, in an error message
MAX_TOKEN_IDS = 2**18  # in a list: the largest vocabularies have as many
PLAIN = ("int", "float", "str", "any")  # types of items that cost little
TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


def bound_lists(schema: Any) -> None:
    """Bound the work of all lists in a schema: a wrong item costs ten times as much as a right one."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
            if schema.get("items_schema", {}).get("type") not in PLAIN:
                schema.setdefault("max_length", MAX_OBJECTS)
        for part in schema.values():
            bound_lists(part)
    elif isinstance(schema, list):
        for part in schema:
            bound_lists(part)


class Lenient(BaseModel):
    """A body with strict types (no "16" for 16). Unknown fields are accepted and kept in ``model_extra``. Lists end at
    their first wrong item, and those of objects at ``MAX_OBJECTS``."""

    model_config = ConfigDict(extra="allow", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        bound_lists(schema)
        return schema


def null_is_left_out(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def with_token_ids(value: Any) -> Any:
    """A mapping with its keys, token ids in JSON's strings, as ints. All bad ones are named."""
    if isinstance(value, dict) and len(value) > MAX_TOKEN_IDS:
        raise PydanticCustomError("too_long", "at most {most} tokens may have a bias", {"most": MAX_TOKEN_IDS})
    bad = [key for key in value if not TOKEN_ID.fullmatch(str(key))] if isinstance(value, dict) else []
    if bad:
        about = {"bad": first_of(bad)}
        raise PydanticCustomError("token_ids", "each key should be a token id, a valid integer, not {bad}", about)
    wrong = [key for key, entry in value.items() if type(entry) not in (int, float)] if isinstance(value, dict) else []
    value = {key: value[key] for key in wrong[:1]} or value  # one is named, as in lists
    return {int(key): entry for key, entry in value.items()} if isinstance(value, dict) else value


def whole(value: Any) -> Any:
    """A number without a fraction as an int, as JSON schema counts it: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def wholes(values: Any) -> Any:
    """The same for a list of numbers, and for each list in a list."""
    if not isinstance(values, list) or set(map(type, values)) <= {int, str}:
        return values
    return [wholes(value) if isinstance(value, list) else whole(value) for value in values]


def is_list_of(kind: type, value: Any) -> bool:
    """Whether ``value`` is a non-empty list whose items have exactly this type (so that true is no int)."""
    return isinstance(value, list) and set(map(type, value)) == {kind}


Flag = Annotated[bool, BeforeValidator(null_is_left_out)]
"""True or false; null stands for the default."""

Whole = Annotated[int, BeforeValidator(whole)]
"""An integer; 2.0 is one, "2" and true are none."""

TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS), BeforeValidator(wholes)]
"""A list of integers, no more than the largest vocabularies have."""

Body = TypeVar("Body", bound=Lenient)


def parse_body(kind: type[Body], data: bytes | dict[str, Any]) -> Body:
    """A request's body, from JSON or from its fields.

    Raises:
        ApiError: it is not JSON, or a field has a wrong type or value.
    """
    try:
        return kind.model_validate_json(as_utf8(data)) if isinstance(data, bytes) else kind.model_validate(data)
    except ValidationError as error:
        raise as_invalid_value(error) from None


def as_utf8(data: bytes) -> bytes:
    """JSON in UTF-8 without a mark before it, which programs for Windows write, as they write UTF-16."""
    encoding = json.detect_encoding(data)
    try:
        return data if encoding == "utf-8" else data.decode(encoding).encode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is no JSON: {error}"[:300], code="invalid_value") from None


def as_invalid_value(error: ValidationError) -> ApiError:
    """The error response that names the first wrong field."""
    errors = error.errors(include_url=False, include_input=False)
    # Of a union's members all have complained: that a list is too long says more than that it is no text.
    first = next((found for found in errors if found["type"] == "too_long"), errors[0])
    # For a union pydantic adds the member's type to the path, which means nothing to a client.
    path = [str(part)[:MAX_NAME_CHARS] for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    where = ".".join(part for part in path if part not in UNION_MEMBERS)
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, param=path[0] if path else None, code="invalid_value")


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """What a path says of its body in OpenAPI, since it parses it itself; see :func:`schemas_of`."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The schemas of bodies, by name, with those that they refer to."""
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    return schemas["$defs"]
