"""Answers by a grammar: text is free, and what the reader takes for a call follows its tool's schema."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import CompiledGrammar, GrammarCompiler, GrammarDeadEnd
from swiftllm.server.tool_calls import FORMATS, CallReader
from swiftllm.server.tools import CALLS, AnswerGrammar
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<think>")
END, MAX_TOKENS = 2, 150
DIGITS = {"D": {"enum": [1, 2]}}
TOOLS = {
    "f": {"type": "object", "properties": {"a": {"$ref": "#/$defs/D"}}, "required": ["a"], "$defs": DIGITS,
          "additionalProperties": False},
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
ARGUMENTS = {"f": [{"a": 1}, {"a": 2}], "g": [{}]}
CALL = '{"name": "f", "arguments": {"a": 1}}'
LLAMA = CALL.replace("arguments", "parameters")


def tokenizer_in(folder, marks=MARKS) -> Tokenizer:
    fast = PreTrainedTokenizerFast.from_pretrained(make_tiny_tokenizer(folder))
    fast.add_tokens([AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(fast, str(folder))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def grammars(tokenizer) -> dict[str, CompiledGrammar]:
    compiler = GrammarCompiler(tokenizer, 160, [END])
    return {
        name: compiler.compile("grammar", AnswerGrammar(FORMATS[name], tokenizer).following(TOOLS)) for name in CALLS
    }


def follows(grammar: CompiledGrammar, tokens: list[int]) -> bool:
    """Whether an output may be so, and end."""
    progress = grammar.start()
    try:
        masks = [progress.allowed(tokens[:length]) for length in range(len(tokens) + 1)]
    except GrammarDeadEnd:
        return False
    return all(mask[token // 8] >> token % 8 & 1 for mask, token in zip(masks, [*tokens, END], strict=True))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call> {{a}}"),
        ("llama3_json", f"\n{LLAMA}; {LLAMA}"),
        ("llama3_json", f"Look {{<|python_tag|>{LLAMA}"),
        ("mistral", f" [{CALL},{CALL}]"),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("mistral", 'Look[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a":1}'),
        ("json", f"{CALL}\n{CALL}"),
        ("json", f"[{CALL}]"),
        ("granite", f"Look<|tool_call|>[{CALL}, {CALL}]"),
    ],
)
def test_calls_follow_their_schemas_and_text_is_free(name, text, grammars, tokenizer) -> None:
    for said in (text, "<think>a {1}</think> é", "  ", ""):
        assert follows(grammars[name], tokenizer.encode(said)), said
    for wrong in (text.replace("1", "3"), text.replace('"f"', '"h"').replace("]f", "]h")):
        assert not follows(grammars[name], tokenizer.encode(wrong)), wrong


@pytest.mark.parametrize("name", CALLS)
def test_random_answers_have_valid_calls(name, grammars, tokenizer) -> None:
    """Marks, brackets and ends come more often than they would by chance; some answers are cut."""
    draw, found, form = random.Random(5), 0, FORMATS[name]
    likely = [tokenizer.token_id(mark) for mark in (*form.begins, form.end or "</s>", *'{["}];')]
    for _ in range(40):
        progress, tokens = grammars[name].start(), tokenizer.encode(draw.choice(("", *form.opens)))
        while len(tokens) < MAX_TOKENS and tokens[-1:] != [END]:
            bits = np.frombuffer(progress.allowed(tokens), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            liked = [token for token in likely if token in allowed] if draw.random() < 0.5 else []
            tokens.append(draw.choice(liked or allowed))
        reader = CallReader(form)
        parts = reader.push(tokenizer.decode(tokens, False).removesuffix("</s>")) + reader.finish()
        calls = [part for part in parts if part.kind == "tool_call"]
        assert all(json.loads(call.text) in ARGUMENTS[call.name] for call in calls), tokens
        found += len(calls)
    assert found > 10


def test_calls_that_begin_with_text_of_several_tokens_cannot_be_told(tmp_path) -> None:
    plain = tokenizer_in(tmp_path, ())
    assert AnswerGrammar(FORMATS["hermes"], plain).following(TOOLS) is None
    for name in FORMATS.keys() - CALLS:
        assert AnswerGrammar(FORMATS[name], plain).following(TOOLS) is None
    assert "calls" in AnswerGrammar(FORMATS["json"], plain).following(TOOLS)
