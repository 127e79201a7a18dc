"""Workloads: lengths, arrivals and prompts from a trace, scaled as asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest

from apex.simulator.backend import PLACEHOLDER_TOKEN
from apex.workloads.catalogue import DrawnTrace, Origin, Quantiles
from apex.workloads.files import TraceRow
from apex.workloads.requests import (
    PromptTokens,
    WorkloadSpec,
    docstrings,
    load_corpus,
    load_prompt_tokens,
    make_lengths,
    make_workload,
    merge_lengths,
    prompts_of,
)
from swiftllm.core.request import ServiceClass

TRACE = DrawnTrace(
    "osc", "OSC", Origin("fitted", "for tests"), Quantiles(((0, 100), (1, 200))), Quantiles(((0, 40), (1, 60)))
)


def lengths(**changes):
    return make_lengths(WorkloadSpec(**{"name": "osc", "num_requests": 20, **changes}), TRACE)


def test_scale_multiplies_and_never_reaches_zero():
    whole, tenth, tiny = lengths(), lengths(scale=0.1), lengths(scale=1e-6)
    for row, small in zip(whole.rows, tenth.rows, strict=True):
        assert small.input_tokens == round(row.input_tokens * 0.1)
        assert small.output_tokens == round(row.output_tokens * 0.1)
    assert {(row.input_tokens, row.output_tokens) for row in tiny.rows} == {(1, 1)}


def test_output_len_sets_the_average_and_leaves_inputs():
    plain, longer = lengths(), lengths(output_len=200, scale=0.5)
    assert longer.mean_output_tokens == pytest.approx(100, abs=1)
    assert [row.input_tokens for row in longer.rows] == [round(row.input_tokens / 2) for row in plain.rows]


def test_arrivals():
    assert {row.arrival_s for row in lengths().rows} == {0.0}
    arrivals = [row.arrival_s for row in lengths(num_requests=4000, arrivals="poisson", request_rate=5.0).rows]
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0 and gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.06) and gaps.std() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_requests": 0},
        {"scale": 0},
        {"output_len": 0},
        {"arrivals": "poisson"},
        {"request_rate": 2.0},
        {"arrivals": "poisson", "request_rate": 0.0},
    ],
)
def test_bad_specs_are_refused(changes):
    with pytest.raises(ValueError, match=r"num_requests|scale|output_len|request_rate"):
        lengths(**changes)


def test_digest_names_the_lengths():
    assert lengths().digest() == lengths().digest() != lengths(seed=1).digest()


@pytest.mark.parametrize("tokens", [PromptTokens(5000, tuple(np.arange(3000) % 977)), PromptTokens(5000)])
def test_prompts_have_their_lengths_and_differ(tokens):
    workload = make_workload(lengths(num_requests=50), tokens)
    prompts = [request.prompt_token_ids for request in workload.requests]
    assert [len(prompt) for prompt in prompts] == [row.input_tokens for row in workload.lengths.rows]
    assert len({prompt[:16] for prompt in prompts}) == 50  # no two prompts begin alike
    assert all(len(set(prompt)) > 50 for prompt in prompts)
    assert all(0 <= token < 5000 for prompt in prompts for token in prompt)
    assert workload == make_workload(lengths(num_requests=50), tokens)


def test_prompts_begin_alike_where_their_segments_do():
    """A part that several have is one text, cut to the length that each has of it; the rest is a prompt's own."""
    rows = [
        TraceRow(9, 1, segments=((7, 4), (1, 2))),
        TraceRow(12, 1, segments=((7, 4), (1, 2), (PLACEHOLDER_TOKEN, 3), (2, 3))),
        TraceRow(3, 1, segments=((7, 4),)),
        TraceRow(5, 1),
    ]
    sizes = []

    def texts(lengths):
        sizes.extend(lengths)
        return [tuple(range(100 * i, 100 * i + length)) for i, length in enumerate(lengths)]

    first, second, third, own = prompts_of(rows, texts)
    assert sizes[0] == 3 and [len(prompt) for prompt in (first, second, third, own)] == [9, 12, 3, 5]
    assert first[:6] == second[:6] and third == first[:3] and second[6:9] == (0, 1, 2)
    assert not set(first[6:]) & set(second) and not set(own) & {*first, *second}


def test_prompts_longer_than_the_text_go_round():
    prompt = PromptTokens(10, (1, 2, 3)).prompts([7], seed=0)[0]
    assert len(prompt) == 7 and prompt[:3] == prompt[3:6]


def test_corpus_is_prose_and_large():
    text = load_corpus()
    assert len(text) > 300_000 and "Return" in text
    words = text.split()
    assert len(set(words)) > 5000
    assert docstrings('"""a"""\ndef f():\n    """b"""\n    x = "c"\n') == ["a", "b"]


def test_tokenizer_of_the_model_folder_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    assert load_prompt_tokens(tmp_path).text_ids is None
    load_prompt_tokens.cache_clear()
    vocabulary = {"[UNK]": 0, **{word: i + 1 for i, word in enumerate(sorted(set(load_corpus().split()))[:900])}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = load_prompt_tokens(tmp_path)
    assert len(tokens.text_ids) == len(load_corpus().split()) and tokens.vocab_size == 1000
    load_prompt_tokens.cache_clear()


def test_merged_streams_keep_their_lengths_arrivals_and_classes() -> None:
    urgent, backlog = lengths(arrivals="poisson", request_rate=2.0), lengths(seed=3, num_requests=30)
    merged = merge_lengths(urgent, backlog)
    assert (merged.spec, merged.best_effort) == (urgent.spec, backlog.spec)
    assert [row.arrival_s for row in merged.rows] == sorted(row.arrival_s for row in merged.rows)
    for stream, service_class in zip((urgent, backlog), ServiceClass, strict=True):
        rows = [row for row in merged.rows if row.service_class is service_class]
        assert [(row.input_tokens, row.arrival_s) for row in rows] == [
            (row.input_tokens, row.arrival_s) for row in stream.rows
        ]
    requests = make_workload(merged, PromptTokens(vocab_size=9)).requests
    assert [request.service_class for request in requests] == [row.service_class for row in merged.rows]
    assert len({request.request_id for request in requests}) == 50
    assert merged.digest() != merge_lengths(backlog, urgent).digest()


def test_a_closed_loop_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match="closed loop"):
        merge_lengths(lengths(), lengths(arrivals="closed-loop", concurrency=2))
