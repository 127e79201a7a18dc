"""How many prompt tokens an iteration computes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apex.perf.model import Curve, PerfModel
from apex.schedulers.adaptive import (
    ChunkSizes,
    OperationTimes,
    PromptNeed,
    free_prompt_tokens,
    most_in_short_queue,
    prompt_chunk,
    waiting_pays,
)
from tests.reference.fake_engine import flat_table

# T_l: 1 ms up to 100 tokens, then 10 us for each further one.
TABLE = replace(flat_table(), linear=Curve((1, 100, 8100), (1e-3, 1e-3, 81e-3)))
MODEL = PerfModel(TABLE, num_layers=10)
SIZES = ChunkSizes(OperationTimes(MODEL), budget=20_000, flat_tokens=MODEL.flat_linear_tokens)
STEADY = PromptNeed(steady_tokens=300.0, prompt_per_output=2.0, grows=False, hurries=False)
LOAD = {"gpu_batch_decodes": 20, "joined": 10.0, "cpu_decodes": 50, "gpu_attention_s": 0.0}


def test_efficient_is_the_first_size_within_9_percent_of_the_cheapest_token() -> None:
    """A token costs at least 10 us. 100 of them cost it exactly, 96 cost 10.4 us each, 64 cost 15.6."""
    assert SIZES.flat_tokens == 100
    assert SIZES.token_s == pytest.approx(1e-5)
    assert SIZES.efficient == 96


def test_a_budget_below_every_efficient_size_is_used_up() -> None:
    assert ChunkSizes(OperationTimes(MODEL), budget=48, flat_tokens=100).efficient == 48


def test_a_chunk_need_not_exceed_a_multiple_of_the_fixed_cost() -> None:
    """Weights and ends cost 1.001 ms a layer whatever the chunk: ten times that are 1,001 tokens."""
    assert SIZES.largest(0.0, 2.0) == pytest.approx(1001, abs=2)
    assert SIZES.largest(1e-3, 2.0) == pytest.approx(2001, abs=2)
    assert SIZES.largest(0.0, 20.0) == pytest.approx(2002, abs=2)  # few decodes wait for it
    assert SIZES.largest(0.0, 90.0) == pytest.approx(4004, abs=2)


def test_steady_chunk_and_shadow() -> None:
    assert free_prompt_tokens(SIZES, 20, 10.0) == 70
    assert prompt_chunk(SIZES, STEADY, **LOAD) == 300
    assert prompt_chunk(SIZES, replace(STEADY, steady_tokens=5.0), **LOAD) == 70  # they cost nothing


def test_growth_is_a_quarter_more_and_efficient() -> None:
    grows = replace(STEADY, grows=True)
    assert prompt_chunk(SIZES, grows, **LOAD) == 375
    assert prompt_chunk(SIZES, replace(grows, steady_tokens=10.0), **LOAD) == 96 - 20
    assert prompt_chunk(SIZES, replace(grows, steady_tokens=900.0), **LOAD) == SIZES.largest(0.0, 2.0)
    assert prompt_chunk(SIZES, replace(grows, steady_tokens=3000.0), **LOAD) == 3000  # never below the steady one


def test_hurry() -> None:
    assert prompt_chunk(SIZES, replace(STEADY, hurries=True), **LOAD) == SIZES.largest(0.0, 2.0)


def test_a_short_queue_is_served_at_once() -> None:
    """Efficiently, and in four passes; a chunk that is larger anyway stays."""
    assert [most_in_short_queue(decoding) for decoding in (0, 79, 80, 160)] == [4, 4, 5, 10]
    small = replace(STEADY, steady_tokens=5.0)
    assert prompt_chunk(SIZES, small, **LOAD, short_queue_tokens=40) == 96 - 20
    assert prompt_chunk(SIZES, small, **LOAD, short_queue_tokens=1000) == 250
    assert prompt_chunk(SIZES, STEADY, **LOAD, short_queue_tokens=1000) == 300


def test_without_decodes_nothing_limits_prompts_but_the_budget() -> None:
    assert prompt_chunk(SIZES, STEADY, **{**LOAD, "gpu_batch_decodes": 0, "cpu_decodes": 0}) == 20_000
    assert prompt_chunk(SIZES, replace(STEADY, steady_tokens=1e9), **LOAD) == 20_000


def test_a_full_gpu_batch_leaves_no_prompt_behind_for_ever() -> None:
    assert prompt_chunk(SIZES, replace(STEADY, steady_tokens=0.0), **{**LOAD, "gpu_batch_decodes": 500}) == 1


def test_waiting_pays_while_the_shadow_takes_more_than_is_needed() -> None:
    """70 free tokens a GPU batch pass of 20 ms, 10 needed: 3,000/s for nothing. Each costs 0.1 ms otherwise: twice
    30%."""
    share = {"free_tokens": 70.0, "steady_tokens": 10.0, "layer_s": 2e-3}
    assert waiting_pays(SIZES, 10, gain=0.59, **share)
    assert not waiting_pays(SIZES, 10, gain=0.61, **share)
    assert not waiting_pays(SIZES, 10, gain=0.0, **{**share, "steady_tokens": 80.0})


def test_prompts_are_free_until_the_next_weights_arrive() -> None:
    """The flat part allows a quarter more. That others should wait must rest on prompts that cost nothing."""
    table = replace(TABLE, linear=Curve((1, 100, 200, 300, 400), (1e-3, 1e-3, 2e-3, 3e-3, 4e-3)))
    for stream_s, flat, free in ((0.0, 100, 100), (0.9e-3, 100, 100), (2.5e-3, 300, 250), (3.2e-3, 400, 320)):
        model = PerfModel(replace(table, stream_s=stream_s), num_layers=10)
        sizes = ChunkSizes(OperationTimes(model), budget=400, flat_tokens=model.flat_linear_tokens)
        assert sizes.flat_tokens == flat and free_prompt_tokens(sizes, 0, 0) == pytest.approx(free, abs=1)
        assert free_prompt_tokens(sizes, 30, 10.0) == max(0.0, sizes.free - 40)
