"""What keeps the CPU tier from harming the GPU: a net that is no policy, cohorts that fit their window, GPU first."""

from __future__ import annotations

import pytest

from apex.strategy import StrategyConfig
from swiftllm.core.plan import HOP, Strategy
from swiftllm.core.request import SamplingParams, ServiceClass, Tier
from swiftllm.scheduling.draft import Draft
from swiftllm.scheduling.parts import new_prompts, swap_in
from tests.reference.fake_backend import FakeBackend, expected_output
from tests.reference.fake_engine import fake_engine, flat_table

HOPELESS = flat_table(cpu_token_s=1e-3)


def up_to(max_tokens: int = 1000) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_waiting_too_long_is_a_net_and_no_policy() -> None:
    """However many have waited too long, so few are served against the rule that the lane hardly waits for them."""
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
    while engine.residents.waiting or engine.residents.prefilling:
        engine.step()
    assert len(engine.residents.running[Tier.CPU]) == num_cpu
    forced = []
    for _ in range(iterations):
        engine.step()
        plan, _ = engine.last_iteration
        if plan.strategy is Strategy.PIPELINING:
            forced += [request.request_id for cohort in plan.cohorts for request in cohort.requests]
    assert num_cpu < len(forced) <= iterations / patience + 1
    assert len(set(forced[:num_cpu])) == num_cpu  # the longest waiting first, so nobody starves


def test_a_cohort_that_shows_overlaps_to_its_end_beside_a_prefill() -> None:
    """The inequality holds with a prompt in the lane, but what is under way is more than the CPU's window takes."""
    table = flat_table(linear_s=1e-3, linear_token_s=2e-4, cpu_token_s=1e-4)
    engine = fake_engine("apex", num_gpu_blocks=20, num_cpu_blocks=2000, table=table, max_tokens=1024, num_layers=20)
    for i in range(60):
        engine.add(engine.make_request(str(i), [2] * 12, up_to(40)))
    while not engine.executor.cohorts:
        engine.step()
    (cohort,) = engine.executor.cohorts
    engine.add(engine.make_request("prompt", [2] * 60, up_to(1)))
    engine.step()
    plan, _ = engine.last_iteration
    assert plan.decodes and plan.prefills
    assert plan.predicted["inequality_left"] > plan.predicted["inequality_right"]
    assert [(c.rule, len(c.requests)) for c in plan.cohorts] == [(HOP, len(cohort.request_ids))]


def test_a_free_gpu_does_not_wait_for_a_cohort_to_end() -> None:
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
    assert second.cohort_id is not None and second.cohort_id == third.cohort_id
    while second.tier is Tier.CPU:
        engine.step()
    assert third.cohort_id is not None and third.output_len == 1  # the cohort has not done its token yet
    while engine.has_unfinished():
        engine.step()
    for request in (lasting, ending, second, third):
        max_tokens = request.sampling.max_tokens
        expected = expected_output(list(request.prompt_token_ids), max_tokens, ignore_eos=True)
        assert request.output_token_ids == expected
    engine.kv.check_blocks()
    assert not engine.executor.cohorts


def test_room_on_the_gpu_that_is_promised_to_a_request_called_back_goes_to_nobody_else() -> None:
    engine = fake_engine("apex", num_gpu_blocks=8, num_cpu_blocks=20)
    residents = engine.residents
    older = engine.add(engine.make_request("older", [2] * 7, up_to(2)))
    engine.step()
    residents.push_out(older)
    residents.cohorts.start([older])
    engine.kv.allocators[Tier.GPU].allocate(5)
    draft = Draft(residents)
    swap_in(draft, ServiceClass.LATENCY_SENSITIVE)
    # It comes as soon as its attention is done, and takes 2 of 3 blocks.
    assert older.request_id in residents.cohorts.leaving
    newcomer = engine.add(engine.make_request("newcomer", [2] * 3, up_to(2)))
    new_prompts(draft, ServiceClass.LATENCY_SENSITIVE)
    assert newcomer.tier is Tier.CPU


def test_cohorts_step_only_where_the_backend_holds_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ride every boundary whose weights would be streamed for them alone."""
    monkeypatch.setattr(FakeBackend, "holds_weights", lambda backend, boundary: boundary != 1)
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
        if plan is not None and plan.lane:
            boundaries = [call for call in engine.backend.calls if call[0] == "boundary"]
            alone |= _stepped(boundaries)
    assert alone and 1 not in alone


def _stepped(boundaries: list[tuple]) -> set[int]:
    """Boundaries that were crossed without the lane: it goes from -1 on, one by one."""
    lane, stepped = -1, set()
    for _, boundary, batches in boundaries:
        if boundary == lane:
            lane += 1
        elif batches == 1:
            stepped.add(boundary)
    return stepped
