"""Biases, penalties and min_p: what the rules say, row by row, and that nothing else changes."""

from __future__ import annotations

import random

import pytest
import torch

from swiftllm.core.request import Request, SamplingParams, TokenCounts
from swiftllm.device import HostDevice
from swiftllm.sampling.sampler import Sampler, adjust_logits
from tests.reference.logit_rules import by_the_rules, plain

VOCAB = 90
PENALTIES = (
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -0.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -2.0, "presence_penalty": 2.0, "repetition_penalty": 1.2, "logit_bias": {3: -100.0, 9: 2.5}},
    {"logit_bias": {7: 100, 0: -1.25}},
    {"min_tokens": 30, "stop_token_ids": tuple(range(20, 80)), "presence_penalty": 0.5},
    {"bad_words": (*((token,) for token in range(0, 90, 2)), *((token, 7) for token in range(20, 60)), (30, 31, 9))},
    {"allowed_token_ids": (3, 9, 44, 71, 72), "bad_words": ((9,), (44,)), "repetition_penalty": 1.3},
)
CUTS = ({"min_p": 0.1}, {"min_p": 0.02, "top_p": 0.8}, {"min_p": 0.3, "top_k": 9}, {"min_p": 1.0}, {"top_p": 0.6}, {})


def request(index: int, rng: random.Random, **sampling) -> Request:
    """A request with some tokens of prompt and output, most of them more than once."""
    how = SamplingParams(max_tokens=1000, seed=index, **sampling)
    r = Request(f"r{index}", tuple(rng.choices(range(40), k=rng.randint(1, 30))), how)
    r.output_token_ids = rng.choices(range(20, 60), k=rng.randint(0, 50))
    return r


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_tokens_come_from_the_logits_of_the_rules(dtype, at_once, monkeypatch):
    """Greedy or drawn, in a batch of all kinds, as from logits that were changed beforehand."""
    monkeypatch.setattr("swiftllm.sampling.sampler.CPU_LOGITS", at_once * VOCAB)
    rng = random.Random(1)
    hows = [{**p, **c, "temperature": t} for p in (*PENALTIES, {}) for c in CUTS for t in (0.0, 0.7, 1.3)]
    rng.shuffle(hows)
    requests = [request(i, rng, **how) for i, how in enumerate(hows)]
    rows = (torch.randn(len(hows), VOCAB, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    before = rows.clone()
    tokens = Sampler().sample(rows, requests)
    assert torch.equal(rows, before), "the logits belong to the caller"
    changed = torch.stack([by_the_rules(row, r) for row, r in zip(rows, requests, strict=True)])
    assert tokens == Sampler().sample(changed, [plain(r) for r in requests])
    assert tokens != Sampler().sample(rows, [plain(r) for r in requests])


def test_rows_that_share_biases_or_allowed_tokens_change_as_if_each_had_its_own():
    """The outputs of one HTTP request share theirs; here rows of two such requests and of others are mixed."""
    rng = random.Random(4)
    bias = {token: rng.uniform(-9, 9) for token in range(0, VOCAB, 2)}
    many = {"logit_bias": bias, "repetition_penalty": 1.4}
    few = {"logit_bias": {5: 3.0}, "allowed_token_ids": tuple(range(2, 40))}
    hows = [many, few, {"logit_bias": {7: 1.0}}, many, {}, few, many]
    shared = {id(how): SamplingParams(max_tokens=1000, **how) for how in hows}
    requests = [request(i, rng, **how) for i, how in enumerate(hows)]
    rows = torch.randn(len(hows), VOCAB, generator=torch.Generator().manual_seed(5))
    alone, together = rows.clone(), rows.clone()
    adjust_logits(alone, requests, HostDevice().compute)
    for r, how in zip(requests, hows, strict=True):
        r.sampling = shared[id(how)].varied(seed=1)
    adjust_logits(together, requests, HostDevice().compute)
    assert torch.equal(together, alone) and not torch.equal(alone, rows)


def test_penalties_follow_the_output_as_it_grows():
    """The counts are kept from step to step, and are those of a request that comes with all its tokens."""
    rng, sampler = random.Random(3), Sampler()
    generator = torch.Generator().manual_seed(4)
    endless = [how for how in PENALTIES if "stop_token_ids" not in how]
    growing = [request(i, rng, temperature=0.8 * (i % 2), **how) for i, how in enumerate(endless)]
    for _ in range(40):
        rows = torch.randn(len(growing), VOCAB, generator=generator) * 3
        known = [Request(r.request_id, r.prompt_token_ids, r.sampling) for r in growing]
        for r, twin in zip(growing, known, strict=True):
            twin.output_token_ids = list(r.output_token_ids)
        tokens = sampler.sample(rows, growing)
        assert tokens == sampler.sample(rows, growing) == Sampler().sample(rows, known)
        for r, token in zip(growing, tokens, strict=True):
            if rng.random() < 0.9:  # else the step was lost and is made again
                r.append_token(token, 0.0)
        if rng.random() < 0.1:
            growing[0].start_over()


def test_counts_of_tokens():
    counts = TokenCounts(prompt=[5, 6, 5])
    counts.catch_up([7, 5])
    counts.catch_up([7, 5, 7, 8, 8, 8])
    assert dict(zip(counts.ids, counts.counts, strict=True)) == {5: 1.0, 6: 0.0, 7: 2.0, 8: 3.0}


def test_the_prompt_counts_for_repetition_alone():
    row = torch.zeros(1, VOCAB)
    row[0, [4, 5]] = torch.tensor([2.0, 1.9])
    r = Request("r", (4, 4, 4), SamplingParams(presence_penalty=2.0, frequency_penalty=2.0))
    assert Sampler().sample(row, [r]) == [4]
    assert Sampler().sample(row, [Request("r", (4,), SamplingParams(repetition_penalty=1.1))]) == [5]


def test_a_known_likeliest_token_is_that_of_the_models_logits():
    """Graphs bring it along; a row whose request changes its logits has another."""
    rows = torch.zeros(3, VOCAB)
    rows[:, 5] = 1.0
    hows = ({}, {"logit_bias": {8: 50}}, {"logit_bias": {8: 50}, "temperature": 0.1, "seed": 1})
    requests = [Request(str(i), (1,), SamplingParams(**how)) for i, how in enumerate(hows)]
    assert Sampler().sample(rows, requests, likeliest=torch.tensor([5, 5, 5])) == [5, 8, 8]


def test_logprobs_stay_the_models_own():
    rows = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    r = Request("r", (1,), SamplingParams(logit_bias={3: 100}, repetition_penalty=1.5, logprobs=1))
    sampler, own = Sampler(), rows.log_softmax(-1)[0]
    assert sampler.sample(rows, [r]) == [3]
    logprob = sampler.take_logprobs()["r"]
    assert logprob.logprob == pytest.approx(own[3].item(), abs=1e-6)
    assert logprob.top == ((int(own.argmax()), pytest.approx(own.max().item(), abs=1e-6)),)


def test_min_p_keeps_what_is_as_likely_as_it_says():
    probabilities = torch.tensor([[0.4, 0.2, 0.19, 0.11, 0.1]])
    for min_p, temperature, kept in ((0.49, 1.0, {0, 1}), (0.27, 1.0, {0, 1, 2, 3}), (0.49, 2.0, {0, 1, 2, 3, 4})):
        r = Request("r", (1,), SamplingParams(max_tokens=999, temperature=temperature, min_p=min_p, seed=0))
        drawn = set()
        for _ in range(300):
            drawn.update(tokens := Sampler().sample(probabilities.log(), [r]))
            r.append_token(tokens[0], 0.0)
        assert drawn == kept


def test_bad_words_never_become_whole():
    """Whatever comes before them; a word of one token never comes at all."""
    generator, sampler = torch.Generator().manual_seed(5), Sampler()
    words = ((3,), (4, 5), (4, 4, 6))
    r = Request("r", (4,), SamplingParams(max_tokens=999, temperature=1.0, seed=0, bad_words=words))
    for _ in range(400):
        row = torch.randn(1, VOCAB, generator=generator)
        row[0, 3:7] += 6.0
        r.append_token(sampler.sample(row, [r])[0], 0.0)
    text = " ".join(map(str, (0, *r.output_token_ids, 0)))
    assert not any(f" {' '.join(map(str, word))} " in text for word in words)
    assert " 5 " in text and " 6 " in text and " 4 4 " in text


def test_what_is_allowed_comes_before_what_is_forbidden():
    """A row is never without a token: bans that would leave none are left aside."""
    how = SamplingParams(max_tokens=9, min_tokens=9, stop_token_ids=(5, 6), allowed_token_ids=(5, 6), bad_words=((7,),))
    row = torch.zeros(1, VOCAB)
    row[0, [6, 7]] = torch.tensor([1.0, 2.0])
    assert Sampler().sample(row, [Request("r", (1,), how)]) == [6]


def test_rows_of_others_are_left_alone():
    rows = torch.randn(3, VOCAB)
    requests = [Request(str(i), (1, 2), SamplingParams()) for i in range(2)]
    requests.append(Request("2", (1, 2), SamplingParams(repetition_penalty=3.0)))
    changed = rows.clone()
    adjust_logits(changed, requests, HostDevice().compute)
    assert torch.equal(changed[:2], rows[:2]) and not torch.equal(changed[2], rows[2])
