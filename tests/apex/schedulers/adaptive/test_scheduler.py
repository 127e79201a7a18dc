"""The scheduler `adaptive` as a whole: nobody starves, no block is lost, and each idea can be switched off."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from apex.perf.model import Curve, GpuBatchLoad, PerfModel
from apex.schedulers.adaptive import choose
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.plan import FREE_RUNNING, JOINED, OVERLAPPED, CpuBatchMode, IterationPlan, Strategy
from swiftllm.core.request import SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.scheduler import PlanBuilder
from swiftllm.scheduling.state import SchedulerState
from tests.apex.schedulers.test_schedulers import STRATEGIES, drive
from tests.reference.fake_engine import fake_engine, flat_table
from tests.reference.linear_profile import LAYERS, flat_ends_table

NUM_LAYERS = 3  # of the fake engine
MOST_POLLS = 21  # until an attention task of the fake backend is ready


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    gpu=st.sampled_from((0, 1, 4, 12, 30)),
    cpu=st.sampled_from((1, 6, 20, 60)),
    budget=st.sampled_from((4, 16, 64)),
    cpu_token_s=st.sampled_from((1e-8, 1e-6, 1e-4, 1e-2)),
    linear_token_s=st.sampled_from((0.0, 1e-5)),
    strategy=st.sampled_from(sorted(STRATEGIES)),
)
def test_random_loads(
    seed: int, gpu: int, cpu: int, budget: int, cpu_token_s: float, linear_token_s: float, strategy: str
) -> None:
    """Aborts, tiny pools, any machine: each token right, each block free at the end."""
    assume(gpu or strategy != "forced-gpu-only")
    engine = fake_engine(
        "adaptive",
        num_gpu_blocks=gpu,
        num_cpu_blocks=cpu,
        max_tokens=budget,
        strategy=STRATEGIES[strategy],
        table=flat_table(cpu_token_s=cpu_token_s, linear_token_s=linear_token_s),
        seed=seed,
    )
    drive(engine, random.Random(seed), 15, abort_share=0.15)


@pytest.mark.parametrize("strategy", ["auto", "no-overlap", "no-pipelining"])
@pytest.mark.parametrize("cpu_token_s", [1e-7, 1e-5, 1e-3], ids=["fast", "even", "hopeless"])
def test_no_cpu_decode_starves(cpu_token_s: float, strategy: str) -> None:
    """The bound of the scheduler's docstring, and the iterations that a token itself takes."""
    patience, num_cpu = 20, 24
    disabled = {"no-overlap": "disable_asynchronous_overlap", "no-pipelining": "disable_asymmetric_pipelining"}
    flags = {disabled[strategy]: True} if strategy in disabled else {}
    engine = fake_engine(
        "adaptive",
        num_gpu_blocks=111,
        num_cpu_blocks=6000,
        num_layers=NUM_LAYERS,
        max_tokens=512,
        table=flat_table(cpu_token_s=cpu_token_s, linear_token_s=1e-5),
        strategy=StrategyConfig(max_wait_iterations=patience, **flags),
    )
    # It leaves no room for others.
    engine.add(engine.make_request("gpu", [2] * 4, SamplingParams(max_tokens=430, ignore_eos=True)))
    for i in range(num_cpu):
        engine.add(engine.make_request(f"cpu{i}", [2] * 440, SamplingParams(max_tokens=1000, ignore_eos=True)))
    while engine.state.waiting or engine.state.prefilling:
        engine.step()
    token_of_a_cpu_batch = MOST_POLLS * (NUM_LAYERS + 1)
    bound = patience + num_cpu + 3 * token_of_a_cpu_batch  # two CPU batches under way, then its own
    if strategy == "no-overlap":
        bound = num_cpu * (patience + 1) + 1
    on_cpu = list(engine.state.running[Tier.CPU])
    assert len(on_cpu) == num_cpu
    outputs = {request: (request.output_len, 0) for request in on_cpu}
    for iteration in range(1, 420 - engine.state.iteration):
        engine.step()
        for request, (output_len, _) in outputs.items():
            if request.output_len > output_len:
                outputs[request] = request.output_len, iteration
            assert iteration - outputs[request][1] <= bound, request.request_id
    if strategy != "no-overlap":
        assert all(output_len > 1 for output_len, _ in outputs.values())


def simulated(strategy: StrategyConfig | None = None, cpu_token_s: float = 1e-6, **limits: Any) -> Engine:
    """Sixty requests of 300 tokens, of which the GPU holds about ten."""
    options = {"max_num_batched_tokens": 2048, "num_gpu_blocks": 200, "num_cpu_blocks": 4000, **limits}
    # Linear time is flat up to 100 tokens, and in proportion to them beyond.
    table = replace(flat_ends_table(1e-7, cpu_token_s), linear=Curve((1, 100, 8100), (1e-3, 1e-3, 81e-3)))
    engine = build_simulated("adaptive", table, LAYERS, strategy=strategy, **options)
    for i in range(60):
        engine.add(engine.make_request(str(i), [1] * 300, SamplingParams(max_tokens=60)))
    return engine


def plans(engine: Engine) -> list:
    made = []
    while engine.has_unfinished():
        engine.step()
        made.append(engine.last_iteration[0])
    return made


def rules(made: list) -> set[CpuBatchMode]:
    return {cpu_batch.mode for plan in made for cpu_batch in plan.cpu_batches if plan.decodes}


def test_a_slow_cpu_is_overlapped_and_a_fast_one_pipelined() -> None:
    assert FREE_RUNNING in rules(plans(simulated(cpu_token_s=3e-6)))
    made = plans(simulated(cpu_token_s=1e-8))
    pipelined = sum(plan.strategy is Strategy.PIPELINING for plan in made)
    assert pipelined > 0.8 * sum(bool(plan.cpu_batches) for plan in made) > 0


def test_a_few_that_hide_behind_the_gpu_batches_attention_join_at_every_iteration() -> None:
    """Those left over get their tokens at the pace of the GPU batch, and cost it no stage alone."""
    engine = simulated(cpu_token_s=2e-8)
    few = 0
    while engine.has_unfinished():
        num_cpu = len(engine.state.decoding[Tier.CPU])
        engine.step()
        plan, _ = engine.last_iteration
        if 0 < num_cpu <= 3 and plan.decodes and not plan.swaps:
            (cpu_batch,) = plan.cpu_batches
            assert cpu_batch.mode is JOINED and len(cpu_batch.requests) == num_cpu
            few += 1
    assert few > 5


def test_free_running_can_be_switched_off() -> None:
    made = plans(simulated(StrategyConfig(disable_asynchronous_overlap=True), cpu_token_s=1e-7))
    assert all(mode.waits for mode in rules(made))
    assert {plan.strategy for plan in made} == {Strategy.GPU_ONLY, Strategy.PIPELINING}


def test_pipelining_can_be_switched_off() -> None:
    made = plans(simulated(StrategyConfig(disable_asymmetric_pipelining=True), cpu_token_s=1e-8))
    assert rules(made) and not any(mode.waits for mode in rules(made))


def test_prompt_chunks_can_be_switched_off() -> None:
    """The first iteration has nothing but prompts, so it takes the budget either way."""
    longest = {}
    for disabled in (False, True):
        made = plans(simulated(StrategyConfig(disable_prompt_chunks=disabled)))
        longest[disabled] = max(sum(item.num_tokens for item in plan.prefills) for plan in made[1:])
    assert longest[True] == 2048 - 6  # less the decodes of the prompts that the first iteration finished
    assert longest[False] < 1024


def test_a_forced_strategy_decides_whatever_the_model_predicts() -> None:
    forced = {"asymmetric-pipelining": True, "asynchronous-overlap": False}
    for strategy, waits in forced.items():
        made = plans(simulated(StrategyConfig(strategy=strategy), cpu_token_s=1e-6))
        assert {mode.waits for mode in rules(made)} == {waits}
    assert not rules(plans(simulated(StrategyConfig(strategy="gpu-only"))))


def test_who_waits_for_a_first_token_may_start_with_blocks_kept_for_growth() -> None:
    """Five requests of 19 blocks leave 5 free of 100, and keep one each. The short one takes 2, and one to grow. Where
    an iteration cannot compute all of it, it waits: it would be preempted first, before its first token."""
    for prompt, budget, starts in ((70, 2048, False), (30, 2048, True), (30, 29, False)):
        engine = simulated(num_gpu_blocks=20, num_cpu_blocks=100)
        while len(engine.state.decoding[Tier.CPU]) < 5:
            engine.step()
        for request in list(engine.state.waiting):
            engine.abort(request.request_id)
        assert engine.state.kv.num_free(Tier.CPU) == 5
        engine.state.limits = replace(engine.state.limits, max_num_batched_tokens=budget)
        engine.add(engine.make_request("late", [1] * prompt, SamplingParams(max_tokens=60)))
        engine.step()
        assert (not engine.state.waiting) is starts
        while engine.has_unfinished():
            engine.step()


def test_nobody_of_a_plan_is_preempted_for_a_first_token(monkeypatch) -> None:
    """A best-effort request on the CPU would make way for the late prompt, and the plan has it already."""
    engine = simulated(num_gpu_blocks=20, num_cpu_blocks=102)
    while len(engine.state.decoding[Tier.CPU]) < 5:
        engine.step()
    for request in list(engine.state.waiting):
        engine.abort(request.request_id)
    plan_of, kept = engine.scheduler.plan, []

    def checked(state: SchedulerState) -> IterationPlan:
        plan = plan_of(state)
        kept.append(all(request.tier is not None for request in plan.requests()))
        return plan

    monkeypatch.setattr(engine.scheduler, "plan", checked)
    for name, prompt, service_class in (
        ("be", 10, ServiceClass.BEST_EFFORT),
        ("late", 60, ServiceClass.LATENCY_SENSITIVE),
    ):
        engine.add(engine.make_request(name, [1] * prompt, SamplingParams(max_tokens=60), service_class=service_class))
        for _ in range(3):
            engine.step()
    while engine.has_unfinished():
        engine.step()
    assert kept and all(kept)


def test_who_overtakes_those_with_a_first_token(monkeypatch) -> None:
    """Those who came before any of them was preempted, in order, and once."""
    engine = simulated(num_gpu_blocks=20, num_cpu_blocks=100)

    def started(*waiting: tuple[str, float, float | None, int]) -> str:
        """Name, arrival and last preemption in seconds, number of preemptions; those preempted have a token."""
        engine.state.remove_all()
        for index, (name, came_s, preempted_s, preemptions) in enumerate(waiting):
            request = engine.make_request(name, [1] * 30, SamplingParams(max_tokens=60), arrival_s=came_s)
            request.arrival_order = (0, index)
            engine.state.add(request)
            request.num_preemptions = preemptions
            if preempted_s is not None:
                request.output_token_ids.append(1)
                request.tier_history.append((preempted_s, "waiting"))
        names: list[str] = []
        monkeypatch.setattr(
            "apex.schedulers.adaptive.start_prompt", lambda _, request, **how: names.append(request.request_id) or True
        )
        engine.scheduler._start_first_tokens(PlanBuilder(engine.state))
        return "".join(names)

    old, older = ("p", 0.0, 5.0, 1), ("q", 0.0, 3.0, 1)
    assert started(old, ("a", 1.0, None, 0), ("b", 4.0, None, 0)) == "ab"
    assert started(older, old, ("a", 1.0, None, 0), ("b", 4.0, None, 0)) == "a"  # q waits since before b came
    assert started(old, ("a", 1.0, None, 1), ("b", 4.0, None, 0)) == ""  # a has had its turn, and b is younger
    few = [(str(i), 1.0, None, 0) for i in range(5)]
    assert started(old, *few[:4]) == "0123" and started(old, *few) == ""


def test_the_gpu_is_filled_first() -> None:
    engine = simulated(num_gpu_blocks=4000)
    while engine.has_unfinished():
        engine.step()
        assert not engine.state.running[Tier.CPU]


def test_prompts_come_first_where_that_ends_everything_sooner(monkeypatch) -> None:
    """Asked once after each arrival. A small gain is no reason, nor any in a steady state."""
    asked = []

    def seconds(gain: float, share: float):
        return lambda last, chunks, pace: asked.append(last) or (np.array([1.0, 1.0 - gain]), np.array([share, 1.0]))

    for gain, share, whole in ((0.07, 0.6, True), (0.05, 0.6, False), (0.07, 0.4, False)):
        asked.clear()
        engine = simulated(num_gpu_blocks=4000)
        monkeypatch.setattr("apex.schedulers.adaptive.seconds_to_the_end", seconds(gain, share))
        for _ in range(4):
            engine.step()
        plan, _ = engine.last_iteration
        assert (sum(item.num_tokens for item in plan.prefills) > 1024) is whole
        (last,) = asked
        assert last.waiting + last.decoding == 60 and last.mean_output == 60  # no more than they ask for
        engine.add(engine.make_request("late", [1] * 300, SamplingParams(max_tokens=60)))
        engine.step()
        assert len(asked) == 2
    asked.clear()
    plans(simulated(num_gpu_blocks=200, num_cpu_blocks=600))  # they do not fit
    assert all(last.waiting + last.decoding <= 800 * 16 / 360 for last in asked)


def test_a_prompt_that_another_waits_behind_is_not_cut(monkeypatch) -> None:
    monkeypatch.setattr("apex.schedulers.adaptive.WHOLE_BUDGET_GAIN", 0.0)
    for late, is_cut in (("a", True), ("ab", False)):
        engine = simulated(num_gpu_blocks=4000)
        while engine.state.waiting or engine.state.prefilling:
            engine.step()
        for name in late:
            engine.add(engine.make_request(name, [1] * 1800, SamplingParams(max_tokens=60)))
        engine.step()
        plan, _ = engine.last_iteration
        assert plan.decodes and (plan.prefills[0].num_tokens < 1800) is is_cut and len(plan.prefills) == 1


def test_seats_in_attention_windows(monkeypatch) -> None:
    """A request of 360 tokens whose layers keep 64 of them needs no blocks for the others."""
    asked = []
    monkeypatch.setattr(
        "apex.schedulers.adaptive.seconds_to_the_end",
        lambda last, chunks, pace: asked.append(last) or (np.ones(2), np.ones(2)),
    )
    engine = simulated(num_gpu_blocks=400, num_cpu_blocks=400, windows=(64,) * LAYERS)
    for _ in range(3):
        engine.step()
    ring = engine.state.kv.groups.blocks_for(360)
    assert 60 * ring <= 400 < 60 * 360 / 16
    assert asked[0].waiting + asked[0].decoding == 60 and asked[0].gpu_seats == 400 / ring


def test_a_choice_is_kept_until_the_load_has_changed(monkeypatch) -> None:
    """The rates of all strategies are computed in a small part of the iterations."""
    engine = simulated(cpu_token_s=3e-6)
    made = []
    monkeypatch.setattr("apex.schedulers.adaptive.choose", lambda *what: made.append(what) or choose(*what))
    iterations = len(plans(engine))
    assert 5 < len(made) < iterations / 3


def choose_gpu_only(engine: Engine, monkeypatch) -> None:
    """Past the prompts, with a scheduler that would leave CPU decodes out."""
    while engine.state.waiting or engine.state.prefilling:
        engine.step()
    monkeypatch.setattr(
        "apex.schedulers.adaptive.choose",
        lambda times, sizes, load, _, most: choose(times, sizes, load, [Strategy.GPU_ONLY], most),
    )
    engine.scheduler.use_model(engine.scheduler.model)  # the last choice does not stand any more


def sizes_of_started_cpu_batches(engine: Engine, iterations: int) -> list[int]:
    started: dict[int, int] = {}
    for _ in range(iterations):
        engine.step()
        started |= {
            cpu_batch.cpu_batch_id: len(cpu_batch.requests) for cpu_batch in engine.last_iteration[0].cpu_batches
        }
    return list(started.values())


def test_those_left_out_get_a_tenth_of_the_gpu_batch(monkeypatch) -> None:
    """A token for all of them costs about as much linear time as one pass of the GPU batch: one in ten passes."""
    engine = simulated()
    choose_gpu_only(engine, monkeypatch)
    num_cpu = len(engine.state.decoding[Tier.CPU])
    started = sizes_of_started_cpu_batches(engine, 60)
    assert 4 <= len(started) <= 7 and started[0] > 0.8 * num_cpu > 10


def test_an_overdue_request_takes_all_with_it(monkeypatch) -> None:
    """Whatever the shares of time, one CPU batch of everybody starts after ``max_wait_iterations``."""
    patience = 10
    engine = simulated(StrategyConfig(max_wait_iterations=patience))
    monkeypatch.setattr("apex.schedulers.adaptive.LEFT_OUT_SHARE", 0.0)
    choose_gpu_only(engine, monkeypatch)
    started = sizes_of_started_cpu_batches(engine, 5 * patience)
    assert 2 <= len(started) <= 5 and started[0] > 20


def test_a_cpu_batch_steps_by_itself_where_that_yields_as_many_tokens_as_the_gpu_batch() -> None:
    """A stage alone of m decodes costs T_l(m) and one hand-over. In that time the GPU batch would make a share of its g
    tokens."""
    engine, members = simulated(), 12
    model = engine.scheduler.model
    load = GpuBatchLoad(tokens=8, requests=8, decodes=8, decode_context=8 * 300, chunks=())
    gpu_batch_layer_s = model.linear_s(8) + model.gpu_attention_s(8, 8 * 300)
    even_s = members / 8 * gpu_batch_layer_s - model.linear_s(members)  # the hand-over at which both are the same
    for share, mode in ((0.9, FREE_RUNNING), (1.1, OVERLAPPED)):
        hand_over = Curve((1, 2), (share * even_s, share * even_s))
        engine.scheduler.use_model(PerfModel(replace(model.table, hand_over=hand_over), LAYERS))
        assert engine.scheduler._rule(members, load, True) is mode
