"""Neither class shuts the other out: best effort beside a full GPU pool, seats, and iterations within the target."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from apex.perf.model import Curve
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, RequestRefusedForNow
from tests.apex.schedulers.omniserve.random_load import BE, LS, TABLE, add, random_load, simulated_engine

OMNISERVE = ("omniserve", "omniserve-stepping")
TARGETS = {"ttft_slo_s": 1.3, "tpot_slo_s": 0.11}
STEEP = replace(TABLE, linear=Curve((1, 64, 1064), (1e-3, 1.05e-3, 1.1e-2)), swap=Curve((0, 100), (1e-4, 3e-2)))
"""A prompt token costs 0.16 ms, and a swapped block 0.3 ms."""


def first_token_s(request: Request) -> float:
    return request.token_times_s[0] - request.arrival_s


# -- best effort goes on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_best_effort_goes_on_while_others_hold_most_of_the_gpu_pool(system: str) -> None:
    """Two long latency-sensitive requests at any time, in iterations of a sixth of the target."""
    engine = simulated_engine(system, num_gpu_blocks=120, num_cpu_blocks=3000, **TARGETS)
    rest = [add(engine, f"rest-{number}", 900, 100, BE) for number in range(4)]
    urgent: list[Request] = []
    while engine.now() < 60 and not all(request.is_finished for request in rest):
        while sum(not request.is_finished for request in urgent) < 2:
            urgent.append(add(engine, f"urgent-{len(urgent)}", 700, 250))
        engine.step()
    assert [request.output_len for request in rest] == [100] * 4
    ended = [request for request in urgent if request.is_finished]
    assert len(ended) > 2 and all(first_token_s(request) < 1.3 for request in ended)
    assert all(r.token_times_s[-1] - r.token_times_s[0] < 0.11 * 249 for r in ended)


@pytest.mark.parametrize(  # with 20 the best-effort requests need a CPU tier
    ("system", "num_gpu_blocks"),
    [*((system, 20) for system in OMNISERVE), *((s, 200) for s in (*OMNISERVE, "sarathi"))],
)
def test_best_effort_goes_on_where_the_target_leaves_no_time(system: str, num_gpu_blocks: int) -> None:
    """Every iteration alone is longer than the target, so only those that wait too long go on, one after the other."""
    engine = simulated_engine(
        system, num_gpu_blocks=num_gpu_blocks, tpot_slo_s=0.01, ttft_slo_s=1e9, max_wait_iterations=20
    )
    rest = [add(engine, f"rest-{number}", 330, 5, BE) for number in range(3)]
    urgent = [add(engine, "urgent-0", 16, 280)]
    while len(urgent) < 5:
        engine.step()
        if urgent[-1].is_finished:
            urgent.append(add(engine, f"urgent-{len(urgent)}", 16, 280))
    assert [request.output_len for request in rest] == [5] * 3


# -- seats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_a_best_effort_request_under_way_gives_its_seat_to_an_arrival(system: str) -> None:
    table = replace(TABLE, cpu_attention=replace(TABLE.cpu_attention, curves=(Curve((0, 1000), (0.02, 0.02)),) * 2))
    engine = simulated_engine(system, num_gpu_blocks=150, max_num_seqs=3, table=table, **TARGETS)
    rest = add(engine, "rest", 2500, 50, BE)  # longer than the GPU tier
    while rest.output_len < 2:
        engine.step()
    for number in range(2):
        add(engine, f"urgent-{number}", 700, 250)
    for number in range(2, 6):
        while rest.cpu_batch_id is None or engine.state.waiting:
            engine.step()
        urgent = add(engine, f"urgent-{number}", 100, 10)
        before = engine.stats().iterations
        while not urgent.token_times_s:
            engine.step()
        assert engine.stats().iterations - before <= 5  # one attention task ends, and then the prompt follows
        while not urgent.is_finished:
            engine.step()
    while engine.has_unfinished():
        engine.step()
    assert rest.output_len == 50


@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_an_arrival_without_a_seat_is_refused_at_once(system: str) -> None:
    engine = simulated_engine(system, max_num_seqs=3, **TARGETS)
    for number in range(3):
        add(engine, f"urgent-{number}", 50, 400)
    for _ in range(10):
        engine.step()
    with pytest.raises(RequestRefusedForNow, match=r"the first token is expected after .* the target of 1\.3 s") as no:
        add(engine, "late", 50, 10)
    assert no.value.retry_after_s > 0


@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_a_seat_that_best_effort_holds_counts_as_free(system: str) -> None:
    engine = simulated_engine(system, max_num_seqs=3, **TARGETS)
    for number in range(5):
        add(engine, f"rest-{number}", 50, 400, BE)
    add(engine, "first", 50, 400)
    for _ in range(10):
        engine.step()
    for name in ("second", "third"):
        urgent = add(engine, name, 50, 400)
        for _ in range(5):
            engine.step()
        assert first_token_s(urgent) < 0.1


# -- iterations within the target -------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_an_iteration_that_makes_room_keeps_the_target(system: str) -> None:
    """Best-effort blocks leave the GPU, and the prompt that they make room for gets the time that is left."""
    with_swaps = 0
    for seed in range(2):
        engine = simulated_engine(
            system, num_gpu_blocks=100, table=STEEP, tpot_slo_s=0.06, disable_online_correction=True
        )
        limit_s, knee = engine.scheduler.slo.iteration_s, engine.scheduler.model.flat_linear_tokens

        def check(plan: IterationPlan, limit_s: float = limit_s, knee: int = knee) -> None:
            nonlocal with_swaps
            urgent = [item for item in plan.prefills if item.request.service_class is LS]
            if plan.swaps and urgent:
                with_swaps += 1
                least = sum(item.num_tokens for item in urgent) <= knee
                assert least or plan.predicted["iteration_s"] <= limit_s + 1e-9

        random_load(engine, random.Random(seed), 300, check=check, arrival_share=0.3)
    assert with_swaps >= 7


@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_iterations_of_prompts_take_as_long_as_predicted(system: str) -> None:
    engine = simulated_engine(system, tpot_slo_s=1.0, disable_online_correction=True)
    add(engine, "long", 1500, 1)
    while engine.has_unfinished():
        engine.step()
        plan, result = engine.last_iteration
        assert result.duration_s == pytest.approx(plan.predicted["iteration_s"], rel=1e-3)


# -- without the CPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"strategy": "gpu-only"}, {"disable_asynchronous_overlap": True}])
@pytest.mark.parametrize("system", OMNISERVE)
def test_it_serves_both_classes_when_the_cpu_is_not_to_decode(system: str, option: dict[str, object]) -> None:
    for seed in range(2):
        engine = simulated_engine(system, num_gpu_blocks=40, **option)
        random_load(engine, random.Random(seed), 150, arrival_share=0.3)
        assert engine.stats().preemptions > 0 and engine.stats().swapped_blocks == 0
