"""What a plan builder takes back, whom a prompt that starts pushes out, and who is computed again when a host dies."""

from __future__ import annotations

import pytest

from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, RequestStatus, SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.scheduler import PlanBuilder, start_prompt
from tests.reference.fake_engine import fake_engine

LS, BE = ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT


def add(engine: Engine, name: str, prompt_len: int, service_class: ServiceClass = LS) -> Request:
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    return engine.add(engine.make_request(name, [2] * prompt_len, sampling, service_class=service_class))


def test_a_chunk_that_is_put_off_gives_its_tokens_back_and_only_a_new_prompt_its_blocks() -> None:
    engine = fake_engine("vllm", num_gpu_blocks=20, num_cpu_blocks=0, max_tokens=8)
    running = add(engine, "running", 20)
    engine.step()
    new, builder = add(engine, "new", 6), PlanBuilder(engine.state)
    builder.prompt_limit = 7
    engine.state.hold_on_gpu(running, 10)
    builder.prompt_limit = 2
    builder.add_prefill(running)
    builder.prompt_limit = 5
    assert start_prompt(builder, new)
    assert (builder.tokens_left, builder.prompt_limit) == (1, 0)
    of_running, of_new = builder.prefills
    builder.put_off(of_new)
    assert (builder.tokens_left, builder.prompt_limit) == (6, 5)
    assert new.status is RequestStatus.WAITING and engine.kv.num_held(new) == 0
    builder.put_off(of_running)
    assert (builder.tokens_left, builder.prompt_limit, builder.prefills) == (8, 7, [])
    assert running.tier is Tier.GPU and list(engine.state.waiting) == [new]


def test_a_prompt_limit_holds_for_all_prompts_of_a_plan() -> None:
    engine = fake_engine("vllm", num_gpu_blocks=20, num_cpu_blocks=0)
    builder, prompts = PlanBuilder(engine.state), [add(engine, name, 6) for name in "ab"]
    builder.prompt_limit = 9
    assert all(start_prompt(builder, request) for request in prompts)
    assert [(item.request, item.num_tokens) for item in builder.prefills] == list(zip(prompts, (6, 3), strict=True))
    assert builder.prompt_tokens_left == 0 < builder.tokens_left


@pytest.mark.parametrize(("num_gpu_blocks", "num_calls"), [(6, 1), (12, 0)])
def test_the_scheduler_hears_of_moves_that_made_way_before_the_prompt_is_added(
    num_gpu_blocks: int, num_calls: int
) -> None:
    engine = fake_engine("swiftllm", num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=20)
    pushed_out = add(engine, "pushed out", 15, BE)
    engine.step()
    calls: list[tuple[int, list[Tier | None]]] = []
    urgent, builder = add(engine, "urgent", 11), PlanBuilder(engine.state)
    assert start_prompt(builder, urgent, lambda builder: calls.append((len(builder.prefills), [pushed_out.tier])))
    assert calls == [(0, [Tier.CPU])] * num_calls and urgent.tier is Tier.GPU
    engine.kv.swaps.append(Swap(pushed_out, Tier.GPU, (), ()))  # an earlier move of the plan
    assert start_prompt(builder, add(engine, "fits", 1), lambda builder: calls.append((len(builder.prefills), [])))
    assert len(calls) == num_calls


def test_the_youngest_request_of_a_less_urgent_class_gives_its_seat() -> None:
    """Where all of them have CPU attention under way, the youngest is detached of its CPU batch, and no other."""
    engine = fake_engine("swiftllm", num_gpu_blocks=20, num_cpu_blocks=20, max_num_seqs=2)
    state = engine.state
    older, younger = (add(engine, name, 5, BE) for name in ("older", "younger"))
    engine.step()
    state.begin_plan()
    for request in (older, younger):
        state.move(request, Tier.CPU)
    state.cpu_batches.start([older, younger])
    assert not start_prompt(PlanBuilder(state), add(engine, "urgent", 5))
    assert list(state.cpu_batches.leaving) == ["younger"]


def test_blocks_that_a_swap_of_the_plan_fills_do_not_move_out_with_their_request() -> None:
    """Its K and V come from the CPU tier with this plan, so its blocks there would be filled with what is not here."""
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=20, cached_tiers=tuple(Tier))
    kv, state = engine.kv, engine.state
    earlier = engine.make_request("earlier", [3] * 13, SamplingParams(max_tokens=9))
    earlier.tier = Tier.CPU
    kv.start(earlier, 13)
    earlier.num_uncomputed = 0
    kv.publish(earlier)
    kv.free_blocks(earlier)
    request = engine.add(engine.make_request("request", [3] * 14, SamplingParams(max_tokens=9)))
    assert start_prompt(PlanBuilder(state), request)
    assert [swap.source for swap in kv.swaps] == [Tier.CPU] and request.num_cached_tokens == 12
    state.push_out(request)
    assert request.status is RequestStatus.WAITING and not kv.moves


def test_a_scheduler_may_say_that_there_is_no_time_to_move_a_request() -> None:
    engine = fake_engine("swiftllm", num_gpu_blocks=8, num_cpu_blocks=20)
    requests, state = [add(engine, name, 5) for name in ("moves", "has no time")], engine.state
    engine.step()
    state.begin_plan()
    state.may_swap_out = lambda request: request is requests[0]
    for request in requests:
        state.push_out(request)
    assert [request.tier for request in requests] == [Tier.CPU, None] and state.recomputed == requests[1:]


def test_copies_under_way_when_a_host_dies_are_forgotten_and_its_requests_computed_again() -> None:
    engine = fake_engine("swiftllm", num_gpu_blocks=20, num_cpu_blocks=3, host_blocks=(20,), cached_tiers=tuple(Tier))
    kv, state = engine.kv, engine.state
    requests = [add(engine, name, 13 + index) for index, name in enumerate(("on the host", "half filled", "stays"))]
    while not all(request.tier is Tier.GPU for request in requests):
        engine.step()
    state.begin_plan()
    state.move(requests[0], Tier.CPU)
    copied = engine.make_request("copied", [5] * 10, SamplingParams(max_tokens=9))
    copied.tier = Tier.GPU
    kv.start(copied, 10)
    copied.num_uncomputed = 0
    kv.publish(copied)
    copy = Swap(None, Tier.CPU, (0, 1), tuple(kv.block_tables[copied.request_id][:2]))
    kv.free_blocks(copied)
    assert kv.num_findable(copied) == 2
    filling = Swap(requests[1], Tier.CPU, (2,), (kv.block_tables["half filled"][-1],))
    lost = state.forget_hosts([1], [copy, filling])
    assert lost == requests[:2] and [request.num_preemptions for request in requests] == [1, 1, 0]
    assert kv.num_findable(copied) == 0 and [request.tier for request in requests] == [None, None, Tier.GPU]
    kv.check_blocks()
