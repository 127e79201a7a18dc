"""What an iteration should have taken, against the simulator, whose times are those of the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from apex.perf.model import Curve
from apex.perf.online_correction import SecondsRange, cpu_attention_span, crossings, gpu_batch_span
from apex.strategy import StrategyConfig
from swiftllm.core.plan import OVERLAPPED, CpuBatchPlan, GpuBatchItem, IterationPlan, StepResult, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from tests.apex.perf.online.wrong_tables import TABLE, add_requests, run, simulated_engine
from tests.reference.linear_profile import LAYERS

STRATEGIES = {
    "auto": StrategyConfig(),
    "forced-overlap": StrategyConfig(strategy="asynchronous-overlap"),
    "forced-pipelining": StrategyConfig(strategy="asymmetric-pipelining"),
}
HOST_S = 3e-4
WITH_HOST = replace(TABLE, iteration=Curve((1, 101), (HOST_S, 2 * HOST_S)), hand_over=Curve((1, 2), (1e-5, 1.1e-5)))


def spans_of(engine) -> list[tuple[IterationPlan, StepResult, SecondsRange, SecondsRange]]:
    """Every iteration of a run with its spans: the GPU batch's and that of CPU attention."""
    observe, seen = engine.scheduler.observe, []

    def note(plan: IterationPlan, result: StepResult, stages: Mapping[int, int]) -> None:
        ways = crossings(plan, result, stages, LAYERS)
        model = engine.scheduler.model
        seen.append((plan, result, gpu_batch_span(model, plan, ways), cpu_attention_span(model, ways)))
        observe(plan, result, stages)

    engine.scheduler.observe = note
    run(engine)
    return seen


@pytest.mark.parametrize(
    ("system", "strategy"),
    [
        (system, strategy)
        for system in ("neo", "fastdecode", "apex")
        for strategy in STRATEGIES
        if system == "apex" or strategy != "forced-overlap"  # APEX's strategy
    ],
)
@pytest.mark.parametrize("table", [TABLE, WITH_HOST], ids=["free host", "host"])
def test_a_right_table_is_found_right_in_every_iteration(system: str, strategy: str, table) -> None:
    num_gpu = 0 if system == "fastdecode" else 150
    engine = simulated_engine(system, table=table, strategy=STRATEGIES[strategy], num_gpu_blocks=num_gpu)
    add_requests(engine, 40)
    seen = spans_of(engine)
    assert sum(result.cpu_busy_s for _, result, _, _ in seen) > 0.1
    regular = [one for one in seen if not one[1].detached]  # requests that leave a CPU batch are counted in it
    assert len(regular) > 0.9 * len(seen)
    for plan, result, gpu_batch, cpu in regular:
        assert gpu_batch.least * 0.999999 <= result.gpu_batch_busy_s <= gpu_batch.most * 1.000001
        assert cpu.least * 0.999999 <= result.cpu_busy_s <= cpu.most * 1.000001
        if table is TABLE and not plan.swaps:
            assert gpu_batch.least == pytest.approx(gpu_batch.most) == pytest.approx(result.gpu_batch_busy_s)
        assert cpu.most == pytest.approx(result.cpu_busy_s)
    assert engine.scheduler.prediction_factors == {"gpu_batch": 1.0, "cpu_attention": 1.0}


def cpu_request(tokens: int) -> Request:
    request = Request("cpu", (0,) * tokens, SamplingParams(), frozenset(), 0.0, 0)
    request.tier, request.num_uncomputed = Tier.CPU, 1
    return request


def test_stages_that_a_cpu_batch_may_have_crossed_by_itself_widen_the_gpu_batches_span() -> None:
    model = simulated_engine("apex").scheduler.model
    cpu_batch = CpuBatchPlan(7, (cpu_request(50),), OVERLAPPED)
    prefill = GpuBatchItem(cpu_request(30), 0, 30, Tier.GPU, True)
    plan = IterationPlan(prefills=(prefill,), cpu_batches=(cpu_batch,))

    def span(start: int, end: int) -> SecondsRange:
        result = StepResult({}, {7: end}, frozenset(), 1.0, 1.0, 0.0)
        return gpu_batch_span(model, plan, crossings(plan, result, {7: start}, LAYERS))

    once, often, whole = span(3, 4), span(3, 8), span(-1, LAYERS)
    assert once.most == pytest.approx(once.least)
    assert often.most - often.least == pytest.approx(5 * model.linear_s(1))
    assert whole.most - whole.least == pytest.approx((LAYERS + 1) * model.linear_s(1))
    assert whole.least > often.least > once.least


def test_the_way_to_the_worker_may_be_missing_in_a_attention_tasks_time() -> None:
    model = simulated_engine("apex").scheduler.model
    cpu_batch = CpuBatchPlan(7, (cpu_request(50),), OVERLAPPED)
    plan = IterationPlan(cpu_batches=(cpu_batch,))

    def span(start: int, end: int) -> SecondsRange:
        result = StepResult({}, {7: end}, frozenset(), 1.0, 1.0, 0.0)
        return cpu_attention_span(model, crossings(plan, result, {7: start}, LAYERS))

    future_s, way_s = model.cpu_attention_s(1, 50), model.cpu_attention_s(1, 0)
    assert span(3, 5) == pytest.approx((2 * (future_s - way_s), 2 * future_s))
    assert span(-1, 0) == (0.0, 0.0)  # an attention task is submitted there, and none collected
    assert span(-1, 1) == span(0, 1) == pytest.approx((future_s - way_s, future_s))


def test_a_swap_widens_the_gpu_batches_span_by_its_time_once() -> None:
    """It may hide behind the GPU batch or not. Blocks of one direction are one copy, and each direction is a copy of
    its own."""
    model = simulated_engine("apex", table=WITH_HOST).scheduler.model
    prefill, moved = GpuBatchItem(cpu_request(30), 0, 30, Tier.GPU, True), cpu_request(50)
    two, three = Swap(moved, Tier.CPU, (0, 1), (4, 5)), Swap(moved, Tier.CPU, (2, 3, 4), (6, 7, 8))
    back = Swap(moved, Tier.GPU, (9,), (0,))

    def width_s(*swaps: Swap) -> float:
        span = gpu_batch_span(model, IterationPlan(prefills=(prefill,), swaps=swaps), [])
        return span.most - span.least

    host_s = width_s()
    assert host_s == pytest.approx(model.host_work_s(1))
    assert width_s(two, three, back) - host_s == pytest.approx(model.swap_s(5) + model.swap_s(1))
