"""Two service classes under every scheduler: latency-sensitive requests first, and nothing lost."""

from __future__ import annotations

import random

import pytest

from apex.schedulers.adaptive import Adaptive
from apex.schedulers.neo import Neo
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.scheduler import PlanBuilder
from swiftllm.scheduling.state import SchedulerState
from swiftllm.systems import systems
from tests.apex.schedulers.test_schedulers import BE, LS, STRATEGIES, TABLES, check_queues, drive, make_request
from tests.reference.fake_backend import expected_output
from tests.reference.fake_engine import fake_engine

SYSTEMS = tuple(systems())


def best_effort(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.service_class is BE]


def watch(engine: Engine) -> None:
    """Check every preemption and every plan from now on."""
    state, preempted = engine.state, []
    push_out, recompute, run = state.push_out, state.recompute, engine.executor.run

    def note(victim: Request) -> None:
        if victim.service_class is LS:
            assert victim.tier is not Tier.GPU or not best_effort(state.running[Tier.GPU])
            preempted.append(victim)

    def run_checked(plan: IterationPlan):
        check_plan(engine, plan, preempted)
        preempted.clear()
        return run(plan)

    state.push_out = lambda victim: (note(victim), push_out(victim))[1]
    state.recompute = lambda victim: (note(victim), recompute(victim))[1]
    engine.executor.run = run_checked


def check_plan(engine: Engine, plan: IterationPlan, preempted: list[Request]) -> None:
    """A latency-sensitive request waits only for tokens of the budget, or for what others of its class hold."""
    state, scheduler = engine.state, engine.scheduler
    orders = [request.service_class.rank for request in plan.decodes]
    assert orders == sorted(orders)
    first = next(iter(state.waiting), None)
    if first is None or first.service_class is BE:
        return
    started = [item.request for item in plan.prefills if item.start == 0]
    assert not best_effort(started), "a best-effort prompt was started while a latency-sensitive one waits"
    tokens_left = state.limits.max_num_batched_tokens - len(plan.decodes)
    tokens_left -= sum(item.num_tokens for item in plan.prefills)
    # neo and adaptive may put off prompts by their own rules.
    if isinstance(scheduler, (Neo, Adaptive)) or not tokens_left or preempted:
        return
    if scheduler.rules.tiers == (Tier.GPU,) and state.running[Tier.CPU].of_class(LS):
        return  # what was preempted comes before what waits
    by_chunk = scheduler.rules.by_chunk and not scheduler.rules.whole_prompts
    num_tokens = min(first.num_tokens, tokens_left) if by_chunk else first.num_tokens
    num_blocks = state.kv.blocks_for(num_tokens)
    seats = state.limits.max_num_seqs - sum(map(len, state.running.values()))
    seats += sum(len(state.preemptible(tier, first)) for tier in Tier)
    finds_room = any(state.may_start(tier, first, num_blocks) for tier in scheduler.rules.tiers)
    assert not (seats > 0 and finds_room), "a latency-sensitive request waits although best-effort ones could yield"


def check(state: SchedulerState) -> None:
    check_queues(state)
    state.kv.check_blocks()
    for queue in (state.waiting, state.prefilling, *state.running.values(), *state.decoding.values()):
        assert queue == sorted(queue, key=lambda request: (request.service_class is BE, request.arrival_index))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_random_load_of_both_classes(system: str, table: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        strategy = rng.choice(list(STRATEGIES)) if system in ("apex", "adaptive") else "auto"
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.choice((4, 12, 30)),
            num_cpu_blocks=rng.choice((6, 20, 60)),
            max_tokens=rng.choice((4, 16, 64)),
            max_num_seqs=rng.choice((2, 8, 64)),
            strategy=STRATEGIES[strategy],
            table=TABLES[table],
            seed=seed,
        )
        watch(engine)
        abort_share = 0.1 if seed % 2 else 0.0
        drive(engine, rng, 25, abort_share=abort_share, best_effort_share=0.6, check=check)


def step_by_step(system: str, seed: int, *, with_best_effort: bool) -> tuple[list[object], Engine]:
    """Requests that arrive at given steps; returns what each plan has of the latency-sensitive ones."""
    rng = random.Random(seed)
    engine = fake_engine(
        system,
        num_gpu_blocks=rng.choice((14, 20, 40)),
        num_cpu_blocks=rng.choice((0, 10, 60)),
        max_tokens=rng.choice((4, 16, 64)),
        max_num_seqs=rng.choice((2, 8, 64)),
    )
    plans: list[object] = []
    run = engine.executor.run

    def run_noted(plan: IterationPlan):
        decodes = [request.request_id for request in plan.decodes if request.service_class is LS]
        prefills = [
            (i.request.request_id, i.start, i.num_tokens) for i in plan.prefills if i.request.service_class is LS
        ]
        plans[-1] = (decodes, prefills)
        return run(plan)

    engine.executor.run = run_noted
    for step in range(300):
        plans.append(None)
        for service_class in (LS, BE):
            prompt, sampling = make_request(rng, 30, 20)
            if step < 100 and rng.random() < 0.25 and (service_class is LS or with_best_effort):
                request_id = f"{service_class.value}-{step}"
                engine.add(engine.make_request(request_id, prompt, sampling, service_class=service_class))
        engine.step()
        engine.kv.check_blocks()
    return [plan for plan in plans if plan != ([], [])], engine


@pytest.mark.parametrize("system", ["vllm", "swiftllm"])
def test_best_effort_requests_change_nothing_for_the_others(system: str) -> None:
    """On the GPU alone, the latency-sensitive part of every plan is that of an engine without other requests."""
    num_preempted = 0
    for seed in range(5):
        alone, _ = step_by_step(system, seed, with_best_effort=False)
        mixed, engine = step_by_step(system, seed, with_best_effort=True)
        assert [plan for plan in mixed if plan] == [plan for plan in alone if plan], seed
        num_preempted += engine.state.num_preemptions
    assert num_preempted > 5


def up_to(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_seat_goes_to_the_latency_sensitive(system: str) -> None:
    engine = fake_engine(system, num_gpu_blocks=100, num_cpu_blocks=100, max_num_seqs=2)
    older, younger = (
        engine.add(engine.make_request(i, [2, 3, 4], up_to(60), service_class=BE)) for i in ("older", "younger")
    )
    for _ in range(4):
        engine.step()
    urgent = engine.add(engine.make_request("urgent", [5, 6], up_to(3)))
    for _ in range(4):
        engine.step()
    assert urgent.output_len > 0 and younger.num_preemptions == 1 and older.num_preemptions == 0
    while engine.has_unfinished():
        engine.step()
    assert younger.output_token_ids == expected_output([2, 3, 4], 60, ignore_eos=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_blocks_go_to_the_latency_sensitive(system: str) -> None:
    """Best-effort requests that fill every tier make way for the next latency-sensitive one, and end after it."""
    engine = fake_engine(system, num_gpu_blocks=10, num_cpu_blocks=10)
    for i in range(8):
        engine.add(engine.make_request(str(i), [2, 3, i + 2] * 4, up_to(20), service_class=BE))
    for _ in range(6):
        engine.step()
    urgent = engine.add(engine.make_request("urgent", [5] * 20, up_to(10)))
    for _ in range(40):
        engine.step()
        if urgent.tier is not None:
            break
    where = Tier.CPU if system == "fastdecode" else Tier.GPU
    assert urgent.tier is where and len(engine.state.requests) == 9
    while engine.has_unfinished():
        engine.step()
    assert urgent.num_preemptions == 0
    engine.kv.check_blocks()


@pytest.mark.parametrize("system", ["swiftllm", "neo", "apex", "adaptive"])
def test_best_effort_ones_make_way_for_one_that_comes_back_from_the_cpu_tier(system: str) -> None:
    engine = fake_engine(system, num_gpu_blocks=12, num_cpu_blocks=40)
    urgent = engine.add(engine.make_request("urgent", [5] * 30, up_to(12)))
    engine.step()
    state = engine.state
    state.begin_plan()
    state.push_out(urgent)
    engine.executor.backend.swap(state.kv.swaps)
    others = [engine.add(engine.make_request(str(i), [3] * 12, up_to(30), service_class=BE)) for i in range(2)]
    builder = PlanBuilder(state)
    for other in others:  # where the urgent one wants to go
        state.start(other, Tier.GPU, other.num_tokens)
        builder.add_prefill(other, starts=True)
    plan = builder.plan()
    state.apply(plan, engine.executor.run(plan))
    assert [other.tier for other in others] == [Tier.GPU, Tier.GPU]
    while urgent.tier is Tier.CPU:
        engine.step()
    assert urgent.tier is Tier.GPU and urgent.output_len < 12
