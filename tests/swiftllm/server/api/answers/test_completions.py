"""Events of a completion, without a server: log-probabilities of an echoed prompt, and usage in each chunk."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from swiftllm.core.request import TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.completions import CompletionAnswer
from swiftllm.server.output_text import Piece
from swiftllm.server.protocol import CompletionRequest
from tests.reference.tiny_tokenizer import make_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(make_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answer_of(tokenizer: Tokenizer, prompt: list[int], **options: object) -> CompletionAnswer:
    choice = SimpleNamespace(
        index=0,
        prompt=SimpleNamespace(token_ids=prompt, text=None),
        stream=SimpleNamespace(num_cached_tokens=0, prompt_logprobs=[TokenLogprob(t, -1.0) for t in prompt[1:]]),
        text=SimpleNamespace(num_tokens=0),
    )
    generation = SimpleNamespace(
        choices=[choice],
        prompts=[choice.prompt],
        request_id="r",
        body=CompletionRequest(prompt=prompt, **options),
        context=SimpleNamespace(model_name="m", tokenizer=tokenizer, caches_prefixes=False, fingerprint="fp"),
    )
    return CompletionAnswer(generation)


def test_a_character_that_an_echoed_prompt_cuts_belongs_to_its_last_token(tokenizer: Tokenizer) -> None:
    """As in OpenAI's API each token has its text: the output's first token takes nothing over from the prompt."""
    prompt, output = tokenizer.encode("a🍰")[:-1], tokenizer.encode("ab")
    answer = answer_of(tokenizer, prompt, echo=True, logprobs=0)
    (choice,) = answer.generation.choices
    (echoed,) = answer.prompt_pieces(choice)
    assert math.isnan(echoed.logprobs[0].logprob)
    found = answer.logprobs(choice, echoed)
    assert found["tokens"] == ["a", "", "", "\ufffd"] and found["text_offset"] == [0, 1, 1, 1]
    found = answer.logprobs(choice, Piece("ab", [TokenLogprob(token, -1.0) for token in output]))
    assert found["tokens"] == ["a", "b"] and found["text_offset"] == [2, 3]


def test_each_chunk_counts_the_tokens_so_far(tokenizer: Tokenizer) -> None:
    """OpenAI: `total_tokens` is the sum of the other two; vLLM's `continuous_usage_stats` sends it with each chunk."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = answer_of(tokenizer, [5, 6, 7], stream=True, stream_options=options)
    (choice,) = answer.generation.choices
    for count in (1, 3, 8):
        choice.text.num_tokens = count
        event = answer.chunk_event(choice, Piece("x"))
        usage = json.loads(event.removeprefix("data: "))["usage"]
        assert usage == {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
    end, done, _ = answer.closing_events().split("\n\n")
    assert json.loads(end.removeprefix("data: "))["usage"] == usage and done == "data: [DONE]"


def test_the_usage_of_an_answer_is_that_of_all_prompts_and_choices(tokenizer: Tokenizer) -> None:
    """OpenAI counts each prompt once, however many choices it has; of its cached tokens, those of its first choice."""
    answer = answer_of(tokenizer, [5, 6, 7], stream=True, n=2, stream_options={"include_usage": True})
    generation = answer.generation
    generation.context.caches_prefixes = True
    generation.prompts = [SimpleNamespace(token_ids=[5] * length) for length in (3, 4)]
    generation.choices = [
        SimpleNamespace(text=SimpleNamespace(num_tokens=tokens), stream=SimpleNamespace(num_cached_tokens=cached))
        for tokens, cached in ((10, 2), (20, 100), (30, 1), (40, 100))
    ]
    end, _, _ = answer.closing_events().split("\n\n")
    assert json.loads(end.removeprefix("data: "))["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 100,
        "total_tokens": 107,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_log_probabilities_are_numbers_that_json_has(tokenizer: Tokenizer) -> None:
    """vLLM: -9999 stands for a probability of zero. Of tokens with equal texts the likelier one counts."""
    answer = answer_of(tokenizer, [5, 6], logprobs=2)
    (choice,) = answer.generation.choices
    half, other = tokenizer.encode("é")[0], tokenizer.encode("🍰")[0]
    entry = TokenLogprob(5, -math.inf, top=((half, -0.5), (other, -0.75)))
    found = answer.logprobs(choice, Piece("x", [entry]))
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{"\ufffd": -0.5, tokenizer.text_alone(5): -9999.0}]
