"""Parses and validates JSON bodies."""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError, PydanticUseDefault

from swiftllm.core.request import first_of
from swiftllm.server.api.errors import ApiError

UNION_MEMBERS = ("str", "int", "TextPart", "Function")
TOKEN_ID = re.compile(r"-?[0-9]{1,18}")


class Lenient(BaseModel):
    """A body with strict types (no "16" for 16). Unknown fields are accepted and kept in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)


def null_is_left_out(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def with_token_ids(value: Any) -> Any:
    """A mapping with its keys, token ids in JSON's strings, as ints. All bad ones are named."""
    bad = [key for key in value if not TOKEN_ID.fullmatch(str(key))] if isinstance(value, dict) else []
    if bad:
        about = {"bad": first_of(bad)}
        raise PydanticCustomError("token_ids", "each key should be a token id, a valid integer, not {bad}", about)
    return {int(key): entry for key, entry in value.items()} if isinstance(value, dict) else value


Flag = Annotated[bool, BeforeValidator(null_is_left_out)]
"""True or false; null stands for the default."""

Body = TypeVar("Body", bound=Lenient)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """Parse a request's body.

    Raises:
        ApiError: it is not JSON, or a field has a wrong type or value.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise as_invalid_value(error) from None


def validated(kind: type[Body], fields: dict[str, Any]) -> Body:
    """A body with these fields.

    Raises:
        ApiError: a field has a wrong type or value.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise as_invalid_value(error) from None


def as_invalid_value(error: ValidationError) -> ApiError:
    """The error response that names the first wrong field."""
    first = error.errors(include_url=False, include_input=False)[0]
    # For a union pydantic adds the member's type to the path, which means nothing to a client.
    path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    where = ".".join(part for part in path if part not in UNION_MEMBERS)
    message = f"{where}: {first['msg']}" if where else first["msg"]
    return ApiError(400, message, param=path[0] if path else None, code="invalid_value")
