"""Random JSON schemas of the kinds that public test suites have, for outputs that a random model can end."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

NAMES = ("a", "b", "name", "two words", "x-y", "$id_", "né")
CONSTANTS = (
    None,
    True,
    False,
    0,
    -7,
    2.5,
    "",
    "one",
    'a "quote"',
    "back\\slash",
    "né",
    [],
    [1, "x"],
    {},
    {"k": [None]},
)
PATTERNS = ("^[a-c]{1,4}$", "^(ab|cd)*e$", "^\\d{2}-\\d{2}$", "^x", "z$", "^[^a-z]{2}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
REFUSED = ("uniqueItems", "contains", "not", "if", "dependentRequired", "propertyNames", "overlap")


def random_schema(draw: random.Random, depth: int = 0, refused: float = 0.0) -> Schema:
    """A schema. A share ``refused`` of whole schemas uses what few libraries implement."""
    if draw.random() < refused:
        return rare_schema(draw)
    leaves = (constant, string, integer, number, several_types)
    makers = leaves if depth > 1 else (*leaves, array, array, mapping, mapping, union, merged, referring)
    return draw.choice(makers)(draw, depth + 1)


def constant(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.3:
        return {"const": draw.choice(CONSTANTS)}
    return {"enum": draw.sample(CONSTANTS, draw.randint(1, 5))}


def string(draw: random.Random, depth: int) -> Schema:
    kind = draw.randrange(4)
    if kind == 0:
        pattern = draw.choice(PATTERNS)
        return {"type": "string", "pattern": pattern} | (
            {} if pattern[-1] == "$" and pattern[0] == "^" else {"maxLength": 9}
        )
    if kind == 1:
        return {"type": "string", "format": draw.choice(FORMATS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 6)}


def integer(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(-300, 300)
    bounds = draw.choice(
        ({"minimum": least, "maximum": least + draw.randint(0, 999)}, {"exclusiveMinimum": least}, {"maximum": least})
    )
    return {"type": "integer", **bounds, **({"multipleOf": draw.choice((2, 3, 10))} if draw.random() < 0.2 else {})}


def number(draw: random.Random, depth: int) -> Schema:
    least = draw.randint(-30, 30) / 4
    return draw.choice(
        (
            {"type": "number"},
            {"type": "number", "minimum": least, "exclusiveMaximum": least + draw.randint(1, 40) / 8},
            {"type": "number", "multipleOf": draw.choice((0.5, 0.25))},
        )
    )


def several_types(draw: random.Random, depth: int) -> Schema:
    return {"type": draw.sample(("null", "boolean", "integer"), draw.randint(1, 3))}


def array(draw: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": random_schema(draw, depth), "maxItems": draw.randint(1, 3)}
    if draw.random() < 0.3:
        schema["minItems"] = draw.randint(0, schema["maxItems"])
    if draw.random() < 0.3:
        schema["prefixItems"] = [random_schema(draw, depth) for _ in range(draw.randint(1, 2))]
        schema["items"] = draw.choice((False, random_schema(draw, depth)))
    return schema


def mapping(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, draw.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: random_schema(draw, depth) for name in names}}
    schema["required"] = [name for name in names if draw.random() < 0.6]
    kind = draw.randrange(4)
    if kind == 0:
        schema["additionalProperties"] = random_schema(draw, depth)
        schema["maxProperties"] = len(names) + 2
        if draw.random() < 0.8:  # counts of properties are known to few
            del schema["maxProperties"]
    elif kind == 1:
        schema["patternProperties"] = {draw.choice(("^p_", "^[0-9]{1,2}$")): random_schema(draw, depth)}
        schema["additionalProperties"] = False
    else:
        schema["additionalProperties"] = False
    return schema


def union(draw: random.Random, depth: int) -> Schema:
    if draw.random() < 0.4:  # a discriminated union, as pydantic writes them
        branches = [
            {
                "type": "object",
                "properties": {"kind": {"const": name}, "value": random_schema(draw, depth)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for name in ("cat", "dog")
        ]
        return {"oneOf": branches}
    return {"anyOf": [random_schema(draw, depth) for _ in range(draw.randint(2, 3))]}


def merged(draw: random.Random, depth: int) -> Schema:
    names = draw.sample(NAMES, 2)
    parts = [{"type": "object", "properties": {name: random_schema(draw, depth)}, "required": [name]} for name in names]
    return {"allOf": parts, **({"additionalProperties": True} if draw.random() < 0.2 else {})}


def referring(draw: random.Random, depth: int) -> Schema:
    """With definitions, at the root only; some of them recursive."""
    if depth > 1:
        return integer(draw, depth)
    tree = {
        "type": "object",
        "properties": {
            "value": random_schema(draw, 2),
            "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    root = draw.choice(({"$ref": "#/$defs/tree"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}))
    return {"$defs": {"tree": tree, "unused": string(draw, 2)}, **root}


def rare_schema(draw: random.Random) -> Schema:
    leaf = integer(draw, 2)
    return {
        "uniqueItems": {"type": "array", "items": leaf, "uniqueItems": True, "maxItems": 3},
        "contains": {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "maxItems": 3},
        "not": {"type": "integer", "not": {"const": 3}},
        "if": {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "null"}},
        "dependentRequired": {
            "type": "object",
            "properties": {"a": leaf, "b": leaf},
            "dependentRequired": {"a": ["b"]},
        },
        "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": leaf},
        "overlap": {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]},
    }[draw.choice(REFUSED)]
