"""The corrected model in engines: a wrong table is found out, a right one is left alone, a change is followed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apex.perf.model import PerfModel
from apex.perf.online_correction import WINDOW, OnlineCorrection, crossings, gpu_batch_span, scaled_table
from apex.strategy import StrategyConfig
from swiftllm.core.plan import ALONE, CpuBatchPlan, GpuBatchItem, IterationPlan, StateCopy, StepResult
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from tests.apex.perf.online.wrong_tables import TABLE, add_requests, run, simulated_engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

OFF = StrategyConfig(disable_online_correction=True)
WRONG = [(gpu_batch, cpu) for wrong in (0.5, 0.8, 1.25, 2.0) for gpu_batch, cpu in ((wrong, 1.0), (1.0, wrong))]


def iterations_until_settled(engine: Engine, gpu_batch: float, cpu_attention: float) -> int:
    """Iterations with CPU attention until both factors are within 15% of the truth."""
    count = 0
    while engine.has_unfinished():
        factors = engine.scheduler.prediction_factors
        if factors["gpu_batch"] == pytest.approx(gpu_batch, rel=0.15) and factors["cpu_attention"] == pytest.approx(
            cpu_attention, rel=0.15
        ):
            return count
        engine.step()
        _, result = engine.last_iteration
        count += result.cpu_busy_s > 0
    raise AssertionError(f"never: {engine.scheduler.prediction_factors}")


@pytest.mark.parametrize("system", ["neo", "fastdecode", "apex"])
@pytest.mark.parametrize(("gpu_batch", "cpu_attention"), WRONG)
def test_factors_converge_within_a_window(system: str, gpu_batch: float, cpu_attention: float) -> None:
    engine = simulated_engine(
        system, gpu_batch=gpu_batch, cpu_attention=cpu_attention, num_gpu_blocks=0 if system == "fastdecode" else 400
    )
    add_requests(engine, 60)
    assert iterations_until_settled(engine, gpu_batch, cpu_attention) <= WINDOW
    run(engine)
    assert engine.scheduler.prediction_factors == {
        "gpu_batch": pytest.approx(gpu_batch, rel=0.15),
        "cpu_attention": pytest.approx(cpu_attention, rel=0.15),
    }


@pytest.mark.parametrize("system", ["neo", "apex"])
@pytest.mark.parametrize(("gpu_batch", "cpu_attention"), WRONG)
def test_with_a_wrong_table_throughput_is_that_of_a_right_one(
    system: str, gpu_batch: float, cpu_attention: float
) -> None:
    def rate(engine: Engine) -> float:
        add_requests(engine, 120)
        return run(engine)

    corrected = rate(simulated_engine(system, gpu_batch=gpu_batch, cpu_attention=cpu_attention))
    uncorrected = rate(simulated_engine(system, gpu_batch=gpu_batch, cpu_attention=cpu_attention, strategy=OFF))
    right = rate(simulated_engine(system, table=scaled_table(TABLE, gpu_batch, cpu_attention)))
    assert corrected > uncorrected
    assert corrected == pytest.approx(right, rel=0.02)


@pytest.mark.parametrize("system", ["neo", "fastdecode", "apex"])
def test_with_a_right_table_nothing_changes_in_any_bit(system: str) -> None:
    def times(strategy: StrategyConfig | None) -> list[tuple]:
        engine = simulated_engine(system, strategy=strategy, num_gpu_blocks=0 if system == "fastdecode" else 200)
        add_requests(engine, 50)
        iterations = []
        while engine.has_unfinished():
            engine.step()
            plan, result = engine.last_iteration
            iterations.append((engine.now(), plan.predicted, result.gpu_batch_busy_s, result.cpu_busy_s))
        return iterations

    assert times(None) == times(OFF)


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_another_program_that_takes_half_of_the_cpu_is_noticed_and_so_is_its_end(system: str) -> None:
    engine = simulated_engine(system)
    add_requests(engine, 200, output=400)
    right, busy = engine.backend.model, PerfModel(scaled_table(TABLE, 1.0, 2.0), LAYERS)
    for machine, factor in ((right, 1.0), (busy, 2.0), (right, 1.0)):
        engine.backend.model = machine
        noticed = 0
        for _ in range(6 * WINDOW):
            engine.step()
            _, result = engine.last_iteration
            noticed += result.cpu_busy_s > 0
            if noticed > WINDOW:
                break
        assert engine.scheduler.prediction_factors["cpu_attention"] == pytest.approx(factor, rel=0.05)
    assert engine.scheduler.prediction_factors == {"gpu_batch": 1.0, "cpu_attention": 1.0}


def test_the_model_is_replaced_when_a_factor_changes_and_is_the_profiled_one_without() -> None:
    engine = simulated_engine("apex", gpu_batch=1.5)
    profiled = engine.scheduler.model
    add_requests(engine, 60)
    run(engine)
    corrected = engine.scheduler.model
    assert corrected is not profiled and corrected.linear_s(10) == pytest.approx(1.5 * profiled.linear_s(10), rel=0.05)
    assert corrected.cpu_attention_s(10, 1000) == profiled.cpu_attention_s(10, 1000)
    assert corrected.extrapolated is profiled.extrapolated
    engine.backend.__init__(profiled)
    add_requests(engine, 60, seed=1)
    run(engine)
    assert engine.scheduler.model is profiled


def test_it_can_be_turned_off_and_is_where_nothing_is_predicted() -> None:
    for system, strategy in (("apex", OFF), ("apex", StrategyConfig(strategy="gpu-only"))):
        engine = simulated_engine(system, gpu_batch=2.0, strategy=strategy)
        model = engine.scheduler.model
        add_requests(engine, 20)
        run(engine)
        assert engine.scheduler.prediction_factors == {} and engine.scheduler.model is model


def test_iterations_that_leave_work_to_the_device_or_copy_states_are_not_compared() -> None:
    correction = OnlineCorrection(PerfModel(TABLE, LAYERS))
    request = Request("a", (0,) * 2000, SamplingParams(), frozenset(), 0.0, 0)
    plan = IterationPlan(prefills=(GpuBatchItem(request, 0, 500, Tier.GPU, True),))
    launched = StepResult({}, {}, frozenset(), 1e-3, 1e-3, 0.0)
    late = StepResult({"a": 1}, {}, frozenset(), 1.0, 1.0, 0.0)
    for _ in range(WINDOW):
        assert not correction.observe(plan, launched, {})
        assert not correction.observe(plan, late, {})
    for _ in range(WINDOW):
        correction.observe(replace(plan, state_copies=(StateCopy(0, 0, saves=True),)), late, {})
    assert correction.factors["gpu_batch"] == 1.0
    for _ in range(WINDOW):
        correction.observe(plan, late, {})
    assert correction.factors["gpu_batch"] > 2


@pytest.mark.parametrize(
    ("gpu_batch_s", "cpu_s", "expected"), [(1.5, 0.6, 1.5), (1.5, 0.3, 1.0), (1.0, 0.6, 1.0), (1.0, 1.8, 1.8)]
)
def test_small_attention_tasks_keep_the_balance_as_far_as_they_may(
    gpu_batch_s: float, cpu_s: float, expected: float
) -> None:
    """Attention tasks whose way takes 70% of their time: all that their own time proves is a range."""
    table = flat_ends_table(gpu_token_s=1e-8, cpu_token_s=3e-6, cpu_start_s=7e-4)
    correction = OnlineCorrection(model := PerfModel(table, LAYERS))
    request = Request("a", (0,) * 100, SamplingParams(), frozenset(), 0.0, 0)
    cpu_batch = CpuBatchPlan(0, (request,), ALONE)
    plan, future_s = IterationPlan(cpu_batches=(cpu_batch,)), model.cpu_attention_s(1, 100)
    assert future_s == pytest.approx(1e-3)
    nothing = StepResult({}, {}, frozenset(), 0.0, 0.0, 0.0)
    busy_s = gpu_batch_s * gpu_batch_span(model, plan, crossings(plan, nothing, {}, LAYERS)).most
    result = StepResult({"a": 1}, {}, frozenset(), busy_s, busy_s, cpu_s * LAYERS * future_s)
    for _ in range(2 * WINDOW):
        correction.observe(plan, result, {})
    assert correction.factors == {"gpu_batch": pytest.approx(gpu_batch_s), "cpu_attention": pytest.approx(expected)}


def test_a_scaled_table_predicts_multiples_of_everything() -> None:
    given = replace(TABLE, prefill_shared_s=1e-7, hand_over=TABLE.swap, iteration=TABLE.swap)
    table, scaled = PerfModel(given, LAYERS), PerfModel(scaled_table(given, 3.0, 0.5), LAYERS)
    chunks = [(100, 0), (50, 20)]
    gpu_batch = ("linear_s", "outside_layers_s", "first_stage_s", "last_stage_s", "hand_over_s", "host_work_s",
            "swap_s")  # fmt: skip
    for name, sizes, factor in (
        *((name, (9,), 3.0) for name in gpu_batch),
        ("prefill_attention_s", (chunks,), 3.0),
        ("gpu_attention_s", (7, 900), 3.0),
        ("cpu_attention_s", (7, 900), 0.5),
    ):
        assert getattr(scaled, name)(*sizes) == pytest.approx(factor * getattr(table, name)(*sizes)), name
    assert scaled.flat_linear_tokens == table.flat_linear_tokens
