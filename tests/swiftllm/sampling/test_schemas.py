"""Schemas as grammars follow them. Where nothing else is said, the right values are those of JSON Schema 2020-12, and
closed objects are as vLLM's grammars (xgrammar's strict mode) have them."""

from __future__ import annotations

import json
import random

import pytest

from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import NOT_IMPLEMENTED, GrammarCompiler, check_regex, lenient, prepared
from tests.reference.random_schemas import random_schema
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

I64, U64 = 2**63, 2**64
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}}
DEFINED = {"$defs": {"A": A, "Tree": {"properties": {"n": {"$ref": "#/$defs/Tree"}}}}}


@pytest.fixture(scope="module")
def takes(tmp_path_factory):
    """Whether an output that follows a schema may be a text."""
    tokenizer = Tokenizer.from_folder(make_tiny_tokenizer(tmp_path_factory.mktemp("text")))
    compiler = GrammarCompiler(tokenizer, 128, [2])

    def whole(schema: object, text: str) -> bool:
        matcher = compiler.compile("json_schema", schema).start()._matcher
        tokens = tokenizer.encode(text)
        return matcher.validate_tokens([*tokens, 2]) == len(tokens) + 1

    return whole


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, '{} {"a":1} 3', '{"b":1}'),
        ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
        ({"type": "object"}, '{} {"a":1}', "3"),
        ({**A, "additionalProperties": True}, '{"b":1}', '{"a":null}'),
        ({**A, "additionalProperties": {"type": "null"}}, '{"b":null}', '{"b":1}'),
        ({"items": A}, '[{"a":1}]', '[{"b":1}]'),
        ({"properties": {"o": A}}, '{"o":{"a":1}}', '{"o":{"b":1}}'),
        ({"properties": {"properties": A}}, '{"properties":{"a":1}}', '{"properties":{"b":1}}'),
        ({"additionalProperties": A}, '{"x":{"a":1}}', '{"x":{"b":1}}'),
        ({**A, "required": ["a", "b"]}, '{"a":1,"b":[]}', '{"a":1} {"a":1,"b":1,"c":1}'),
        ({"patternProperties": {"^x": {"type": "null"}}}, '{"x1":null}', '{"y":null}'),
        ({"anyOf": [A, B]}, '{"a":1} {"b":null}', '{"a":1,"b":null}'),
        ({"anyOf": [A, {"type": "null"}]}, '{"a":1} null', '{"b":1}'),
        ({"allOf": [A]}, '{"a":1}', '{"b":1}'),
        ({"allOf": [A, B]}, '{"a":1} {"a":1,"b":null}', '{"c":1} {"a":null} {"b":1}'),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, '{"a":1,"c":1}', '{"b":1}'),
        ({"allOf": [A, {"anyOf": [B, {"type": "object"}]}]}, '{"a":1,"b":null}', '{"c":1}'),
        ({**A, "allOf": [{"patternProperties": {"^x": {"type": "null"}}}]}, '{"a":1,"x1":null}', '{"x1":1} {"c":1}'),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a":1} {"b":1}', '{"c":1}'),
        ({**A, "anyOf": [B, {"type": "object"}]}, '{"a":1,"b":null}', '{"c":1}'),
        ({"allOf": [A, B], "unevaluatedProperties": False}, '{"a":1,"b":null}', '{"c":1}'),
        ({"allOf": [A], "unevaluatedProperties": False}, '{"a":1}', '{"c":1}'),
        ({**A, "unevaluatedProperties": True}, '{"a":1,"c":1}', '{"a":null}'),
        ({"$ref": "#/$defs/A", **DEFINED}, '{"a":1}', '{"b":1}'),
        ({"$ref": "#/$defs/A", **B, **DEFINED}, '{"a":1} {"a":1,"b":null}', '{"c":1}'),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], **DEFINED}, '{"a":1,"b":null}', '{"c":1} {"b":1}'),
        ({"$ref": "#/$defs/Tree", **DEFINED}, '{} {"n":{"n":{}}}', '{"n":{"m":{}}}'),
        ({"const": {"properties": {}}}, '{"properties":{}}', "{}"),
    ],
)
def test_an_object_whose_keys_are_named_has_no_others(takes, schema, good, bad) -> None:
    assert [text for text in good.split() if not takes(schema, text)] == []
    assert [text for text in bad.split() if takes(schema, text)] == []


def test_a_schema_that_is_prepared_again_stays_as_it_is() -> None:
    draw = random.Random(3)
    for _ in range(300):
        schema = random_schema(draw, refused=0.1)
        for given in (schema, lenient(schema)):
            before, once = json.dumps(given), prepared(given)
            assert prepared(once) == once and json.dumps(given) == before


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"minimum": -I64, "maximum": I64 - 1}, [0, 9 * 10**18, -9 * 10**18], [I64, -I64 - 1]),
        ({"minimum": 0, "maximum": U64 - 1}, [0, 9 * 10**18], [-1, U64]),
        ({"exclusiveMinimum": -I64, "exclusiveMaximum": I64}, [0], [I64, -I64]),
        ({"minimum": -1e30, "maximum": 1e30}, [-5, 5], [10**31]),
        ({"minimum": 1e30}, [10**31], [-1, 5]),
        ({"maximum": -1e30}, [-(10**31)], [1, -5]),
        ({"minimum": 10**18}, [2 * 10**18], [5]),
        ({"minimum": 5, "exclusiveMinimum": True}, [6], [5]),  # plan builder 4
        ({"minimum": 5, "exclusiveMinimum": False}, [5], [4]),
        ({"exclusiveMinimum": 1.5, "exclusiveMaximum": 4}, [2, 3], [1, 4]),
        ({"exclusiveMinimum": 2.0, "minimum": 1}, [3], [2]),
        ({"minimum": -1e-200, "maximum": 1e-200}, [0], [1, -1]),
        ({"minimum": json.loads("-1e400")}, [0], [-(10**19)]),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]], ids=str)
def test_bounds_of_64_bits_and_beyond(takes, kind, bounds, good, bad) -> None:
    """JSON numbers have no size. Outputs are within the bounds, but for inner ones that no grammar can hold."""
    schema = {"type": kind, **bounds}
    assert [value for value in good if not takes(schema, str(value))] == []
    assert [value for value in bad if takes(schema, str(value))] == []


def test_formats_nulls_and_integral_counts_say_what_they_can(takes) -> None:
    """A format that is not known is ignored: JSON Schema 2020-12, 7.2.1."""
    for name in ("password", "regex", "int32", "phone", "uri-reference"):
        assert takes({"format": name}, '"a"') and takes({"type": "string", "format": name}, '"a"'), name
    assert not takes({"type": "string", "format": "date"}, '"a"')
    named = {"properties": {"format": {"type": "null"}, "minimum": {"type": "null"}}}
    assert takes(named, '{"format":null}') and not takes(named, '{"format":1}')
    assert takes({"type": "string", "minLength": 2.0, "maxLength": None}, '"aa"')


RARE = {
    "uniqueItems": True, "contains": {"const": 1}, "minContains": 1, "maxContains": 2, "not": {"const": 3}, "if": A,
    "then": B, "else": B, "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": B}, "dependencies": {"a": ["b"]},
    "propertyNames": {"pattern": "^x"}, "unevaluatedItems": False, "unevaluatedProperties": {"type": "null"},
    "$dynamicRef": "#a", "$dynamicAnchor": "a", "$recursiveRef": "#", "$recursiveAnchor": "a",
    "oneOf": [{"type": "integer"}, {"type": "number"}], "pattern": "^(?!a)b", "patternProperties": {"(?=x)": B},
}  # fmt: skip


@pytest.mark.parametrize("word", RARE)
def test_words_that_no_grammar_has_are_left_out_of_schemas_that_are_not_strict(takes, word) -> None:
    """OpenAI takes any schema where strict is false, and does its best."""
    for schema in ({word: RARE[word]}, {"properties": {"z": {word: RARE[word]}}}, {"anyOf": [{}], word: RARE[word]}):
        assert takes(lenient(schema), "1"), schema
        if word != "$recursiveAnchor":  # this one says nothing to llguidance
            with pytest.raises(ValueError, match=r"nimplemented|not supported|look-around"):
                takes(schema, "1")
    assert word in {*NOT_IMPLEMENTED, "oneOf", "pattern", "patternProperties"}


def test_what_is_left_of_a_schema_lets_all_come_that_the_whole_one_does(takes) -> None:
    schema = lenient({**A, "if": {"required": ["a"]}, "then": {**B, "required": ["b"]}, "minProperties": 1})
    assert takes(schema, '{"a":1,"b":null}') and not takes(schema, '{"a":null}') and not takes(schema, '{"c":1}')
    both = lenient({"oneOf": [A, B], "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert takes(both, '{"a":1}') and takes(both, '{"b":null}') and not takes(both, '{"a":null}')
    inner = {"properties": {"x": lenient({"not": {}}), "y": {"type": "null"}}}
    assert takes(inner, '{"x":1,"y":null}') and not takes(inner, '{"y":1}')


def test_what_is_no_schema_is_left_for_the_compiler_to_refuse() -> None:
    odd = {"$defs": 3, "$ref": "#/$defs/a", "properties": 3, "allOf": [A, B, 4], "anyOf": {}, "required": 5, "if": []}
    for schema in (odd, {**odd, "$ref": 5}, {"allOf": [{"$ref": "#"}, A]}, True, None, [], {"minimum": "5"}):
        prepared(schema)
    chain = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(2000)}
    with pytest.raises(ValueError, match="too often"):
        prepared({"$defs": chain, "$ref": "#/$defs/0"})


@pytest.mark.parametrize("text", ["a\\", "[ab]\\", "\\", "a\\\\\\", "a**", "a{2}{3}", "\\p{L}\\", "a+*"])
def test_what_is_no_regular_expression_is_refused(takes, text) -> None:
    """They are none in Python; Rust, whose dialect counts, has `a**` in it, vLLM's other backends have not."""
    with pytest.raises(ValueError, match=r"backslash|repeats"):
        check_regex(text)
    for schema in ({"pattern": text}, {"patternProperties": {text: {}}}):
        with pytest.raises(ValueError, match=r"backslash|repeats"):
            takes(schema, "1")
        assert takes(lenient(schema), "1")


@pytest.mark.parametrize(
    "text", ["a\\\\", "\\p{L}+", "\\pL", "\\x{41}*", "(?<n>a)+", "[a&&b]*", "a+?", "a{2}", "[[:alpha:]]", "\\d{4}", ""]
)
def test_regular_expressions_of_rusts_dialect_are_taken(text) -> None:
    check_regex(text)
