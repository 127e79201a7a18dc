"""Steady rates against closed forms in this file's own words, and against the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apex.perf.model import Curve, PerfModel
from apex.schedulers.adaptive import (
    OperationTimes,
    SteadyLoad,
    compare,
    cpu_batches_rate,
    gpu_only_rate,
    overlap_rate,
    pipelining_layer_s,
    pipelining_rate,
)
from swiftllm.core.plan import Strategy
from tests.reference.linear_profile import ENDS_S, LAYERS, flat_ends_table, linear_s

GPU_TOKEN_S, CPU_TOKEN_S, GPU_START_S, CPU_START_S = 1e-7, 1e-6, 1e-5, 2e-5
TABLE = flat_ends_table(GPU_TOKEN_S, CPU_TOKEN_S)
TIMES = OperationTimes(PerfModel(TABLE, LAYERS))
LOAD = SteadyLoad(
    gpu_decodes=8, gpu_context=1000.0, cpu_context=500.0, prompt_per_output=0.0, prompt_limit=0.0
)  # fmt: skip
GPU_BATCH_S = GPU_START_S + 8 * 1000 * GPU_TOKEN_S


def cpu_s(requests: float) -> float:
    return CPU_START_S + requests * 500 * CPU_TOKEN_S


def layer_of(times: OperationTimes, joining: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """A layer of pipelining of ``LOAD`` without prompts."""
    attention_s, context = times.gpu_attention_s(LOAD.gpu_decodes, LOAD.gpu_context), LOAD.cpu_context
    return pipelining_layer_s(times, LOAD.gpu_decodes, attention_s, (joining, context), (alone, context))


def first(values: np.ndarray) -> float:
    return float(np.ravel(values)[0])


def test_only() -> None:
    rate = gpu_only_rate(TIMES, LOAD, np.array([0.0, 30.0]))
    expected = 8 / (LAYERS * (linear_s(8) + GPU_BATCH_S) + ENDS_S)
    assert rate.tokens_per_s == pytest.approx([expected, expected])


def test_prompts_are_charged_up_to_the_backlog() -> None:
    """10 prompt tokens for each output token; but a backlog of 50 tokens is not 80."""
    for backlog, prompts in ((1000, 80), (50, 50)):
        rate = gpu_only_rate(TIMES, replace(LOAD, prompt_per_output=10.0, prompt_limit=backlog), np.zeros(1))
        assert first(rate.prompt_tokens) == prompts
        expected = 8 / (LAYERS * (linear_s(8 + prompts) + GPU_BATCH_S) + ENDS_S)
        assert first(rate.tokens_per_s) == pytest.approx(expected)


def test_a_layer_of_pipelining() -> None:
    """The batch that runs alone's attention hides behind the GPU batch's linear time, or the GPU batch waits for it."""
    hidden = layer_of(TIMES, np.array([1.0]), np.array([1.0]))
    assert first(hidden) == pytest.approx(linear_s(9) + linear_s(1) + GPU_BATCH_S)
    shown = layer_of(TIMES, np.array([1.0]), np.array([40.0]))
    assert first(shown) == pytest.approx(cpu_s(40) + linear_s(40) + GPU_BATCH_S)


def test_pipelining_takes_the_best_share() -> None:
    """With a fast CPU all go along. With a slow one fewer do, and the rate is no lower than that of any share."""
    numbers = np.array([40.0])
    slow = pipelining_rate(TIMES, LOAD, numbers)
    for share in (1.0, 0.5, 0.25):
        k = 40 * share
        layer_s = layer_of(TIMES, np.array([k / 2]), np.array([k / 2]))
        assert first(slow.tokens_per_s) >= (8 + k) / (LAYERS * first(layer_s) + 2 * ENDS_S) * (1 - 1e-9)


def test_all_join_while_their_attention_hides_behind_the_gpu_batches() -> None:
    """Then no stage reads the weights again. Attention that hides only behind the GPU batch's linear time needs a stage
    alone."""
    numbers = np.array([40.0])
    fast = pipelining_rate(OperationTimes(PerfModel(flat_ends_table(GPU_TOKEN_S, 1e-9), LAYERS)), LOAD, numbers)
    assert first(fast.joined) == 40
    layer_s = linear_s(48) + GPU_BATCH_S
    assert first(fast.tokens_per_s) == pytest.approx(48 / (LAYERS * layer_s + ENDS_S))
    short = replace(LOAD, gpu_context=1.0)  # next to no attention of the GPU batch to hide behind
    times = OperationTimes(PerfModel(flat_ends_table(GPU_TOKEN_S, 1e-8, cpu_start_s=9e-4), LAYERS))
    alone = pipelining_rate(times, short, numbers)
    assert first(alone.joined) < 40
    layer_s = linear_s(48 - 20) + linear_s(20) + GPU_START_S + 8 * GPU_TOKEN_S
    assert first(alone.tokens_per_s) == pytest.approx(48 / (LAYERS * layer_s + 2 * ENDS_S))


def test_one_cpu_batch() -> None:
    """A round is its attention, half a layer of the GPU batch and its stage alone; then it is idle for half a pass of
    the GPU batch."""
    rate = cpu_batches_rate(TIMES, LOAD, np.array([20.0]), number=1)
    alone_stage_s, gpu_batch_s = linear_s(20), linear_s(8) + GPU_BATCH_S + ENDS_S / LAYERS
    round_s = cpu_s(20) + gpu_batch_s / 2 + alone_stage_s
    gpu_batch_layers = (round_s - alone_stage_s) / gpu_batch_s
    rest_s = LAYERS * round_s / (2 * gpu_batch_layers)
    use = 1 - rest_s / (LAYERS * round_s + rest_s)
    gpu_batch_layers = (round_s - alone_stage_s * use) / gpu_batch_s
    assert first(rate.tokens_per_s) == pytest.approx((use * 20 + gpu_batch_layers * 8) / (LAYERS * round_s))


def test_two_cpu_batches_keep_the_cpu_busier_than_one() -> None:
    """With few decodes in the GPU batch the CPU is what counts. With many, a second stage for each layer costs more."""
    numbers = np.array([40.0])
    for load, best in ((replace(LOAD, gpu_decodes=2), 2), (LOAD, 1)):
        rates = {k: first(cpu_batches_rate(TIMES, load, numbers, k).tokens_per_s) for k in (1, 2)}
        assert max(rates, key=rates.get) == best
        chosen = overlap_rate(2, TIMES, load, numbers)
        assert first(chosen.tokens_per_s) == rates[best] and first(chosen.num_cpu_batches) == best
        assert first(overlap_rate(1, TIMES, load, numbers).tokens_per_s) == rates[1]
        assert first(overlap_rate(40, TIMES, load, numbers).tokens_per_s) >= rates[best]


def test_hand_overs_are_charged() -> None:
    dear = OperationTimes(PerfModel(replace(TABLE, hand_over=Curve((1, 2), (5e-4, 5e-4))), LAYERS))
    numbers = np.array([30.0])
    for rate in (pipelining_rate, lambda *what: overlap_rate(2, *what)):
        assert first(rate(dear, LOAD, numbers).tokens_per_s) < first(rate(TIMES, LOAD, numbers).tokens_per_s)
    alone = gpu_only_rate(TIMES, LOAD, numbers)
    assert first(gpu_only_rate(dear, LOAD, numbers).tokens_per_s) == first(alone.tokens_per_s)


@pytest.mark.parametrize(
    ("cpu_token_s", "number", "strategy"),
    [
        (1e-8, 40, Strategy.PIPELINING),
        (1e-6, 40, Strategy.OVERLAP),
        (1e-6, 1, Strategy.PIPELINING),
        (1e-5, 1, Strategy.GPU_ONLY),
    ],
    ids=["fast", "slow", "joins for nothing", "not worth a wait"],
)
def test_the_cpus_speed_and_load_decide(cpu_token_s: float, number: int, strategy: Strategy) -> None:
    times = OperationTimes(PerfModel(flat_ends_table(GPU_TOKEN_S, cpu_token_s), LAYERS))
    assert compare(times, LOAD, [number], list(Strategy), max_cpu_batches=2)[0] is strategy


def test_more_requests_are_asked_about() -> None:
    _, here, reachable_per_s = compare(TIMES, LOAD, [4, 40.0], list(Strategy), max_cpu_batches=2)
    _, there, _ = compare(TIMES, LOAD, [40], list(Strategy), max_cpu_batches=2)
    assert reachable_per_s == pytest.approx(first(there.tokens_per_s))
    assert first(here.tokens_per_s) < reachable_per_s


def test_nothing_to_do_has_a_rate_of_zero() -> None:
    empty = replace(LOAD, gpu_decodes=0, gpu_context=0.0)
    with np.errstate(all="raise"):
        _, best, reachable_per_s = compare(TIMES, empty, [0, 10.0], list(Strategy), max_cpu_batches=2)
    assert first(best.tokens_per_s) == 0 and reachable_per_s > 0


def test_streamed_weights_are_a_floor_for_layers_and_not_for_each_stage() -> None:
    """Two stages share one copy. A free-running CPU batch runs a streamed stage once in a pass of the GPU batch."""
    stream_s = 3 * (linear_s(9) + linear_s(1) + GPU_BATCH_S)
    times = OperationTimes(PerfModel(replace(TABLE, stream_s=stream_s, streamed_layers=1.0), LAYERS))
    alone = gpu_only_rate(times, LOAD, np.zeros(1))
    assert first(alone.tokens_per_s) == pytest.approx(8 / (LAYERS * stream_s + ENDS_S))
    one = np.array([1.0])
    assert first(layer_of(times, one, one)) == pytest.approx(stream_s)
    shown = layer_of(times, one, np.array([400.0]))
    assert first(shown) == pytest.approx(cpu_s(400) + linear_s(400) + GPU_BATCH_S) and first(shown) > stream_s
    rates = [
        first(
            cpu_batches_rate(
                OperationTimes(PerfModel(replace(TABLE, streamed_layers=n), LAYERS)), LOAD, one, 1
            ).alone_stages_s
        )
        for n in (0.0, 1.0, LAYERS / 2, LAYERS)
    ]
    assert rates == sorted(rates, reverse=True) and rates[0] > rates[-1]


def test_a_layer_of_pipelining_has_a_hand_over_of_each_batch() -> None:
    """Each is on the GPU batch's path: max(T_l0 + h(r), T_c1) + max(T_l1 + h(s) + T_g, T_c0)."""
    hand_over = Curve((1, 101), (3e-4, 4e-4))
    dear = OperationTimes(PerfModel(replace(TABLE, hand_over=hand_over), LAYERS))
    for joining, alone in ((1, 1), (3, 1)):
        found = layer_of(dear, np.array([float(joining)]), np.array([float(alone)]))
        gpu_batch_s = linear_s(8 + joining) + linear_s(alone) + GPU_BATCH_S
        assert first(found) == pytest.approx(gpu_batch_s + hand_over(joining) + hand_over(alone))
