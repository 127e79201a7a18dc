"""What keeps the CPU tier from harming the GPU: a net that is no scheduler, CPU batches that fit their window, GPU
first."""

from __future__ import annotations

import pytest

from apex.strategy import StrategyConfig
from swiftllm.core.plan import OVERLAPPED, Strategy
from swiftllm.core.request import SamplingParams, ServiceClass, Tier
from swiftllm.scheduling.scheduler import PlanBuilder, new_prompts, swap_in
from tests.reference.fake_backend import FakeBackend, expected_output
from tests.reference.fake_engine import fake_engine, flat_table

HOPELESS = flat_table(cpu_token_s=1e-3)


def up_to(max_tokens: int = 1000) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_waiting_too_long_is_a_net_and_no_scheduler() -> None:
    """However many have waited too long, so few are served against the rule that the GPU batch hardly waits for
    them."""
    patience, iterations, num_cpu = 10, 400, 24
    engine = fake_engine(
        "neo",
        num_gpu_blocks=111,
        num_cpu_blocks=3000,
        max_tokens=512,
        table=HOPELESS,
        strategy=StrategyConfig(max_wait_iterations=patience),
    )
    engine.add(engine.make_request("gpu", [2] * 4, up_to(430)))  # leaves no room for any other
    for i in range(num_cpu):
        engine.add(engine.make_request(f"cpu{i}", [2] * 440, up_to()))
    while engine.state.waiting or engine.state.prefilling:
        engine.step()
    assert len(engine.state.running[Tier.CPU]) == num_cpu
    forced = []
    for _ in range(iterations):
        engine.step()
        plan, _ = engine.last_iteration
        if plan.strategy is Strategy.PIPELINING:
            forced += [request.request_id for cpu_batch in plan.cpu_batches for request in cpu_batch.requests]
    assert num_cpu < len(forced) <= iterations / patience + 1
    assert len(set(forced[:num_cpu])) == num_cpu  # the longest waiting first, so nobody starves


def test_a_cpu_batch_that_shows_overlaps_to_its_end_beside_a_prefill() -> None:
    """The inequality holds with a prompt in the GPU batch, but what is under way is more than the CPU's window
    takes."""
    table = flat_table(linear_s=1e-3, linear_token_s=2e-4, cpu_token_s=1e-4)
    engine = fake_engine("apex", num_gpu_blocks=20, num_cpu_blocks=2000, table=table, max_tokens=1024, num_layers=20)
    for i in range(60):
        engine.add(engine.make_request(str(i), [2] * 12, up_to(40)))
    while not engine.executor.cpu_batches:
        engine.step()
    (cpu_batch,) = engine.executor.cpu_batches
    engine.add(engine.make_request("prompt", [2] * 60, up_to(1)))
    engine.step()
    plan, _ = engine.last_iteration
    assert plan.decodes and plan.prefills
    assert plan.predicted["inequality_left"] > plan.predicted["inequality_right"]
    assert [(c.mode, len(c.requests)) for c in plan.cpu_batches] == [(OVERLAPPED, len(cpu_batch.request_ids))]


def test_a_free_gpu_does_not_wait_for_a_cpu_batch_to_end() -> None:
    """GPU first: a request that is part of the way through its token comes back as soon as there is room."""
    engine = fake_engine(
        "apex",
        num_gpu_blocks=20,
        num_cpu_blocks=200,
        max_tokens=128,
        num_layers=60,
        strategy=StrategyConfig(strategy="asynchronous-overlap"),
    )
    lasting = engine.add(engine.make_request("lasting", [2] * 4, up_to(40)))
    ending = engine.add(engine.make_request("ending", [2] * 40, up_to(4)))
    second, third = (engine.add(engine.make_request(i, [2] * 40, up_to(12))) for i in ("second", "third"))
    while not ending.is_finished:
        engine.step()
    assert second.cpu_batch_id is not None and second.cpu_batch_id == third.cpu_batch_id
    while second.tier is Tier.CPU:
        engine.step()
    assert third.cpu_batch_id is not None and third.output_len == 1  # the CPU batch has not done its token yet
    while engine.has_unfinished():
        engine.step()
    for request in (lasting, ending, second, third):
        max_tokens = request.sampling.max_tokens
        expected = expected_output(list(request.prompt_token_ids), max_tokens, ignore_eos=True)
        assert request.output_token_ids == expected
    engine.kv.check_blocks()
    assert not engine.executor.cpu_batches


def test_room_on_the_gpu_that_is_promised_to_a_request_called_back_goes_to_nobody_else() -> None:
    engine = fake_engine("apex", num_gpu_blocks=8, num_cpu_blocks=20)
    state = engine.state
    older = engine.add(engine.make_request("older", [2] * 7, up_to(2)))
    engine.step()
    state.push_out(older)
    state.cpu_batches.start([older])
    engine.kv.block_pools[Tier.GPU].allocate(5)
    builder = PlanBuilder(state)
    swap_in(builder, ServiceClass.LATENCY_SENSITIVE)
    # It comes as soon as its attention is done, and takes 2 of 3 blocks.
    assert older.request_id in state.cpu_batches.leaving
    newcomer = engine.add(engine.make_request("newcomer", [2] * 3, up_to(2)))
    new_prompts(builder, ServiceClass.LATENCY_SENSITIVE)
    assert newcomer.tier is Tier.CPU


def test_cpu_batches_step_only_where_the_backend_holds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They join every stage whose weights would be streamed for them alone."""
    monkeypatch.setattr(FakeBackend, "holds_weights", lambda backend, stage: stage != 1)
    strategy = StrategyConfig(strategy="asynchronous-overlap", disable_admission_control=True)
    engine = fake_engine("adaptive", num_gpu_blocks=30, num_cpu_blocks=400, num_layers=4, strategy=strategy)
    engine.add(engine.make_request("gpu", [2] * 40, up_to(60)))
    for number in range(8):
        engine.add(engine.make_request(f"cpu{number}", [2] * 90, up_to(20)))
    alone = set()
    while engine.has_unfinished():
        engine.backend.calls.clear()
        engine.step()
        plan, _ = engine.last_iteration or (None, None)
        if plan is not None and plan.gpu_batch:
            stages = [call for call in engine.backend.calls if call[0] == "run_stage"]
            alone |= _stepped(stages)
    assert alone and 1 not in alone


def _stepped(stages: list[tuple]) -> set[int]:
    """Stages that were run without the GPU batch: it goes from -1 on, one by one."""
    gpu_batch, stepped = -1, set()
    for _, stage, batches in stages:
        if stage == gpu_batch:
            gpu_batch += 1
        elif batches == 1:
            stepped.add(stage)
    return stepped
