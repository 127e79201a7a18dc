"""What requests get: first tokens in time, refusals, rates that the arithmetic of section 3.2 gives. SIMULATED."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest

from apex.perf.model import Curve
from apex.perf.online_correction import scaled_table
from apex.schedulers.omniserve import DECODES_SHARE, Backlog, added_by_decodes_s, backlog_before
from swiftllm.core.request import Request, RequestRefused, RequestRefusedForNow, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from tests.apex.schedulers.omniserve.random_load import BE, GPU_BATCH_S, LS, TABLE, add, simulated_engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

OMNISERVE = ("omniserve", "omniserve-stepping")
UNLIMITED = {"tpot_slo_s": 1e9, "ttft_slo_s": 1e9, "disable_admission_control": True}


# -- an empty GPU batch
# -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_an_arrival_does_not_wait_for_cpu_attention(system: str) -> None:
    """CPU attention takes 0.1 s a layer, so that a best-effort token takes 1.6 s."""
    table = flat_ends_table(gpu_token_s=2e-8, cpu_token_s=0.0, cpu_start_s=0.1)
    engine = simulated_engine(system, num_gpu_blocks=60, num_cpu_blocks=1000, table=table)
    for number in range(3):
        add(engine, f"rest-{number}", 1000, 40, BE)  # more than the GPU tier holds
    while len(engine.state.decoding[Tier.CPU]) < 3 or engine.now() < 5:
        engine.step()
    for _ in range(20):
        assert not engine.state.running[Tier.GPU] and engine.state.cpu_batches
        urgent = add(engine, "urgent", 250, 1)
        start_s = engine.now()
        while not urgent.is_finished:
            engine.step()
        assert urgent.token_times_s[0] - start_s < 0.5
        before_s = engine.now()
        engine.step()  # an iteration without a GPU batch ends an attention task after the limit at most
        assert engine.now() - before_s <= engine.scheduler.slo.iteration_s + 0.1 + 0.01
    while engine.has_unfinished():
        engine.step()
    assert engine.scheduler.prediction_factors["gpu_batch"] == 1.0


@pytest.mark.parametrize("system", OMNISERVE)
def test_cpu_batches_without_a_gpu_batch_do_not_correct_a_right_table(system: str) -> None:
    engine = simulated_engine(system, num_gpu_blocks=10, num_cpu_blocks=4000, tpot_slo_s=0.04)
    for number in range(30):
        add(engine, f"rest-{number}", 300 + number, 60 + number, BE)
    while engine.has_unfinished():
        engine.step()
        assert engine.scheduler.prediction_factors == {"gpu_batch": 1.0, "cpu_attention": 1.0}


# -- rates -------------------------------------------------------------------------------------------------------------


def steady_rate(engine: Engine, iterations: int) -> tuple[float, float]:
    """Best-effort tokens per second, and seconds of an iteration."""
    start_s, tokens = engine.now(), engine.stats().best_effort_output_tokens
    prompts = engine.stats().prompt_tokens
    for _ in range(iterations):
        engine.step()
    seconds = engine.now() - start_s
    assert engine.stats().prompt_tokens == prompts
    return (engine.stats().best_effort_output_tokens - tokens) / seconds, seconds / iterations


def engine_with_joined(system: str, number: int, context: int, cpu_token_s: float, gpu_batch: int = 8) -> Engine:
    """``gpu_batch`` latency-sensitive decodes, and best-effort ones that are too long for the GPU tier."""
    engine = simulated_engine(
        system,
        table=flat_ends_table(gpu_token_s=1e-9, cpu_token_s=cpu_token_s, cpu_start_s=1e-6),
        num_gpu_blocks=context // 16 - 1,
        num_cpu_blocks=number * (context // 16 + 80),
        max_num_batched_tokens=8192,
        **UNLIMITED,
    )
    for i in range(gpu_batch):
        add(engine, f"urgent-{i}", 16, 1000)
    for i in range(number):
        add(engine, f"rest-{i}", context, 1000, BE)
    while len(engine.state.decoding[Tier.CPU]) < number:
        engine.step()
    return engine


@pytest.mark.parametrize("number", [1, 17, 40])
def test_joined_batches_get_a_token_in_a_pass_of_layers_plus_one_iterations(number: int) -> None:
    engine = engine_with_joined("omniserve", number, 7000, cpu_token_s=1e-10)
    rate, iteration_s = steady_rate(engine, 6 * (LAYERS + 1))
    assert rate == pytest.approx(number / ((LAYERS + 1) * iteration_s), rel=0.02)
    assert iteration_s == pytest.approx(LAYERS * 1e-3, rel=0.1)


@pytest.mark.parametrize("number", [4, 40])
@pytest.mark.parametrize("cpu_token_s", [1e-9, 1e-8, 1e-7, 1e-6])
@pytest.mark.parametrize("system", OMNISERVE)
def test_best_effort_rate_is_bounded_by_passes_and_by_the_cpu(system: str, cpu_token_s: float, number: int) -> None:
    """A joined CPU batch has a token in L + 1 iterations at best, and the CPU reads a context in every layer."""
    engine = engine_with_joined(system, number, 7000, cpu_token_s)
    iterations = 12 * (LAYERS + 1)
    engine_rate, iteration_s = steady_rate(engine, iterations)
    of_cpu = 1 / (LAYERS * 7000 * cpu_token_s)
    of_passes = number / ((LAYERS + 1) * iteration_s)
    bound = of_cpu if system == "omniserve-stepping" else min(of_cpu, of_passes)
    assert 0 < engine_rate <= 1.01 * bound + number / (iterations * iteration_s)  # tokens under way at the start
    if system == "omniserve" and cpu_token_s == 1e-9 and number == 4:
        assert engine_rate > 0.95 * of_passes


def test_cpu_batches_that_step_are_faster_than_joined_batches() -> None:
    rates = [steady_rate(engine_with_joined(system, 40, 7000, 1e-9), 200)[0] for system in OMNISERVE]
    assert rates[1] > 2 * rates[0]


def mixed_run(system: str, cpu_token_s: float, duration_s: float = 30.0, **settings: object) -> tuple[float, float]:
    """Attainment of latency-sensitive requests, and best-effort tokens per second, under a stream of both."""
    table = replace(TABLE, cpu_attention=flat_ends_table(1e-8, cpu_token_s, 1e-5).cpu_attention)
    settings = {"tpot_slo_s": 0.06, "ttft_slo_s": 1.0, "num_gpu_blocks": 300, "table": table} | settings
    engine = simulated_engine(system, **settings)
    rng, requests, next_s = random.Random(3), [], 0.0
    for number in range(200):
        add(engine, f"rest-{number}", rng.randint(400, 1200), rng.randint(50, 300), BE)
    while engine.now() < duration_s:
        while next_s <= engine.now():
            prompt, output = rng.randint(50, 400), rng.randint(20, 150)
            requests.append(engine.make_request(f"urgent-{len(requests)}", (0,) * prompt, up_to(output), next_s))
            try:
                engine.add(requests[-1])
            except RequestRefused:
                requests.pop()
            next_s += rng.expovariate(2.0)
        engine.step()
    slo = engine.scheduler.slo
    judged = [request for request in requests if request.arrival_s < duration_s - 5]
    kept = sum(keeps_targets(request, slo.ttft_s, slo.tpot_s) for request in judged)
    return kept / len(judged), engine.stats().best_effort_output_tokens / engine.now()


def up_to(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def keeps_targets(request: Request, ttft_s: float, tpot_s: float) -> bool:
    times = request.token_times_s
    if not times or times[0] - request.arrival_s > ttft_s:
        return False
    return times[-1] - times[0] <= tpot_s * max(1, len(times) - 1)


@pytest.mark.parametrize("system", OMNISERVE)
def test_a_faster_cpu_costs_nobody_anything(system: str) -> None:
    rows = [mixed_run(system, cpu_token_s) for cpu_token_s in (4e-7, 1e-7)]
    (slow_kept, slow_rate), (kept, rate) = rows
    assert rate >= 0.98 * slow_rate
    assert kept >= slow_kept - 0.004 and kept > 0.99


def test_best_effort_rate_beats_sarathi_where_memory_is_short() -> None:
    rates = {system: mixed_run(system, 1e-7, num_gpu_blocks=150) for system in ("sarathi", *OMNISERVE)}
    assert all(rates[system][1] > 1.1 * rates["sarathi"][1] for system in OMNISERVE)
    assert all(kept > 0.99 for kept, _ in rates.values())


def decodes_taken(system: str) -> float:
    """What the decodes of latency-sensitive requests add to an iteration beside a backlog, over the longest iteration.

    Each row costs 0.4 ms, and memory is not short. With the target alone as the limit, 16 requests a second of 50
    tokens would be 144 at once, and add 0.06 s to an iteration of 0.18 s.
    """
    linear = Curve((1.0, 1001.0), (GPU_BATCH_S / LAYERS, (GPU_BATCH_S + 1000 * 4e-4) / LAYERS))
    engine = simulated_engine(system, table=replace(TABLE, linear=linear), num_gpu_blocks=20_000, tpot_slo_s=0.2)
    rng, next_s, taken = random.Random(5), 0.0, []
    for number in range(300):
        add(engine, f"rest-{number}", 2000, 100, BE)
    while engine.now() < 30:
        while next_s <= engine.now():
            add(engine, f"urgent-{next_s}", 20, 50)
            next_s += rng.expovariate(16.0)
        engine.step()
        if engine.now() > 15:
            taken.append(added_by_decodes_s(engine.state, engine.scheduler.model))
    return sum(taken) / len(taken) / engine.scheduler.slo.iteration_s


@pytest.mark.parametrize("system", ["omniserve", "sarathi"])
def test_best_effort_work_leaves_prompts_their_share_of_an_iteration(
    monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    assert 0.8 * DECODES_SHARE < decodes_taken(system) < 1.3 * DECODES_SHARE
    monkeypatch.setattr("apex.schedulers.omniserve.DECODES_SHARE", 1.0)
    assert decodes_taken(system) > 1.5 * DECODES_SHARE


# -- a wrong table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", OMNISERVE)
def test_targets_hold_on_a_machine_slower_than_believed(system: str) -> None:
    slower = scaled_table(TABLE, 1.15, 1.15)
    believed = TABLE
    engine = simulated_engine(system, table=slower, believed=believed, tpot_slo_s=0.06)
    for number in range(40):
        add(engine, f"rest-{number}", 600, 200, BE)
    urgent = []
    while engine.now() < 20:
        if engine.now() > 0.3 * len(urgent):
            urgent.append(add(engine, f"urgent-{len(urgent)}", 200, 60))
        engine.step()
    assert engine.scheduler.prediction_factors["gpu_batch"] == pytest.approx(1.15, abs=0.04)
    judged = [request for request in urgent if request.is_finished]
    assert len(judged) > 40 and all(keeps_targets(request, 2.0, 0.06) for request in judged)


# -- admission control -------------------------------------------------------------------------------------------------


def refuse_some(system: str, **settings: object) -> tuple[Engine, list, list[RequestRefusedForNow]]:
    """Latency-sensitive requests at about twice the rate that can be served."""
    engine = simulated_engine(system, num_gpu_blocks=300, ttft_slo_s=1.0, tpot_slo_s=0.04, **settings)
    rng, admitted, refusals, next_s, number = random.Random(4), [], [], 0.0, 0
    while engine.now() < 20 or engine.has_unfinished():
        while next_s <= min(engine.now(), 20):
            number += 1
            request = engine.make_request(f"urgent-{number}", (0,) * rng.randint(100, 900), up_to(40), next_s)
            try:
                engine.add(request)
                admitted.append(request)
            except RequestRefusedForNow as refusal:
                refusals.append(refusal)
            next_s += rng.expovariate(24.0)
        if engine.has_unfinished():
            engine.step()
        else:
            engine.backend.sleep(0.01)
    return engine, admitted, refusals


@pytest.mark.parametrize("system", [*OMNISERVE, "sarathi"])
def test_those_admitted_have_their_first_token_in_time(system: str) -> None:
    _, admitted, refusals = refuse_some(system)
    in_time = [request.token_times_s[0] - request.arrival_s <= 1.0 for request in admitted]
    assert len(refusals) > 0.2 * len(admitted) and sum(in_time) >= 0.94 * len(in_time)
    assert all(0 < refusal.retry_after_s < 60 for refusal in refusals)
    _, all_of_them, none = refuse_some(system, disable_admission_control=True)
    late = [request.token_times_s[0] - request.arrival_s > 1.0 for request in all_of_them]
    assert not none and sum(late) > 0.3 * len(late)


@pytest.mark.parametrize("expected_s", [1.79, 1.81])
def test_predictions_leave_the_margin_of_the_first_token(expected_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = simulated_engine("omniserve", num_gpu_blocks=60, ttft_slo_s=2.0, slo_margin=0.1)
    monkeypatch.setattr("apex.schedulers.omniserve.first_token_s", lambda *_: expected_s)
    if expected_s < 1.8:
        add(engine, "in-time", 100, 10)
        return
    with pytest.raises(RequestRefusedForNow, match=r"expected after 1\.8 s") as refused:
        add(engine, "late", 100, 10)
    assert refused.value.retry_after_s == pytest.approx(0.01)


def test_prompts_that_hold_all_blocks_tell_when_to_try_again() -> None:
    """Nobody decodes, so nothing tells when blocks come free; the retry is after the target, not after infinity."""
    engine = simulated_engine("omniserve", num_gpu_blocks=60, ttft_slo_s=3.0)
    add(engine, "long", 900, 10)
    engine.step()
    with pytest.raises(RequestRefusedForNow, match=r"the target of 3 s less its margin is 2\.7 s") as refused:
        add(engine, "next", 300, 10)
    assert refused.value.retry_after_s == 3.0 and "inf" not in str(refused.value)


def test_best_effort_and_recovered_requests_are_never_refused() -> None:
    engine = simulated_engine("omniserve", num_gpu_blocks=60, ttft_slo_s=0.05)
    add(engine, "first", 300, 10)
    with pytest.raises(RequestRefusedForNow):
        add(engine, "second", 600, 10)
    add(engine, "rest", 600, 10, BE)
    engine.step()
    engine.backend.sleep(10.0)
    requests = engine.recover()
    assert [request.service_class for request in requests] == [LS, BE]
    with pytest.raises(RequestRefusedForNow):
        engine.add(requests[0])  # as a new one it would be late by ten seconds
    for request in requests:
        engine.add(request, check_targets=False)
    while engine.has_unfinished():
        engine.step()
    assert [request.output_len for request in requests] == [10, 10]


def test_best_effort_work_does_not_count_against_an_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = simulated_engine("omniserve", num_gpu_blocks=100), []

    def note(model: object, slo: object, backlog: Backlog, budget: int) -> float:
        seen.append(backlog)
        return 0.0

    monkeypatch.setattr("apex.schedulers.omniserve.first_token_s", note)
    for number in range(8):
        add(engine, f"rest-{number}", 300, 50, BE)
    for _ in range(10):
        engine.step()
    add(engine, "first", 250, 50)
    assert (seen[0].decodes, seen[0].prompts, seen[0].missing_blocks) == (0, [(250, 0, None)], 0)
    for _ in range(3):
        engine.step()
    add(engine, "second", 100, 50)
    assert seen[1].decodes == 1 and seen[1].decode_context == 253 and seen[1].prompts == [(100, 0, None)]


def test_a_refusal_for_now_crosses_processes() -> None:
    refusal = pickle.loads(pickle.dumps(RequestRefusedForNow("too many requests", 2.5)))
    assert str(refusal) == "too many requests" and refusal.retry_after_s == 2.5


def test_an_arrival_lacks_blocks_for_itself_those_before_it_and_the_next_token_of_each() -> None:
    """Of 20 blocks of 16 tokens a running request holds 5 and a best-effort one 3, which makes way."""
    engine = simulated_engine("omniserve", num_gpu_blocks=20, disable_admission_control=True)
    running, rest = add(engine, "running", 70, 9), add(engine, "rest", 40, 9, BE)
    while len(engine.state.decoding[Tier.GPU]) < 2:
        engine.step()
    assert [engine.kv.num_held(request) for request in (running, rest)] == [5, 3]
    waiting = add(engine, "waiting", 33, 9)  # 3 blocks
    for prompt, missing in ((160, 1), (176, 2), (100, 0), (300, 10)):
        late = engine.make_request("late", (0,) * prompt, SamplingParams(max_tokens=9))
        backlog = backlog_before(late, engine.state, engine.scheduler.lengths)
        assert backlog.missing_blocks == missing == max(0, -(-prompt // 16) + 3 + 3 * 1 - (20 - 5))
        assert (backlog.decodes, backlog.prompt_blocks) == (1, 5)
        assert [left for left, *_ in backlog.prompts] == [waiting.num_tokens, prompt]
