"""Grammars that outputs follow: JSON schemas, regular expressions, choices, and grammars in Lark's or GBNF's form.

llguidance parses them and finds the tokens that may come next. It needs no torch, and takes some 50 us a token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from swiftllm.sampling.schemas import check_regex, prepared

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swiftllm.model.folder.tokenizer import Tokenizer

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
    """The matcher of a grammar, before the first token.

    Raises:
        ValueError: it is no such grammar, or is too large; the message says where.
    """
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
    """A grammar as text.

    Raises:
        ValueError: it is too long, or too deep.
    """
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
