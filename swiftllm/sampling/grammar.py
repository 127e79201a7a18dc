"""Grammars that outputs follow: JSON schemas, regular expressions, choices, and grammars in Lark's or GBNF's form.

llguidance parses them and finds the tokens that may come next. It needs no torch, and takes some 50 us a token.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from swiftllm.model.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "choice", "grammar"]

MAX_SOURCE_CHARS = 100_000
MAX_DEPTH = 64  # the parser recurses
MAX_CACHED = 256


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
        grown since the last call. Where the grammar has ended, only tokens that end the output may."""
        if len(output) > self._num_tokens:
            self._matcher.consume_tokens(list(output[self._num_tokens :]))
            self._num_tokens = len(output)
        return self._matcher.compute_bitmask()


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last ones. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[Kind, str], CompiledGrammar] = OrderedDict()

    def compile(self, kind: Kind, source: Any) -> CompiledGrammar:
        """The grammar of a JSON schema (a text or an object), a regular expression, a list of texts, or a text in
        Lark's or GBNF's form. Takes milliseconds; the first one a second.

        Raises:
            ValueError: it is no such grammar, or is too large; the message says where.
        """
        text = source if isinstance(source, str) else json.dumps(source)
        if len(text) > MAX_SOURCE_CHARS:
            raise ValueError(f"it has {len(text)} characters, more than {MAX_SOURCE_CHARS}")
        if depth_of(text) > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        with self._lock:
            found = self._compiled.pop((kind, text), None) or self._compile(kind, text)
            self._compiled[kind, text] = found
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, kind: Kind, text: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLTokenizer, grammar_from

        if self._vocabulary is None:
            written = self._tokenizer.written()
            self._vocabulary = LLTokenizer(written, n_vocab=self._vocab_size, eos_token=self._eos)
        matcher = LLMatcher(self._vocabulary, grammar_from(kind, text), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n<state>")[0])
        return CompiledGrammar(matcher, (kind, text))


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
