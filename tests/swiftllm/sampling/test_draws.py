"""Draws by the thousand: the right distributions, over exactly the right tokens, whatever else is in the batch."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from swiftllm.core.request import Request, SamplingParams
from swiftllm.sampling import sampler as sampling
from swiftllm.sampling.sampler import Sampler, invert, nearest, weigh

DRAWS = 4000
HOWS = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.4, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_k": 70, "top_p": 0.7},
)


def make_requests(count: int, seed: int = 0, **how) -> list[Request]:
    return [Request(str(i), (1,), SamplingParams(seed=seed + i, **how)) for i in range(count)]


def peaked(rows: int, columns: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread


def kept(row: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    """The definition, in Python: tokens by probability, equals by id; the first k; of those the first that reach p."""
    row = row.double()
    weights = ((row - row.max()) / temperature).exp().tolist()
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: top_k or None]
    total, before, kept = sum(weights[token] for token in order), 0.0, {}
    for token in order:
        if before >= top_p * total * (1 + 1e-12):
            break
        before += weights[token]
        kept[token] = weights[token]
    return {token: weight / before for token, weight in kept.items()}


def assert_follows(drawn: list[int], probabilities: dict[int, float]) -> None:
    """Pearson's test at 4.5 standard deviations; tokens expected less than 10 times count together."""
    counts = Counter(drawn)
    assert counts.keys() <= probabilities.keys()
    common = {token: p for token, p in probabilities.items() if p * len(drawn) >= 10}
    cells = [(counts[token], p * len(drawn)) for token, p in common.items()]
    rest = len(drawn) - sum(expected for _, expected in cells)
    if rest >= 10:
        cells.append((len(drawn) - sum(count for count, _ in cells), rest))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(1, len(cells) - 1)
    assert statistic <= freedom + 4.5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("columns", [77, 1000, 5120])
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_frequencies_over_seeds_follow_the_distribution(how, columns):
    row = peaked(1, columns)
    drawn = Sampler().sample(row.expand(DRAWS, -1), make_requests(DRAWS, **how))
    assert_follows(drawn, kept(row[0], **how))


@pytest.mark.parametrize(
    "how", [{"top_k": 7}, {"top_k": 90}, {"top_p": 0.4}, {"top_p": 0.97}, {"top_k": 30, "top_p": 0.5}]
)
@pytest.mark.parametrize("columns", [100, 9000])
def test_of_equals_the_first_are_kept(how, columns):
    """Half precision is full of ties: whole numbers are nothing else."""
    row = peaked(1, columns, seed=3, spread=1.5).round().bfloat16()
    expected = kept(row[0], temperature=0.5, **how)
    drawn = Sampler().sample(row.expand(DRAWS, -1), make_requests(DRAWS, temperature=0.5, **how))
    assert_follows(drawn, expected)
    if min(expected.values()) * DRAWS > 20:
        assert set(drawn) == expected.keys()


def test_a_small_nucleus_of_a_flat_distribution_takes_many_attempts():
    columns, top_p = 4096, 0.01
    drawn = Sampler().sample(torch.zeros(DRAWS, columns), make_requests(DRAWS, temperature=1.0, top_p=top_p))
    assert set(drawn) == set(range(41))  # 40 tokens come to less than top_p
    assert_follows(drawn, dict.fromkeys(range(41), 1 / 41))


@pytest.mark.parametrize("columns, dtype", [(50, torch.float32), (1500, torch.float16), (2048, torch.bfloat16)])
def test_a_row_gets_its_token_in_any_batch(columns, dtype, monkeypatch):
    logits = peaked(48, columns, seed=1).to(dtype)
    requests = [
        Request(str(i), (1,), SamplingParams(seed=i, **({}, *HOWS)[i % (1 + len(HOWS))])) for i in range(len(logits))
    ]
    alone = [Sampler().sample(logits[i : i + 1], requests[i : i + 1])[0] for i in range(len(logits))]
    assert len(set(alone)) > 30
    draw = random.Random(0)
    for at_once in (columns, 7 * columns, 1 << 22):
        monkeypatch.setattr(sampling, "CPU_LOGITS", at_once)
        for _ in range(5):
            rows = draw.sample(range(len(logits)), draw.randint(2, len(logits)))
            tokens = Sampler().sample(logits[rows], [requests[row] for row in rows])
            assert tokens == [alone[row] for row in rows]


def test_a_weight_does_not_depend_on_where_it_lies():
    """Vectorised functions treat the ends of a tensor apart: they must round alike there."""
    distance, temperature = peaked(3, 1000, spread=20.0).abs(), torch.full((3, 1), 0.7)
    weights = weigh(distance.clone(), temperature)
    for start in range(70):
        for length in (1, 7, 16, 33, 900):
            part = distance[:, start : start + length].contiguous()
            assert torch.equal(weigh(part, temperature), weights[:, start : start + length])


@pytest.mark.parametrize("columns", [5, 512, 1100])
def test_no_token_of_weight_zero_is_drawn_at_either_end(columns):
    weights = torch.zeros(3, columns)
    weights[:, columns // 2] = torch.tensor([1.0, 2.0**34, 3.0])
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        place, total = invert(weights, torch.full((3, 1), uniform, dtype=torch.float64))
        assert place[:, 0].tolist() == [columns // 2] * 3
        assert total[:, 0].tolist() == [1.0, 2.0**34, 3.0]


@pytest.mark.parametrize("columns, count", [(30, 30), (9000, 64), (9001, 64), (9000, 4000)])
def test_the_nearest_are_found_in_order(columns, count):
    logits = peaked(4, columns, spread=2.0).round()
    logits[1] = -torch.inf
    logits[1, [3, columns - 1]] = 1.0
    distance, ids = nearest(logits, logits.amax(-1, keepdim=True), count)
    for row in range(4):
        expected = sorted(range(columns), key=lambda token: (-logits[row, token].item(), token))[:count]
        assert ids[row].tolist() == expected
        assert torch.equal(distance[row], logits[row].max() - logits[row, expected])


def test_a_temperature_that_flattens_everything_still_keeps_masked_tokens_out():
    row = torch.full((1, 40), -torch.inf)
    row[0, [3, 30]] = torch.tensor([1.0, 9.0])
    for how in ({}, {"top_p": 0.9}, {"top_k": 5}):
        drawn = Sampler().sample(row.expand(200, -1), make_requests(200, temperature=1e300, **how))
        assert set(drawn) == {3, 30}


def test_the_nearest_may_each_lie_in_a_chunk_of_its_own():
    """Eight tokens of 2,560, far apart; of equals the one with the lower id comes first."""
    logits = torch.zeros(1, 2560)
    places = [2300, 5, 700, 1400, 130, 2000, 900, 1800]
    logits[0, places] = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0])
    highest = logits.amax(-1, keepdim=True)
    distance, ids = nearest(logits, highest, 8)
    assert ids[0].tolist() == places and distance[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    logits[0, places] = 1.0
    assert nearest(logits, logits.amax(-1, keepdim=True), 8)[1][0].tolist() == sorted(places)
