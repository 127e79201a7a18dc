"""Grammars that outputs follow: JSON schemas, regular expressions, choices, and grammars in Lark's or GBNF's form.

llguidance parses them and finds the tokens that may come next. It needs no torch, and takes some 50 us a token.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swiftllm.model.tokenizer import Tokenizer

# -- JSON schemas ------------------------------------------------------------------------------------------------------
# JSON schemas as grammars follow them: closed objects, bounds and formats that llguidance knows, and the words that a
# schema which is not strict can do without.

OPTIONS = "x-guidance"  # llguidance's, beside a schema
LITERALS = ("const", "enum", "default", "examples", OPTIONS)  # keywords that hold no schemas
BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # hold one for each name
CONDITIONS = ("if", "then", "else")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
NOT_IMPLEMENTED = (
    "not", *CONDITIONS, "contains", "minContains", "maxContains", "uniqueItems", "propertyNames", "dependencies",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef",
    "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor",
)  # fmt: skip
"""Keywords that llguidance 1.9.1 refuses."""
NO_REGULAR = re.compile(r"\(\?<?[=!]|\\[1-9bB]")  # looks around, or back
ESCAPE = re.compile(r"\\(?:[pPxuU]\{[^{}]*\}|[pP]?.)", re.DOTALL)
CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
REPETITION = r"(?:[*+?]|\{\d+(?:,\d*)?\})"
REPEATED = re.compile(rf"{REPETITION}(?:[?+]{REPETITION}|(?![?+]){REPETITION})")  # one ? or + says how it repeats
FAR, NEAR, TINY = 9 * 10**18, 9 * 10**17, 1e-30
"""llguidance has no bounds beyond FAR, none beyond NEAR where the other side is open, and none below TINY."""


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, whose words that are not implemented say nothing: the mark is llguidance's own."""
    return {**schema, OPTIONS: {**schema.get(OPTIONS, {}), "lenient": True}}


def prepared(schema: Any) -> Any:
    """The schema that a grammar follows. An object whose keys are named has no others, unless the schema says whether
    it has. A format that is not known says nothing, nor does in a :func:`lenient` schema any keyword that is not
    implemented."""

    def ready(part: Any, is_lenient: bool = False) -> Any:
        if isinstance(part, list):
            return [ready(item, is_lenient) for item in part]
        if not isinstance(part, dict):
            return part
        if isinstance(options := part.get(OPTIONS), dict):
            is_lenient |= options.get("lenient") is True
        found: dict[str, Any] = {}
        for name, value in part.items():
            if name in LITERALS:
                found[name] = value
            elif name in BY_NAME and isinstance(value, dict):
                found[name] = {key: ready(item, is_lenient) for key, item in value.items()}
            elif value is not None:
                found[name] = ready(value, is_lenient)
        objects.close(part, found)
        spell_out(found)
        if is_lenient:
            loosen(found)
        for pattern in patterns_of(found):
            check_regex(pattern)
        return found

    try:
        objects = Objects(schema)
        return ready(schema)
    except RecursionError:
        raise ValueError("its references lead from one to the next too often") from None


def spell_out(part: dict[str, Any]) -> None:
    """Write numbers, bounds and formats as llguidance reads them."""
    for name in COUNTS:
        if isinstance(value := part.get(name), float) and value.is_integer():
            part[name] = int(value)
    if isinstance(name := part.get("format"), str) and name not in FORMATS:
        del part["format"]
    for name in ("unevaluatedProperties", "unevaluatedItems"):
        if part.get(name) is True:
            del part[name]
    is_integer = part.get("type") == "integer"
    low, high = (one_bound(part, name, is_integer) for name in ("Minimum", "Maximum"))
    if low is not None and low > NEAR:
        low, high = (low, FAR if high is None else high) if low < FAR else (NEAR, None)
    elif high is not None and high < -NEAR:
        low, high = (-FAR if low is None else low, high) if high > -FAR else (None, -NEAR)
    if low is not None:
        part["minimum"] = TINY if 0 < low < TINY else 0 if -TINY < low < 0 else max(low, -FAR)
    if high is not None:
        part["maximum"] = -TINY if -TINY < high < 0 else 0 if 0 < high < TINY else min(high, FAR)


def one_bound(part: dict[str, Any], name: str, is_integer: bool) -> float | None:
    """Take the bounds of one side out of a schema. The tightest, as an inclusive one: llguidance 1.9.1 often lets an
    exclusive bound itself come. None: there is none, or what is there is no number and stays."""
    inclusive, exclusive = part.get(name.lower()), part.get(f"exclusive{name}")
    if isinstance(exclusive, bool):  # plan builder 4
        inclusive, exclusive = (None, inclusive) if exclusive else (inclusive, None)
    if any(bound is not None and type(bound) not in (int, float) for bound in (inclusive, exclusive)):
        return None
    part.pop(name.lower(), None)
    part.pop(f"exclusive{name}", None)
    sign, tighter = (1, max) if name == "Minimum" else (-1, min)
    bounds = [] if inclusive is None else [inclusive]
    if exclusive is not None:
        exclusive = max(-10 * FAR, min(exclusive, 10 * FAR))
        step = 1 if is_integer else max(abs(exclusive), 1) * 1e-9
        bounds.append((exclusive // sign * sign if is_integer else exclusive) + sign * step)
    return tighter(bounds) if bounds else None


def loosen(part: dict[str, Any]) -> None:
    """Leave out what llguidance does not implement."""
    for name in NOT_IMPLEMENTED:
        part.pop(name, None)
    if "oneOf" in part:  # that no two fit at once
        options = part.pop("oneOf")
        if "anyOf" in part:
            part["allOf"] = [*part.get("allOf", ()), {"anyOf": options}]
        else:
            part["anyOf"] = options
    if "properties" in part:
        part.pop("minProperties", None)
        part.pop("maxProperties", None)
    for pattern in [pattern for pattern in patterns_of(part) if not is_followed(pattern)]:
        if pattern == part.get("pattern"):
            del part["pattern"]
        elif part["patternProperties"].pop(pattern, None) is not None:
            part["additionalProperties"] = True


def patterns_of(part: dict[str, Any]) -> Iterator[str]:
    """The regular expressions of a schema itself."""
    if isinstance(pattern := part.get("pattern"), str):
        yield pattern
    if isinstance(by_pattern := part.get("patternProperties"), dict):
        yield from by_pattern


def is_followed(pattern: str) -> bool:
    try:
        check_regex(pattern)
    except ValueError:
        return False
    return NO_REGULAR.search(pattern) is None


def check_regex(text: str) -> None:
    """Check what llguidance 1.9.1 lets pass: it drops a backslash at the end, and repeats repetitions."""
    plain = ESCAPE.sub("a", text)
    if plain.endswith("\\"):
        raise ValueError(f"the regular expression {text[-40:]!r} ends in a backslash, which escapes nothing")
    if (found := REPEATED.search(CLASS.sub("a", plain))) is not None:
        raise ValueError(f"the regular expression {text[:40]!r} repeats a repetition: {found[0]!r}")


NONE: Mapping[str, None] = MappingProxyType({})


class Keys(NamedTuple):
    """What a schema says of an object's keys, with all schemas that describe the same object."""

    are_named: bool = False
    is_said: bool = False
    """Whether it says if there may be others."""
    names: Mapping[str, None] = NONE
    """In their order; grammars keep it."""
    patterns: Mapping[str, None] = NONE
    required: Mapping[str, None] = NONE

    def __or__(self, other: Keys) -> Keys:
        return Keys(
            self.are_named | other.are_named,
            self.is_said | other.is_said,
            {**self.names, **other.names},
            {**self.patterns, **other.patterns},
            {**self.required, **other.required},
        )

    def __bool__(self) -> bool:
        return self.are_named


UNKNOWN = {"additionalProperties": True}


class Objects:
    """The objects that a schema describes. One is closed where it is described as a whole: each member of an ``allOf``
    names some keys of one object, and would shut out those of the others."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._keys: dict[int, Keys] = {}
        self._parts: set[int] = set()  # schemas that describe no object as a whole
        for part in schemas_in(schema):
            if self._is_joint(part):
                self._add_parts(part)

    def close(self, part: dict[str, Any], found: dict[str, Any]) -> None:
        """Close the object that ``part`` describes, in its copy ``found``."""
        own, keys = own_keys(part), self._keys_of(part)
        if id(part) in self._parts or keys.is_said or not (own or self._is_joint(part)):
            return
        named = {**keys.names, **keys.required} if not keys.patterns else keys.names
        found["properties"] = {name: {} for name in named} | (found["properties"] if own.names else {})
        if keys.patterns:
            found["patternProperties"] = {pattern: {} for pattern in keys.patterns} | found.get("patternProperties", {})
        found["additionalProperties"] = False
        if not any(self._keys_of(option) for option in alternatives(part)):
            found.pop("unevaluatedProperties", None)

    def _is_joint(self, part: dict[str, Any]) -> bool:
        """Whether several schemas name keys of the object that this one describes."""
        groups = [any(self._keys_of(member) for member in group) for group in self._described_by(part)]
        return sum(groups, own_keys(part).are_named) > 1 or (any(groups) and part.get("unevaluatedProperties") is False)

    def _add_parts(self, part: dict[str, Any]) -> None:
        for group in self._described_by(part):
            for member in group:
                if isinstance(member, dict) and id(member) not in self._parts:
                    self._parts.add(id(member))
                    self._add_parts(member)

    def _keys_of(self, part: Any) -> Keys:
        if not isinstance(part, dict):
            return Keys()
        if id(part) not in self._keys:
            self._keys[id(part)] = Keys()  # of a schema that refers to itself
            found = own_keys(part)
            for group in self._described_by(part):
                for member in group:
                    found |= self._keys_of(member)
            self._keys[id(part)] = found
        return self._keys[id(part)]

    def _described_by(self, part: dict[str, Any]) -> Iterator[list[Any]]:
        """The schemas that describe the same object, with alternatives in one list."""
        yield from ([member] for member in as_list(part.get("allOf")))
        yield alternatives(part)
        yield [part[name] for name in CONDITIONS if name in part]
        by_name = part.get("dependentSchemas")
        yield list(by_name.values()) if isinstance(by_name, dict) else []
        if "$ref" in part:
            yield [target_of(self._root, part["$ref"])]


def target_of(root: Any, reference: Any) -> Any:
    """What a reference leads to within a schema; to what lies elsewhere, a schema that says nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return UNKNOWN
    found = root
    for step in reference.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return UNKNOWN
    return found


def alternatives(part: dict[str, Any]) -> list[Any]:
    return [*as_list(part.get("anyOf")), *as_list(part.get("oneOf"))]


def own_keys(part: dict[str, Any]) -> Keys:
    properties, patterns = part.get("properties"), part.get("patternProperties")
    is_said = part.get("additionalProperties") is not None or part.get("unevaluatedProperties") not in (None, False)
    return Keys(
        isinstance(properties, dict) or isinstance(patterns, dict),
        is_said,
        dict.fromkeys(properties) if isinstance(properties, dict) else {},
        dict.fromkeys(patterns) if isinstance(patterns, dict) else {},
        dict.fromkeys(name for name in as_list(part.get("required")) if isinstance(name, str)),
    )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def schemas_in(schema: Any) -> Iterable[dict[str, Any]]:
    """A schema and those within it."""
    if isinstance(schema, list):
        for item in schema:
            yield from schemas_in(item)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in BY_NAME and isinstance(value, dict):
                yield from schemas_in(list(value.values()))
            elif name not in LITERALS:
                yield from schemas_in(value)


# -- grammars ----------------------------------------------------------------------------------------------------------

Kind = Literal["json_schema", "regex", "choice", "grammar"]

MAX_SOURCE_CHARS = 100_000
MAX_DEPTH = 64  # the parser recurses
MAX_CACHED = 256
# Between the marks of JSON: a space, or a line break and its indentation. Of blanks without bound weak models write no
# end.
BLANKS = r" |\n {0,16}"


class GrammarDeadEnd(ValueError):
    """A grammar that lets no token come, or whose parser has met a limit of its own.

    ``request_id`` names the request to blame, once that is known.
    """

    request_id: str | None = None


class CompiledGrammar:
    """A compiled grammar. Threads may share it. ``source``: its kind and text, for a compiler in another process."""

    def __init__(self, matcher: LLMatcher, source: tuple[Kind, str]) -> None:
        self._matcher = matcher
        self.source = source

    def start(self) -> Progress:
        """An output that has no tokens yet."""
        return Progress(self._matcher.deep_copy())


class Progress:
    """How far one output is in its grammar. It follows from the output's tokens alone."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_tokens = 0

    def allowed(self, output: Sequence[int]) -> bytes:
        """One bit for each token of the vocabulary, the lowest first: whether it may come after ``output``, which has
        grown since the last call. Where the grammar has ended, only tokens that end the output may.

        Raises:
            GrammarDeadEnd: no token may come: the output does not follow the grammar, or nothing does from here on, or
                the parser has met a limit.
        """
        if len(output) > self._num_tokens:
            self._matcher.consume_tokens(list(output[self._num_tokens :]))
            self._num_tokens = len(output)
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():  # the bits would let the output end
            reason = error_of(self._matcher)
            raise GrammarDeadEnd(f"the grammar cannot be followed after {len(output)} tokens: {reason}")
        return bits


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last ones. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Kind, str], CompiledGrammar] = OrderedDict()

    def compile(self, kind: Kind, source: Any) -> CompiledGrammar:
        """The grammar of a JSON schema (a text or an object), a regular expression, a list of texts, or a text in
        Lark's or GBNF's form. Takes milliseconds, but some take minutes (:mod:`swiftllm.sampling.trial` finds them);
        the first one a second.

        Raises:
            ValueError: it is no such grammar, or is too large; the message says where.
        """
        key = kind, text_of(source)
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer.written(), self._vocab_size, self._eos)
            found = self._compiled.pop(key, None) or CompiledGrammar(compiled(self._vocabulary, *key), key)
            self._compiled[key] = found
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return found


def vocabulary_of(written: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """The vocabulary of a tokenizer that is ``written`` in JSON. Takes a second."""
    from llguidance import LLTokenizer

    return LLTokenizer(written, n_vocab=vocab_size, eos_token=eos_token_ids)


def compiled(vocabulary: LLTokenizer, kind: Kind, text: str) -> LLMatcher:
    """The matcher of a grammar, before the first token."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    if kind == "json_schema":
        schema = json.dumps(prepared(json.loads(text)))
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": BLANKS})
    else:
        if kind == "regex":
            check_regex(text)
        grammar = grammar_from(kind, text)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def error_of(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n<")[0]


def text_of(source: Any) -> str:
    """A grammar as text."""
    text = source if isinstance(source, str) else json.dumps(source)
    if len(text) > MAX_SOURCE_CHARS:
        raise ValueError(f"it has {len(text)} characters, more than {MAX_SOURCE_CHARS}")
    if depth_of(text) > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    return text


def depth_of(text: str) -> int:
    """How deep brackets are nested in a text, at most; those within quotes count too."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest
