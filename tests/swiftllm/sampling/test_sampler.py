"""The sampler: greedy tokens, distributions, seeds that do not depend on the batch, log-probabilities."""

from collections import Counter

import pytest
import torch

from swiftllm.core.request import Request, SamplingParams
from swiftllm.sampling.sampler import LogitsNotFinite, Sampler, most_likely

VOCAB = 50


def request(request_id: str = "r", **sampling) -> Request:
    return Request(request_id, (1,), SamplingParams(max_tokens=10_000, **sampling))


def draw(sampler: Sampler, row: torch.Tensor, r: Request, count: int) -> list[int]:
    """So many tokens of a request, as if each came of the same logits ``[1, VOCAB]``."""
    for _ in range(count):
        r.append_token(sampler.sample(row, [r])[0], 0.0)
    return r.output_token_ids[-count:]


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
        for row in steps:
            batch[-1].append_token(sampler.sample(torch.cat([logits(fillers, 99), row]), batch)[-1], 0.0)
        return batch[-1].output_token_ids

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


def test_a_token_drawn_again_is_the_same_token():
    sampler, row, r = Sampler(), logits(1), request(temperature=1.5, seed=3)
    tokens = draw(sampler, row, r, 20)
    assert len(set(tokens)) > 5
    again = request(temperature=1.5, seed=3)
    for token in tokens:
        assert [sampler.sample(row, [again])[0] for _ in range(3)] == [token] * 3
        again.append_token(token, 0.0)


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

    draws = 2000
    counts = Counter(draw(Sampler(), probabilities.log()[None].float(), request(seed=11, **sampling), draws))
    for token, probability in enumerate(expected.tolist()):
        spread = (draws * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - draws * probability) <= 4.5 * spread


def test_masked_tokens_are_never_drawn():
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, [0, 17, VOCAB - 1]] = torch.tensor([0.0, 1.0, 0.0])
    assert set(draw(Sampler(), row, request(temperature=1.0, seed=0), 200)) == {0, 17, VOCAB - 1}


@pytest.mark.parametrize("columns", [7, 1000, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_of_equals_is_the_most_likely_in_any_dtype(dtype, columns):
    """Half precision is full of ties. Which of them wins must not hang on how the logits are stored."""
    rows = torch.randn(64, columns, generator=torch.Generator().manual_seed(0)).round().to(dtype)
    rows[3, columns // 2] = torch.nan
    rows[4, columns - 1] = torch.inf
    rows[5] = -torch.inf
    found = most_likely(rows)
    assert found.tolist() == rows.float().argmax(-1).tolist()
    assert found[3:6].tolist() == [columns // 2, columns - 1, 0]
    is_highest = rows == rows.amax(-1, keepdim=True)
    is_highest[3] = rows[3].isnan()
    assert found.tolist() == [row.tolist().index(True) for row in is_highest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_models_own(dtype):
    rows = logits(4, seed=5, dtype=dtype)
    requests = [
        request("none"),
        request("chosen", logprobs=0),
        request("three", logprobs=3, temperature=1.7, top_k=10, seed=1),
        request("many", logprobs=20),
    ]
    sampler = Sampler()
    tokens = sampler.sample(rows, requests)
    found = sampler.take_logprobs()
    assert set(found) == {"chosen", "three", "many"} and not sampler.take_logprobs()
    wide = rows.float()
    reference = wide - wide.exp().sum(-1, keepdim=True).log()
    for row, r in enumerate(requests[1:], start=1):
        logprob, count = found[r.request_id], r.sampling.logprobs
        assert logprob.token_id == tokens[row]
        assert logprob.logprob == pytest.approx(reference[row, tokens[row]].item(), abs=1e-5)
        assert len(logprob.top) == count
        assert [value for _, value in logprob.top] == pytest.approx(
            reference[row].sort(descending=True).values[:count].tolist(), abs=1e-5
        )
        assert all(value == pytest.approx(reference[row, token].item(), abs=1e-5) for token, value in logprob.top)


def test_more_logprobs_than_tokens_give_all_there_are():
    sampler = Sampler()
    sampler.sample(torch.randn(1, 7), [request(logprobs=20)])
    assert sorted(token for token, _ in sampler.take_logprobs()["r"].top) == list(range(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_k": 5, "logprobs": 2}])
def test_logits_that_are_not_finite_are_an_error_that_names_the_dtype(dtype, value, how):
    """Token 0 without a word is what models give that overflow float16 (QwenLM/Qwen3 #761)."""
    rows = logits(3, seed=2, dtype=dtype)
    rows[1] = value
    with pytest.raises(LogitsNotFinite, match=rf"not finite in {str(dtype)[6:]} \(request b\)") as error:
        Sampler().sample(rows, [request(name, **how) for name in "abc"])
    assert error.value.request_id == "b" and ("--dtype" in str(error.value)) == (dtype is not torch.float32)
    rows[1] = 0.0
    rows[1, 3:] = -torch.inf  # as a vocabulary's padding
    assert len(Sampler().sample(rows, [request(name, **how) for name in "abc"])) == 3
