"""The server's description in OpenAPI's form, for generated clients and for tools that try every path."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """What a path says of its body, which it parses itself; see :func:`schemas_of`."""
    schema = {"$ref": REFERENCE.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schemas_of(*kinds: type[BaseModel]) -> dict[str, Any]:
    """The schemas of bodies, by name, with those that they refer to."""
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=REFERENCE)
    return schemas["$defs"]
