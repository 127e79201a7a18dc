"""The formulas of OmniServe's section 3.3 against numbers worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apex.perf.model import Curve, GpuBatchLoad, PerfModel, Surface
from apex.schedulers.omniserve import (
    Backlog,
    PromptLeft,
    blocks_s,
    chunk_of_no_cost,
    first_token_s,
    iteration_s,
    joined_rows_s,
    most_prompt_tokens,
    prefill_s,
    urgent_chunk_tokens,
    with_decodes,
    with_prompts,
)
from apex.simulator.backend import SimulatedBackend
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Slo, Tier
from tests.reference.fake_engine import flat_table

LAYERS = 10


def by_tokens(start_s: float, token_s: float) -> Surface:
    """Seconds per new token, whatever is cached."""
    return Surface((0, 1000), tuple(Curve((0, 1000), (s, s)) for s in (start_s, start_s + 1000 * token_s)))


# Per layer: linear 1 ms + 1 us a token; attention of a prompt 2 us a token, of a decode 1 us a token of context.
# Ends: 3 ms + 0.1 ms a row. Swap: 1 ms + 0.1 ms a block. Hand-over: 10 us + 1 us a row. Host: 0.2 ms + 2 us a request.
TABLE = replace(
    flat_table(linear_s=1.001e-3, linear_token_s=1e-6, gpu_token_s=1e-6),
    ends=Curve((1, 2), (3.1e-3, 3.2e-3)),
    swap=Curve((1, 2), (1.1e-3, 1.2e-3)),
    prefill_attention=by_tokens(0.0, 2e-6),
    hand_over=Curve((1, 2), (1.1e-5, 1.2e-5)),
    iteration=Curve((0, 100), (2e-4, 4e-4)),
    first_share=0.25,
)
MODEL = PerfModel(TABLE, LAYERS)
DECODES = GpuBatchLoad(tokens=4, requests=4, decodes=4, decode_context=2000, chunks=())
SLO = Slo(ttft_s=1.0, tpot_s=0.05, margin=0.2)


def test_the_margin_of_both_targets() -> None:
    assert SLO.iteration_s == pytest.approx(0.04)
    assert SLO.first_token_s == pytest.approx(0.8)


def test_an_iteration() -> None:
    """10 layers of 1.004 ms linear and 2 ms attention, ends of 3.4 ms, 0.208 ms of the host's work."""
    assert iteration_s(MODEL, DECODES) == pytest.approx(10 * (1.004e-3 + 2e-3) + 3.4e-3 + 0.208e-3)


@pytest.mark.parametrize("blocks", [1, 60, 200, 300, 2000])
def test_swaps_beside_the_layers_take_what_the_simulator_says(blocks: int) -> None:
    backend = SimulatedBackend(MODEL)
    requests = [Request(str(i), (1,) * 500, SamplingParams(max_tokens=9), tier=Tier.GPU) for i in range(4)]
    backend.swap([Swap(requests[0], Tier.GPU, tuple(range(blocks)), tuple(range(blocks)))])
    gpu_batch = backend.open_gpu_batch(GpuBatchItem.decodes(requests))
    for layer in range(-1, LAYERS):
        backend.run_stage(layer, [gpu_batch])
        if layer + 1 < LAYERS:
            backend.gpu_attention(layer + 1, gpu_batch)
    alone_s, swap_s = iteration_s(MODEL, DECODES), 1e-3 + blocks * 1e-4
    assert iteration_s(MODEL, DECODES, swapped=blocks) == pytest.approx(backend.now())
    assert max(alone_s, swap_s) <= backend.now() <= alone_s + swap_s
    assert (backend.now() == pytest.approx(alone_s)) == (blocks == 1)


def test_prompts_are_taken_in_order() -> None:
    prompts = [PromptLeft(30, 5), PromptLeft(100, 0), PromptLeft(7, 0)]
    assert with_prompts(DECODES, prompts, 0) == DECODES
    assert with_prompts(DECODES, prompts, 30).chunks == ((30, 5),)
    load = with_prompts(DECODES, prompts, 40)
    chunks = ((30, 5), (10, 0))
    assert load == GpuBatchLoad(tokens=44, requests=6, decodes=4, decode_context=2000, chunks=chunks, open_chunks=1)
    assert with_prompts(DECODES, prompts, 1000).tokens == 4 + 137
    # 44 tokens of linear work, 40 tokens of prompt attention in two chunks; six rows, of which five get a token and
    # cross the last three quarters of a layer.
    expected = 10 * (1.044e-3 + 2e-3 + 8e-5) - 0.75 * 39e-6 + 3.5e-3 + 0.212e-3
    assert iteration_s(MODEL, load) == pytest.approx(expected)


def test_more_decodes() -> None:
    load = with_decodes(DECODES, 3, 600)
    assert load == GpuBatchLoad(tokens=7, requests=7, decodes=7, decode_context=2600, chunks=())


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (
            -1,
            0.25 * 8e-6 + 16e-6 + 18e-6,
        ),  # a quarter of a layer for 8 rows, opening their CPU batch, an attention task
        (0, 8e-6 + 18e-6),
        (5, 8e-6 + 18e-6),
        (8, 8e-6 + 18e-6),
        (9, 0.75 * 8e-6 + 8e-4),  # the rest of a layer, and the ends of 8 rows; no attention task follows
    ],
)
def test_joined_batches_at_each_stage(stage: int, expected: float) -> None:
    assert joined_rows_s(MODEL, 4, 4, {stage: 8}) == pytest.approx(expected, rel=1e-9)


def test_joined_batches_of_several_stages_add_up() -> None:
    joined_rows = {-1: 8, 0: 3, 5: 1, 9: 2}
    assert joined_rows_s(MODEL, 4, 4, joined_rows) == pytest.approx(
        sum(joined_rows_s(MODEL, 4, 4, {stage: rows}) for stage, rows in joined_rows.items())
    )
    assert iteration_s(MODEL, DECODES, joined_rows) == pytest.approx(
        iteration_s(MODEL, DECODES) + joined_rows_s(MODEL, 4, 4, joined_rows)
    )


def test_beside_an_empty_gpu_batch_a_joined_batch_pays_for_the_weights() -> None:
    assert joined_rows_s(MODEL, 0, 0, {5: 8}) == pytest.approx(1.008e-3 + 18e-6)


def random_load(rng: random.Random) -> tuple[GpuBatchLoad, list[tuple[int, int]], dict[int, int]]:
    decodes = rng.randint(0, 40)
    load = GpuBatchLoad(decodes, decodes, decodes, decodes * rng.randint(1, 400), ())
    prompts = [PromptLeft(rng.randint(1, 400), rng.choice((0, rng.randint(0, 900)))) for _ in range(rng.randint(1, 5))]
    joined_rows = {stage: rng.randint(1, 30) for stage in rng.sample(range(-1, LAYERS), rng.randint(0, 11))}
    return load, prompts, joined_rows


def test_times_do_not_decrease() -> None:
    rng = random.Random(1)
    for _ in range(200):
        load, prompts, joined_rows = random_load(rng)
        times = [iteration_s(MODEL, with_prompts(load, prompts, tokens), joined_rows) for tokens in range(0, 1200, 7)]
        assert times == sorted(times)
        times = [iteration_s(MODEL, with_decodes(load, count, 100 * count), joined_rows) for count in range(40)]
        assert times == sorted(times)
        stage = rng.randrange(-1, LAYERS)
        times = [joined_rows_s(MODEL, load.tokens, load.requests, {stage: rows}) for rows in range(1, 60)]
        assert times == sorted(times)


def test_the_most_prompt_tokens_are_the_most_that_fit() -> None:
    rng = random.Random(2)
    found = set()
    for _ in range(300):
        load, prompts, joined_rows = random_load(rng)
        limit_s, most = rng.uniform(0.0, 0.08), rng.choice((0, 1, 64, 5000))
        tokens = most_prompt_tokens(MODEL, load, prompts, limit_s, most, joined_rows)
        fits = [
            count
            for count in range(1, min(most, sum(prompt.tokens for prompt in prompts)) + 1)
            if iteration_s(MODEL, with_prompts(load, prompts, count), joined_rows) <= limit_s
        ]
        assert tokens == max(fits, default=0)
        found.add(tokens)
    assert len(found) > 30


def backlog(**changes: object) -> Backlog:
    none = Backlog(
        4, 2000, [PromptLeft(100, 0)], missing_blocks=0, missing_seats=0, prompt_blocks=500, mean_output=100.0
    )
    return replace(none, **changes)


def test_the_first_token_of_a_lone_prompt_takes_one_iteration() -> None:
    """10 layers of 1.0 + 0.1 ms linear and 0.2 ms attention; the ends of one row and the host's work.

    Only that row crosses the last three quarters of a layer.
    """
    alone = Backlog(0, 0, [PromptLeft(100, 0)], missing_blocks=0, missing_seats=0, prompt_blocks=0, mean_output=100.0)
    expected = 10 * (1.1e-3 + 2e-4) - 0.75 * 99e-6 + 3.1e-3 + 0.202e-3
    assert first_token_s(MODEL, SLO, alone, budget=512) == pytest.approx(expected)


def test_many_prompts_take_iterations_filled_to_the_limit() -> None:
    """Beside four decodes a chunk of q tokens that goes on takes 33.65 ms, and 0.02925 ms for each token.

    40 ms leave 6.35 ms, or 217 tokens. 1,000 tokens are four such iterations, and one with 132 tokens.
    """

    def chunk_s(tokens: int) -> float:
        return 10 * (1e-3 + (4 + tokens) * 1e-6 + 2e-3 + 2e-6 * tokens) - 0.75e-6 * tokens + 3.4e-3 + 0.21e-3

    assert chunk_s(217) <= SLO.iteration_s < chunk_s(218)
    expected = 4 * chunk_s(217) + chunk_s(132)
    assert prefill_s(MODEL, SLO, backlog(prompts=[PromptLeft(1000, 0)]), budget=512) == pytest.approx(expected)
    # The token budget may allow less: 100 tokens beside four decodes.
    assert prefill_s(MODEL, SLO, backlog(prompts=[PromptLeft(1000, 0)]), budget=104) == pytest.approx(10 * chunk_s(100))


def test_prompts_end_beside_decodes_that_fill_the_target() -> None:
    """Chunk control gives them the tokens that cost no more than one, and admission control counts on these."""
    model = PerfModel(replace(TABLE, linear=Curve((1, 64, 1064), (1e-3, 1.1e-3, 3.1e-3))), LAYERS)
    full = backlog(decode_context=20_000, prompts=[PromptLeft(1000, 0)])
    assert iteration_s(model, full.load) > SLO.iteration_s and model.flat_linear_tokens == 64
    assert urgent_chunk_tokens(model, full.load, full.prompts, SLO.iteration_s, most=500) == 60
    times = [iteration_s(model, with_prompts(full.load, full.prompts, tokens)) for tokens in (60, 1000 % 60)]
    assert prefill_s(model, SLO, full, budget=504) == pytest.approx(1000 // 60 * times[0] + times[1])
    assert chunk_of_no_cost(model, full.load, most=3) == 3
    assert chunk_of_no_cost(model, replace(full.load, tokens=100), most=500) == 1


def test_blocks_come_free_as_decodes_end() -> None:
    """Prompts of 500 blocks are freed over 100 tokens of 40 ms each: 125 blocks a second. The prompt itself follows."""
    assert blocks_s(MODEL, SLO, backlog()) == 0.0
    assert blocks_s(MODEL, SLO, backlog(missing_blocks=250)) == pytest.approx(2.0)
    alone_s = first_token_s(MODEL, SLO, backlog(), budget=512)
    waiting = backlog(missing_blocks=250, prompts=[PromptLeft(50, 0), PromptLeft(100, 0)])
    assert first_token_s(MODEL, SLO, waiting, budget=512) == pytest.approx(2.0 + alone_s)
    assert blocks_s(MODEL, SLO, backlog(missing_blocks=1, prompt_blocks=0)) == float("inf")


def test_no_decode_takes_less_than_its_iteration() -> None:
    """Where decodes alone take longer than the limit, blocks come free at their pace."""
    slow = backlog(missing_blocks=250, decode_context=20_000)
    token_s = iteration_s(MODEL, slow.load)
    assert token_s > 5 * SLO.iteration_s
    assert blocks_s(MODEL, SLO, slow) == pytest.approx(250 / 500 * 100 * token_s)
