"""When a request that was pushed out of the GPU comes back."""

from __future__ import annotations

from swiftllm.core.request import Request, SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.scheduler import PlanBuilder, swap_in
from tests.reference.fake_engine import fake_engine

LS = ServiceClass.LATENCY_SENSITIVE


def pushed_out(engine: Engine, *prompt_lens: int) -> list[Request]:
    """Decoding requests in the CPU tier, the oldest first."""
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [engine.add(engine.make_request(str(i), [2] * length, sampling)) for i, length in enumerate(prompt_lens)]
    engine.step()
    for request in reversed(requests):
        engine.state.begin_plan()
        engine.state.push_out(request)
        engine.executor.backend.swap(engine.kv.swaps)
    assert all(request.tier is Tier.CPU for request in requests)
    return requests


def test_it_comes_back_into_a_gpu_that_it_fills_to_the_last_block() -> None:
    engine = fake_engine("swiftllm", num_gpu_blocks=2, num_cpu_blocks=2)
    (request,) = pushed_out(engine, 7)
    engine.step()
    assert request.is_finished and [tier for _, tier in request.tier_history] == ["waiting", "gpu", "cpu", "gpu"]


def test_it_comes_back_with_one_token_left_in_the_budget_and_not_with_none() -> None:
    for budget, tiers in ((1, [Tier.GPU, Tier.CPU]), (2, [Tier.GPU, Tier.GPU]), (64, [Tier.GPU, Tier.GPU])):
        engine = fake_engine("swiftllm", num_gpu_blocks=20, num_cpu_blocks=20)
        requests = pushed_out(engine, 7, 7)
        builder = PlanBuilder(engine.state)
        builder.tokens_left = budget
        swap_in(builder, LS)
        assert [request.tier for request in requests] == tiers


def test_a_younger_one_does_not_overtake_an_older_one_that_finds_no_room() -> None:
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=20)
    older, younger = pushed_out(engine, 15, 3)
    blocker = engine.kv.block_pools[Tier.GPU].allocate(5)
    swap_in(PlanBuilder(engine.state), LS)
    assert older.tier is younger.tier is Tier.CPU  # they need 4 blocks and 1, and 3 are free
    engine.kv.block_pools[Tier.GPU].free(blocker)
    swap_in(PlanBuilder(engine.state), LS)
    assert older.tier is younger.tier is Tier.GPU
