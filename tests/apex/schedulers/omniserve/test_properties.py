"""What every plan of OmniServe's schedulers keeps, under random load of both classes with aborts.

APEX_SLOW_TESTS multiplies the load: more than 100,000 iterations, in some minutes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from itertools import pairwise

import pytest

from swiftllm.core.plan import OVERLAPPED, IterationPlan
from swiftllm.core.request import Request, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.state import SchedulerState
from tests.apex.schedulers.omniserve.random_load import (
    BE,
    GPU_BATCH_S,
    LS,
    add,
    best_effort_rows,
    random_load,
    signature,
    simulated_engine,
)

SEEDS = range(20 if os.environ.get("APEX_SLOW_TESTS") else 2)
OMNISERVE = ("omniserve", "omniserve-stepping")
AS_PROFILED = {"disable_online_correction": True, "disable_admission_control": True}
ENDLESS = 1e9
SMALL = {"num_gpu_blocks": 35, "max_num_seqs": 32}
"""A GPU tier that is full all the time."""


def random_settings(rng: random.Random) -> dict:
    return {
        "num_gpu_blocks": rng.choice((40, 80, 300)),
        "num_cpu_blocks": rng.choice((60, 300, 3000)),
        "max_num_seqs": rng.choice((4, 32, 256)),
        "max_num_batched_tokens": rng.choice((64, 512, 2048)),
        "slo_margin": rng.choice((0.0, 0.1, 0.3)),
        "disable_admission_control": rng.random() < 0.7,
    }


def noted_plans(engine: Engine, rng: random.Random, iterations: int, **load: float) -> list[tuple]:
    plans: list[tuple] = []
    random_load(engine, rng, iterations, check=lambda plan: plans.append(signature(plan)), **load)
    return plans


# -- 1: where there is nothing to offload, omniserve is sarathi -------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "best_effort_share", "num_cpu_blocks"),
    # omniserve-stepping has another order of best-effort work
    [("omniserve", 0.0, 300), ("omniserve-stepping", 0.0, 300), ("omniserve", 0.6, 0)],
)
def test_without_offloading_all_plans_are_those_of_sarathi(
    system: str, best_effort_share: float, num_cpu_blocks: int
) -> None:
    preempted = 0
    for seed in SEEDS:
        settings = random_settings(random.Random(seed)) | SMALL | {"num_cpu_blocks": num_cpu_blocks}
        plans, times, engines = [], [], []
        for name in (system, "sarathi"):
            engine = simulated_engine(name, tpot_slo_s=random.Random(seed).choice((0.02, 0.06, 0.2)), **settings)
            plans.append(noted_plans(engine, random.Random(seed), 200, best_effort_share=best_effort_share))
            times.append(engine.now())
            engines.append(engine)
        assert plans[0] == plans[1] and times[0] == times[1]
        preempted += engines[0].stats().preemptions
    assert preempted > 0


# -- 4: the target holds, or there is no best-effort work --------------------------------------------------------------


@pytest.mark.parametrize("tpot_slo_s", [0.2, 2 * GPU_BATCH_S, 1e-4])
@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_best_effort_work_keeps_the_target(system: str, tpot_slo_s: float) -> None:
    """No plan with best-effort work is predicted above the limit, and none takes longer than predicted.

    The exception is an engine without latency-sensitive requests where not even one token fits. Then the least goes
    on: one decode, one joined CPU batch, or prompt tokens up to the knee, which cost what one costs.
    """
    seen: Counter[str] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        settings = random_settings(rng)
        engine = simulated_engine(system, tpot_slo_s=tpot_slo_s, disable_online_correction=True, **settings)
        scheduler = engine.scheduler
        limit_s, knee = scheduler.slo.iteration_s, scheduler.model.flat_linear_tokens

        def watched(state: SchedulerState, make=scheduler.plan, limit_s=limit_s, knee=knee) -> IterationPlan:
            has_urgent = any(r.service_class is LS and not r.is_finished for r in state.requests.values())
            plan = make(state)
            seen["plans"] += 1
            if not best_effort_rows(plan):
                return plan
            predicted_s = plan.predicted["iteration_s"]
            seen["with best effort"] += 1
            seen["joining"] += bool(plan.cpu_batches) and bool(plan.in_gpu_batch())
            if predicted_s > limit_s + 1e-12:
                assert not has_urgent
                assert len(plan.decodes) + len(plan.cpu_batches) + bool(plan.prefills) == 1
                assert sum(item.num_tokens for item in plan.prefills) <= max(1, knee)
                assert sum(len(cpu_batch.requests) for cpu_batch in plan.cpu_batches) <= 1
                seen["least"] += 1
            return plan

        def check(plan: IterationPlan, engine=engine) -> None:
            if plan.in_gpu_batch():  # each attention task costs its GPU batch at least the shortest hand-over
                futures_s = engine.scheduler.model.hand_over_s(1) * len(plan.cpu_batches)
                assert engine.last_iteration[1].duration_s <= plan.predicted["iteration_s"] + futures_s + 1e-9

        scheduler.plan = watched
        random_load(engine, rng, 200, check=check, arrival_share=rng.choice((0.05, 0.15, 0.4)))
    assert seen["with best effort"] > 0.1 * seen["plans"]
    assert (seen["least"] > 0) == (tpot_slo_s == 1e-4)
    if system in OMNISERVE and tpot_slo_s == 0.2:
        assert seen["joining"] > 0.02 * seen["plans"]


# -- 5: latency-sensitive requests stay on the GPU, and are preempted last ---------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_latency_sensitive_requests_never_leave_the_gpu(system: str) -> None:
    preempted: Counter[object] = Counter()
    for seed in SEEDS:
        rng = random.Random(seed)
        engine = simulated_engine(system, **(random_settings(rng) | SMALL))
        state = engine.state
        push_out, recompute = state.push_out, state.recompute

        def note(victim: Request, state=state) -> None:
            preempted[victim.service_class] += 1
            if victim.service_class is LS:
                assert not state.running[Tier.GPU].of_class(BE)

        def check(plan: IterationPlan, state=state) -> None:
            assert not any(state.running[Tier.CPU].of_class(LS))
            joining = [request for cpu_batch in plan.cpu_batches for request in cpu_batch.requests]
            assert all(request.service_class is BE for request in [*joining, *plan.moving()])

        state.push_out = lambda victim, note=note, call=push_out: (note(victim), call(victim))
        state.recompute = lambda victim, note=note, call=recompute: (note(victim), call(victim))
        random_load(engine, rng, 200, check=check, best_effort_share=0.5, arrival_share=0.4)
    assert min(preempted[LS], preempted[BE]) >= 3


# -- 6: the extremes of the target -------------------------------------------------------------------------------------


def test_without_a_target_every_cpu_request_joins_once_an_iteration() -> None:
    """The CPU is fast, so that every attention task is ready when the GPU batch comes round."""
    engine = engine_with_cpu_requests("omniserve", tpot_slo_s=ENDLESS, ttft_slo_s=ENDLESS)
    under_way = engine.state.cpu_batches.under_way()
    layers = {r.request_id: cpu_batch.stage for cpu_batch in under_way for r in cpu_batch.members}
    for _ in range(60):
        engine.step()
        plan, result = engine.last_iteration
        cpu_batches = {
            request.request_id: cpu_batch for cpu_batch in plan.cpu_batches for request in cpu_batch.requests
        }
        assert len(cpu_batches) == 20 and all(cpu_batch.mode is OVERLAPPED for cpu_batch in cpu_batches.values())
        for request_id, cpu_batch in cpu_batches.items():
            after = result.stages.get(cpu_batch.cpu_batch_id, engine.backend.num_layers)
            assert after == layers.get(request_id, -1) + 1
            layers[request_id] = after if after < engine.backend.num_layers else -1


@pytest.mark.parametrize("system", OMNISERVE)
def test_with_no_time_nothing_joins(system: str) -> None:
    engine = engine_with_cpu_requests(system, tpot_slo_s=ENDLESS, ttft_slo_s=ENDLESS)
    engine.scheduler._slo = type(engine.scheduler.slo)(ENDLESS, 1e-9, 0.0)
    for _ in range(60):
        engine.step()
        plan, result = engine.last_iteration
        assert not plan.cpu_batches and len(plan.decodes) == len(result.tokens) == 4


def engine_with_cpu_requests(system: str, **strategy: float) -> Engine:
    """Four latency-sensitive decodes in the GPU batch, and 20 best-effort ones whose context exceeds the whole GPU
    tier."""
    engine = simulated_engine(
        system, num_gpu_blocks=100, num_cpu_blocks=4000, max_num_batched_tokens=8192, **AS_PROFILED, **strategy
    )
    for number in range(4):
        add(engine, f"urgent-{number}", 16, 300)
    for number in range(20):
        add(engine, f"rest-{number}", 1700, 300, BE)
    while len(engine.state.decoding[Tier.CPU]) < 20:
        engine.step()
    assert not any(request.is_finished for request in engine.state.requests.values())
    return engine


@pytest.mark.parametrize("tpot_slo_s", [1e-9, ENDLESS])
@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_best_effort_requests_change_nothing_for_the_others(system: str, tpot_slo_s: float) -> None:
    """At either extreme of the target, the latency-sensitive part of all plans is that of an engine without others."""
    for seed in SEEDS:
        parts: list[list[tuple]] = []
        for service_classes in ((LS,), (LS, BE)):
            rng = random.Random(seed)
            settings = random_settings(rng) | AS_PROFILED
            engine = simulated_engine(system, tpot_slo_s=tpot_slo_s, **settings)
            parts.append(urgent_parts(engine, random.Random(seed), service_classes))
        assert parts[0] == parts[1] and len(parts[0]) > 50


def urgent_parts(engine: Engine, rng: random.Random, service_classes: tuple) -> list[tuple]:
    """Requests of both classes at given steps, only some of which are queued; the other parts of plans left out."""
    parts = []
    for step in range(400):
        for service_class in (LS, BE):
            prompt, output, arrives = rng.randint(1, 400), rng.randint(1, 100), rng.random() < 0.1
            if arrives and step < 250 and service_class in service_classes:
                add(engine, f"{service_class.value}-{step}", prompt, output, service_class)
        engine.step()
        plan = engine.last_iteration[0] if engine.last_iteration else IterationPlan()
        decodes = [request.request_id for request in plan.decodes if request.service_class is LS]
        items = [item for item in plan.prefills if item.request.service_class is LS]
        if decodes or items:
            parts.append((decodes, [(item.request.request_id, item.start, item.num_tokens) for item in items]))
    return parts


# -- 8: without targets and classes, plain continuous batching ---------------------------------------------------------


@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_without_targets_and_best_effort_requests_it_is_continuous_batching(system: str) -> None:
    """The twin is ``swiftllm`` without a CPU tier. Both give a prompt all its blocks at once, vllm those of a chunk.

    With a CPU tier swiftllm would store there what it preempts. Here latency-sensitive requests never go there.
    """
    preempted = 0
    for seed in SEEDS:
        settings = random_settings(random.Random(seed)) | AS_PROFILED | SMALL
        engine = simulated_engine(system, tpot_slo_s=ENDLESS, **settings)
        plans = noted_plans(engine, random.Random(seed), 200, best_effort_share=0.0, arrival_share=0.3)
        limits = {name: settings[name] for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens")}
        twin = simulated_engine("swiftllm", num_cpu_blocks=0, **limits)
        expected = noted_plans(twin, random.Random(seed), 200, best_effort_share=0.0, arrival_share=0.3)
        assert [plan[:6] for plan in plans] == [plan[:6] for plan in expected]
        assert engine.now() == twin.now()
        preempted += twin.stats().preemptions
    assert preempted >= 5


# -- recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_a_recovered_engine_starts_over(system: str) -> None:
    engine = engine_with_cpu_requests(system, tpot_slo_s=ENDLESS)
    for _ in range(5):
        engine.step()
    requests = engine.recover()
    assert len(requests) == 24 and not engine.state.cpu_batches
    for request in requests:
        engine.add(request, check_targets=False)
    while engine.has_unfinished():
        engine.step()
    assert all(request.output_len == 300 for request in requests)
    assert all(a.arrival_order < b.arrival_order for a, b in pairwise(requests))
    assert not any(pool.num_used for pool in engine.kv.block_pools.values())
