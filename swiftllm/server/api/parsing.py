"""Bodies of requests: from JSON to values that are what they say."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticUseDefault

from swiftllm.server.api.errors import ApiError


class Lenient(BaseModel):
    """Types are what they say (no "16" for 16), fields nobody knows are let in."""

    model_config = ConfigDict(extra="allow", strict=True)


def null_is_left_out(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


Flag = Annotated[bool, BeforeValidator(null_is_left_out)]
"""True or false; null is the default."""

Body = TypeVar("Body", bound=Lenient)


def parse(kind: type[Body], data: bytes) -> Body:
    """A request's body.

    Raises:
        ApiError: it is no JSON, a field has a wrong type or value, or asks for what is not implemented.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        # The path of a union names its members too, which tell a client nothing.
        path = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
        where = ".".join(part for part in path if part not in ("str", "int"))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        raise ApiError(400, message, param=path[0] if path else None, code="invalid_value") from None
