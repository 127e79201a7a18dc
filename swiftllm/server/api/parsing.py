"""Parses and validates JSON bodies."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticUseDefault

from swiftllm.server.api.errors import ApiError


class Lenient(BaseModel):
    """A body with strict types (no "16" for 16). Unknown fields are accepted and kept in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)


def null_is_left_out(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


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
        first = error.errors(include_url=False, include_input=False)[0]
        # For a union pydantic adds the member's type to the path, which means nothing to a client.
        path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        where = ".".join(part for part in path if part not in ("str", "int"))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise ApiError(400, message, param=path[0] if path else None, code="invalid_value") from None
