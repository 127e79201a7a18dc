"""Grammars: what they let come next, how they go with other rules, and what is refused."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
import torch
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from swiftllm.core.request import Request, SamplingParams
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import MAX_CACHED, GrammarCompiler
from swiftllm.sampling.sampler import Sampler
from swiftllm.sampling.trial import GrammarTrials
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

VOCAB, EOS = 128, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(make_tiny_tokenizer(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, [EOS])


@pytest.fixture(scope="module")
def trials(tokenizer) -> GrammarTrials:
    return GrammarTrials(tokenizer, VOCAB, [EOS])


def may(grammar, output) -> set[int]:
    bits = np.frombuffer(grammar.start().allowed(output), dtype=np.uint8)
    return set(np.flatnonzero(np.unpackbits(bits, count=VOCAB, bitorder="little")).tolist())


def text_of(tokenizer, grammar, seed: int, **how) -> tuple[str, bool]:
    """What a model that knows nothing writes, and whether it has ended."""
    generator = torch.Generator().manual_seed(seed)
    sampling = SamplingParams(**{"max_tokens": 400, "temperature": 1.0, "seed": seed, "grammar": grammar} | how)
    request = Request("r", (5,), sampling, frozenset([EOS]))
    while not request.is_finished:
        row = torch.randn(1, VOCAB, generator=generator)
        request.append_token(Sampler().sample(row, [request])[0], 0.0)
    return tokenizer.decode(request.output_token_ids), request.finish_reason.value == "stop"


def test_tokens_that_the_model_has_no_row_for_break_no_grammar(tmp_path) -> None:
    """transformers and vLLM serve a tokenizer to which a padding token was added behind the model's last row."""
    folder = make_tiny_tokenizer(tmp_path)
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size = raw.get_vocab_size()
    raw.add_special_tokens([AddedToken("[PAD]", special=True)])
    raw.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(folder, vocab_size)
    grammar = GrammarCompiler(tokenizer, vocab_size, [EOS]).compile("choice", ["yes", "no"])
    assert {tokenizer.token_text(token) for token in may(grammar, ())} == {"y", "n"}
    assert GrammarTrials(tokenizer, vocab_size, [EOS]).check("regex", "[ab]").source == ("regex", "[ab]")


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[ab]{3}(cd)*", "[ab]{3}(cd)*"),
        ("choice", ["yes", "no", "maybe"], "yes|no|maybe"),
        ("grammar", 'start: "x" ("yz")* "!"', "x(yz)*!"),
        ("grammar", 'root ::= "x" ("yz")* "!"', "x(yz)*!"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_outputs_follow_the_grammar(tokenizer, compiler, kind, source, pattern):
    texts = [text_of(tokenizer, compiler.compile(kind, source), seed) for seed in range(12)]
    assert all(is_over and re.fullmatch(pattern, text) for text, is_over in texts)
    assert len({text for text, _ in texts}) > 1


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.5, "min_p": 0.1},
        {"logit_bias": {t: 100.0 for t in range(3, 60)}, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"bad_words": ((68,), (5, 6))},
        {"min_tokens": 30},
    ],
    ids=str,
)
def test_a_grammar_goes_with_all_other_rules(tokenizer, compiler, how):
    item = {"enum": [1, "two", None, True]}
    schema = {"type": "object", "properties": {"a": item, "b": {"type": "array", "items": item, "maxItems": 3}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    for seed in range(5):
        text, is_over = text_of(tokenizer, compiler.compile("json_schema", schema), seed, **how)
        assert is_over and set(json.loads(text)) == {"a", "b"}


def test_blanks_between_the_marks_of_json_are_few(compiler, tokenizer):
    """As Python and its pretty printer write them."""
    grammar = compiler.compile("json_schema", {"type": "object", "additionalProperties": {"type": "integer"}})

    def is_possible(text: str) -> bool:
        progress, tokens = grammar.start(), tokenizer.encode(text)
        masks = (np.frombuffer(progress.allowed(tokens[:length]), np.uint8) for length in range(len(tokens)))
        return all(
            np.unpackbits(mask, bitorder="little")[token] for mask, token in zip(masks, tokens, strict=True)
        )  # lazily: after a token that is not allowed there is no mask

    assert all(map(is_possible, ('{"a": 1, "b": 2}', '{"a":1,"b":2}', '{\n    "a": 1,\n    "b": 2\n}', "{}")))
    for text in ('{"a":  1', '{ \n"a', '{\n\n"a', "{\n" + " " * 17 + '"a', '{"a": 1  ,'):
        assert not is_possible(text), text


def test_an_exclusive_bound_of_a_number_is_none_of_its_values(compiler, tokenizer):
    draw = random.Random(4)
    for _ in range(40):
        low = draw.choice([draw.randint(-20, 20) / 4, draw.randint(-5, 5), draw.uniform(-1, 10)])
        high = low + draw.choice([1 / 8, 0.5, 3, draw.random()])
        inner = {"exclusiveMinimum": low, "exclusiveMaximum": high, "minimum": low - 1}
        schema = {"type": "array", "items": {"type": "number", **inner}, "minItems": 1, "maxItems": 1}
        grammar = compiler.compile("json_schema", schema)
        for value, is_within in ((low, False), (high, False), ((low + high) / 2, True)):
            tokens = tokenizer.encode(f"[{value}]")
            assert (grammar.start()._matcher.validate_tokens(tokens) == len(tokens)) == is_within, (schema, value)


def test_a_parser_that_gives_up_does_not_end_the_output(compiler, tokenizer):
    progress = compiler.compile("regex", "a+b").start()
    with pytest.raises(ValueError, match="cannot be followed after 2 tokens"):
        progress.allowed(tokenizer.encode("bb"))


def test_where_a_grammar_ends_the_output_ends(compiler, tokenizer):
    grammar = compiler.compile("choice", ["yes"])
    tokens = tokenizer.encode("yes")
    assert EOS not in may(grammar, []) and may(grammar, tokens) == {EOS}
    assert text_of(tokenizer, grammar, 0, min_tokens=50, bad_words=((tokens[0],),)) == ("yes", True)


def test_an_output_that_ignores_its_end_goes_on_as_long_as_the_grammar_lets_it(compiler, tokenizer):
    grammar = compiler.compile("regex", "a{1,5}")
    assert text_of(tokenizer, grammar, 0, ignore_eos=True, stop_token_ids=(66,)) == ("aaaaa", True)
    assert text_of(tokenizer, grammar, 0, ignore_eos=True, max_tokens=3) == ("aaa", False)


def test_progress_follows_from_the_tokens(compiler, tokenizer):
    """Step by step or at once, and outputs of one grammar do not disturb each other."""
    grammar = compiler.compile("regex", "(abc|abd|xy)+")
    tokens = tokenizer.encode("abcabdxyabc")
    one, other = grammar.start(), grammar.start()
    for length in range(len(tokens)):
        assert one.allowed(tokens[:length]) == grammar.start().allowed(tokens[:length])
        other.allowed(tokenizer.encode("xy"))


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("json_schema", {"type": "objec"}, "objec"),
        ("json_schema", {"$ref": "#/nowhere"}, "nowhere"),
        ("regex", "(a|b", "unclosed group"),
        ("regex", "a\\", "ends in a backslash"),
        ("grammar", "start: nothing", "nothing"),
        ("json_schema", json.loads('{"a":' * 70 + "1" + "}" * 70), "64 deep"),
        ("regex", "a" * 100_001, "more than 100000"),
        ("json_schema", "no schema", "."),
    ],
)
def test_what_is_no_grammar_is_refused(compiler, trials, kind, source, told):
    for attempt in (compiler.compile, trials.check, trials.check):
        with pytest.raises(ValueError, match=told):
            attempt(kind, source)


def test_a_grammar_that_takes_too_long_is_refused_and_those_after_it_are_not(trials):
    cruel = {"type": "integer", "multipleOf": 9999991}  # 167 s and 6 GiB
    assert trials.check("choice", ["a"]).source == ("choice", '["a"]')
    first = trials._process
    for _ in range(2):
        with pytest.raises(ValueError, match="more than 1 s of CPU time"):
            trials.check("json_schema", cruel)
    assert first.poll() is not None
    assert trials.check("choice", ["a"]) == trials.check("choice", ["a"])
    trials.check("regex", "\u00fc+")
    trials._process.kill()
    with pytest.raises(ValueError, match="cannot be compiled"):
        trials.check("regex", "b+")
    trials.check("regex", "c+")


def test_the_process_that_tries_grammars_ends_with_its_owner(tokenizer):
    own = GrammarTrials(tokenizer, VOCAB, [EOS])
    own.check("regex", "a")
    process = own._process
    del own
    assert process.poll() is not None


def test_the_last_grammars_are_kept(compiler):
    first = compiler.compile("choice", ["a"])
    assert compiler.compile("choice", ["a"]) is first
    for number in range(MAX_CACHED):
        compiler.compile("choice", [str(number)])
    assert compiler.compile("choice", ["a"]) is not first
