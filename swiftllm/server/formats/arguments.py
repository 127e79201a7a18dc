"""Arguments of calls that models write as plain text: what they are, by the tool's schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from swiftllm.sampling.schemas import as_list, target_of
from swiftllm.server.formats.json_text import DECODER

MOST_REFERENCES = 8  # one behind another
KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def typed_arguments(values: Mapping[str, str], schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by the schema of the tool's parameters."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    known = properties if isinstance(properties, dict) else {}
    return {name: typed(text, kinds_of(known.get(name, others), schema)) for name, text in values.items()}


def typed(text: str, kinds: list[str]) -> Any:
    """A value that is a text, as the first of ``kinds`` that it can be; as a text where it can be none."""
    written = text.strip()
    may_be_null = "null" in kinds or (kinds and "string" not in kinds)  # templates write null for what is left out
    if may_be_null and written.lower() in ("null", "none"):
        return None
    if written.lower() in ("true", "false") and "boolean" in kinds:
        values = [written.lower() == "true"]
    else:
        values = [value for read in (from_json, from_python) if (value := read(written)) is not None]
    for kind in kinds:
        if kind == "string":
            return text
        for value in values:
            if kind == "integer" and isinstance(value, float) and value.is_integer():
                return int(value)
            if KINDS.get(type(value)) in (kind, "integer" if kind == "number" else kind):
                return value
    return text


def from_json(text: str) -> Any:
    """A value of JSON; None if it is none."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def from_python(text: str) -> Any:
    """A list or an object as Python writes it: some templates show models no other. None if it is none of JSON's."""
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def kinds_of(schema: Any, root: dict[str, Any], references: int = MOST_REFERENCES) -> list[str]:
    """The types that a schema names, in its order; none if it names none."""
    if not isinstance(schema, dict):
        return []
    kinds = [kind for kind in [schema.get("type"), *as_list(schema.get("type"))] if isinstance(kind, str)]
    literals = [*as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not kinds:
        kinds = [KINDS[type(value)] for value in literals]
    for word in ("anyOf", "oneOf", "allOf"):
        kinds += [kind for option in as_list(schema.get(word)) for kind in kinds_of(option, root, references)]
    if "$ref" in schema and references:
        kinds += kinds_of(target_of(root, schema["$ref"]), root, references - 1)
    return list(dict.fromkeys(kinds))
