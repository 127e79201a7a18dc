"""Draws of tokens in Triton's interpreter: from the same weights the tokens of torch, attempt by attempt."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import swiftllm.ops.triton.ops as triton_ops
from swiftllm.core.request import Request, SamplingParams
from swiftllm.ops.triton.ops import TritonOps
from swiftllm.sampling.sampler import LogitsNotFinite, Sampler, most_likely
from tests.triton.interpreter import lend_libdevice, repair_bfloat16
from tests.triton.memory_check import watch_memory

lend_libdevice()
repair_bfloat16()
watch_memory()

HOST = torch.device("cpu")
DRAW = TritonOps(HOST, 80, num_multiprocessors=16).make_draw()
HOWS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.02},
    {"temperature": 1e-30, "top_p": 0.9},
    {"temperature": 1e30, "top_p": 0.3},
    {"temperature": 1.0, "min_p": 0.02, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "allowed_token_ids": [1, 4], "top_p": 0.9},
    {},
)


def make_requests(rows: int) -> list[Request]:
    return [Request(str(row), (1, 2), SamplingParams(seed=row, **HOWS[row % len(HOWS)])) for row in range(rows)]


def peaked(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows that lie apart, with ties in them and a few tokens alone left to some."""
    wide = torch.full((rows, columns + 8), torch.nan).to(dtype)
    logits = wide[:, :columns].copy_(3 * torch.randn(rows, columns))
    logits[1::3].round_()
    left = torch.randint(columns, (len(logits[2::5]), 4))
    logits[2::5] = torch.full_like(logits[2::5], -torch.inf).scatter_(1, left, torch.randn(left.shape).to(dtype))
    return logits


@pytest.mark.parametrize("tile", [64, triton_ops.MOST_TILE])
@pytest.mark.parametrize("columns", [5, 300, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tokens_are_those_of_torch(dtype, columns, tile, monkeypatch):
    monkeypatch.setattr(triton_ops, "MOST_TILE", tile)
    logits, requests = peaked(33, columns, dtype), make_requests(33)
    tokens = Sampler(draw=DRAW).sample(logits, requests)
    assert tokens == Sampler().sample(logits, requests) and len(set(tokens)) >= min(columns, 15)
    order = torch.randperm(33)[:10].tolist()
    assert Sampler(draw=DRAW).sample(logits[order], [requests[row] for row in order]) == [tokens[row] for row in order]


def test_tokens_of_a_large_vocabulary_are_those_of_torch():
    """The last tile is a part of one. Equal logits have the largest sums: 2**52 in a row of 2**18 tokens."""
    columns = (1 << 18) - 3
    logits, requests = 2 * torch.randn(4, columns), make_requests(4)
    logits[1] = 0.0
    assert Sampler(draw=DRAW).sample(logits, requests) == Sampler().sample(logits, requests)


@pytest.mark.parametrize("top_p", [0.01, 0.1])
def test_many_attempts_are_made_where_the_nucleus_is_small(top_p, monkeypatch):
    monkeypatch.setattr(triton_ops, "MOST_TILE", 128)
    rows, logits = 20, torch.zeros(20, 1000)
    requests = [Request(str(row), (1,), SamplingParams(temperature=1.0, top_p=top_p, seed=row)) for row in range(rows)]
    tokens = Sampler(draw=DRAW).sample(logits, requests)
    assert tokens == Sampler().sample(logits, requests) and max(tokens) <= 1000 * top_p
    assert len(set(tokens)) > 5


def test_frequencies_over_seeds_follow_the_distribution():
    probabilities, draws = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.05, 0.15], dtype=torch.float64), 200
    requests = [Request(str(i), (1,), SamplingParams(temperature=1.0, top_p=0.75, seed=i)) for i in range(draws)]
    counts = Counter(Sampler(draw=DRAW).sample(probabilities.log().float().expand(draws, -1).contiguous(), requests))
    assert counts.keys() == {1, 3, 5}  # 0.4 + 0.25 falls short, 0.4 + 0.25 + 0.15 reaches it
    for token, count in counts.items():
        probability = probabilities[token].item() / 0.8
        assert abs(count - draws * probability) <= 4.5 * (draws * probability * (1 - probability)) ** 0.5


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_distribution_gets_its_likeliest_token(value):
    logits = torch.randn(3, 70)
    logits[1] = value
    likeliest, settings = most_likely(logits), torch.tensor([[0.5], [1.0], [0.9]], dtype=torch.float64).repeat(1, 3)
    tokens = DRAW(logits, torch.tensor([2, 1, 0]), likeliest, settings)
    assert tokens[1] == likeliest[1]
    with pytest.raises(LogitsNotFinite, match="request 1"):
        Sampler(draw=DRAW).sample(logits, [Request(str(i), (1,), SamplingParams(temperature=1.0)) for i in range(3)])


def test_no_rows_are_no_launch():
    none = torch.empty(0, dtype=torch.int64)
    assert DRAW(torch.empty(0, 9), none, none, torch.empty(3, 0, dtype=torch.float64)).shape == (0,)
