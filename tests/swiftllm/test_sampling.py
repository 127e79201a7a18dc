from collections import Counter

import pytest
import torch

from swiftllm.request import Request, SamplingParams
from swiftllm.sampling import Sampler

VOCAB = 50


def request(request_id: str = "r", **sampling) -> Request:
    return Request(request_id, (1,), SamplingParams(**sampling))


def logits(rows: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)).mul_(2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.5, "top_k": 1}, {"temperature": 1.5, "top_p": 1e-6}, {"temperature": 1e-30}],
    ids=["greedy", "top_k=1", "top_p tiny", "temperature tiny"],
)
def test_settings_that_leave_one_token_are_greedy(sampling, dtype):
    rows = logits(40, dtype=dtype)
    rows[torch.arange(40), torch.randint(VOCAB, (40,))] = 12.0  # no ties in half precision
    requests = [request(f"r{i}", **sampling) for i in range(40)]
    assert Sampler().sample(rows, requests) == rows.float().argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_in_any_batch():
    steps = [logits(1, seed) for seed in range(30)]

    def tokens(fillers: int, request_id: str, engine_seed: int, **sampling) -> list[int]:
        sampler = Sampler(engine_seed)
        batch = [request(f"filler{i}", temperature=1.0) for i in range(fillers)] + [request(request_id, **sampling)]
        return [sampler.sample(torch.cat([logits(fillers, 99), row]), batch)[-1] for row in steps]

    for how in ({}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}):
        alone = tokens(0, "a", 0, temperature=1.2, seed=7, **how)
        assert alone == tokens(5, "b", 1, temperature=1.2, seed=7, **how)
        assert alone != tokens(0, "a", 0, temperature=1.2, seed=8, **how)
    # Without a seed of its own, the engine's seed and the request's id decide.
    unseeded = tokens(0, "a", 0, temperature=1.2)
    assert unseeded == tokens(5, "a", 0, temperature=1.2)
    assert unseeded != tokens(0, "b", 0, temperature=1.2)
    assert unseeded != tokens(0, "a", 1, temperature=1.2)


def test_greedy_and_sampled_rows_mix():
    rows = logits(3)
    requests = [request("a"), request("b", temperature=1.0, seed=1), request("c")]
    tokens = Sampler().sample(rows, requests)
    assert [tokens[0], tokens[2]] == [rows[0].argmax().item(), rows[2].argmax().item()]
    assert tokens[1] == Sampler().sample(rows[1:2], [requests[1]])[0]


def test_forgetting_starts_a_request_anew():
    sampler, row = Sampler(), logits(1)
    r = request(temperature=1.5, seed=3)
    first = [sampler.sample(row, [r])[0] for _ in range(10)]
    assert first != [sampler.sample(row, [r])[0] for _ in range(10)]
    sampler.forget(["r", "never seen"])
    assert first == [sampler.sample(row, [r])[0] for _ in range(10)]


@pytest.mark.parametrize(
    "sampling, kept",
    [
        ({"temperature": 1.0}, 6),
        ({"temperature": 0.5}, 6),
        ({"temperature": 2.0, "top_k": 3}, 3),
        ({"temperature": 1.0, "top_p": 0.75}, 3),  # 0.4 + 0.25 falls short, 0.4 + 0.25 + 0.15 reaches it
        ({"temperature": 1.0, "top_k": 4, "top_p": 0.95}, 4),
        ({"temperature": 1.0, "top_k": 100}, 6),
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(sampling, kept):
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.05, 0.15], dtype=torch.float64)
    expected = probabilities ** (1 / sampling["temperature"])
    order = expected.argsort(descending=True, stable=True)
    expected[order[kept:]] = 0
    expected /= expected.sum()

    draws = 4000
    sampler, r, row = Sampler(), request(seed=11, **sampling), probabilities.log()[None].float()
    counts = Counter(sampler.sample(row, [r])[0] for _ in range(draws))
    for token, probability in enumerate(expected.tolist()):
        spread = (draws * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - draws * probability) <= 4.5 * spread


def test_masked_tokens_are_never_drawn():
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, [0, 17, VOCAB - 1]] = torch.tensor([0.0, 1.0, 0.0])
    sampler, r = Sampler(), request(temperature=1.0, seed=0)
    assert {sampler.sample(row, [r])[0] for _ in range(200)} == {0, 17, VOCAB - 1}
