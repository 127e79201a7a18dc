"""What vLLM's process does in a simulation: the host beside the GPU, graphs, all rows to the end, plans made ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apex.perf.model import Curve, ProfileTable
from apex.replay.loop import replay_requests
from apex.replay.records import ReplayRequest, RequestRecord
from apex.simulator.backend import OWN_ENGINE, Runtime, graph_sizes, vllm_runtime
from apex.simulator.build import build_simulated
from swiftllm.core.request import Tier
from tests.reference.linear_profile import LAYERS, flat_ends_table

TABLE = flat_ends_table(1e-7, 1e-6)


def served(
    requests: list[ReplayRequest], runtime: Runtime, table: ProfileTable = TABLE, **options: object
) -> list[RequestRecord]:
    options = {"num_gpu_blocks": 64, "num_cpu_blocks": 0, "max_num_batched_tokens": 64, **options}
    engine = build_simulated("vllm", table, LAYERS, runtime=runtime, **options)
    records = list(replay_requests(engine, requests, wait=engine.backend.sleep).records)
    assert all(record.completed for record in records)
    return records


def one(output_len: int = 3, arrival_s: float = 0.0, prompt_len: int = 20, name: str = "a") -> ReplayRequest:
    return ReplayRequest(name, arrival_s, (1,) * prompt_len, output_len)


def test_the_host_works_beside_the_gpu() -> None:
    def duration_s(host_s: float, runtime: Runtime) -> float:
        table = replace(TABLE, iteration=Curve((1, 2), (host_s, host_s)))
        return served([one()], runtime, table)[0].last_token_s

    beside, gpu_s = Runtime(host_beside_gpu=True), duration_s(0.0, OWN_ENGINE)
    assert duration_s(1e-3, OWN_ENGINE) == pytest.approx(gpu_s + 3e-3)
    assert duration_s(1e-6, beside) == pytest.approx(gpu_s)
    assert duration_s(1.0, beside) == pytest.approx(3.0)


def test_decodes_are_padded_to_graphs() -> None:
    def step_s(runtime: Runtime) -> float:
        first, *_, last = served([one(output_len=2)], runtime)[0].token_times_s
        return last - first

    padded = step_s(Runtime(graph_sizes=(8,))) - step_s(OWN_ENGINE)
    layer_s = TABLE.linear(8) - TABLE.linear(1)
    assert layer_s > 0
    assert padded == pytest.approx((LAYERS - 1 + TABLE.first_share) * layer_s)


def test_batches_beyond_the_largest_graph_are_not_padded() -> None:
    runtime = Runtime(graph_sizes=(1, 2, 4, 8))
    assert [runtime.padded(n) for n in (0, 1, 3, 8, 9)] == [0, 1, 4, 8, 9]
    assert OWN_ENGINE.padded(3) == 3


def test_graphs_are_captured_as_vllm_does() -> None:
    assert graph_sizes(256)[:5] == (1, 2, 4, 8, 16)
    assert (graph_sizes(256)[-1], graph_sizes(128)[-1], graph_sizes(8)[-1]) == (512, 256, 16)
    assert {248, 256, 272} <= set(graph_sizes(1024))
    assert not {250, 264} & set(graph_sizes(1024))


def test_all_rows_cross_the_last_layer() -> None:
    first_s = served([one(output_len=1)], OWN_ENGINE)[0].last_token_s
    all_rows_s = served([one(output_len=1)], Runtime(all_rows_to_end=True))[0].last_token_s
    assert all_rows_s - first_s == pytest.approx((1 - TABLE.first_share) * (TABLE.linear(20) - TABLE.linear(1)))


def test_a_request_that_arrives_during_an_iteration_misses_the_next_one() -> None:
    late = [one(output_len=9), one(arrival_s=1e-9, name="b")]
    now, ahead = (served(late, Runtime(plans_ahead=ahead)) for ahead in (False, True))
    running = now[0].token_times_s
    assert now[1].tier_history[1][0] == pytest.approx(running[0])
    assert ahead[1].tier_history[1][0] == pytest.approx(ahead[0].token_times_s[1])


def test_an_idle_engine_starts_a_request_at_once() -> None:
    record = served([one(), one(arrival_s=9.0, name="b")], Runtime(plans_ahead=True))[1]
    assert record.tier_history[1][0] == pytest.approx(9.0)


@pytest.mark.parametrize("limit", [{"max_num_seqs": 2}, {"num_gpu_blocks": 5}])
def test_what_has_ended_keeps_its_seat_and_blocks_for_one_more_iteration(limit: dict[str, int]) -> None:
    """The third request waits for the seat, or the blocks, of the first one. The second one runs all the time."""
    three = [one(), one(output_len=9, name="b"), one(name="c", prompt_len=40)]
    now, ahead = (served(three, Runtime(plans_ahead=ahead), **limit) for ahead in (False, True))
    assert now[2].tier_history[1][0] == pytest.approx(now[0].last_token_s)
    assert ahead[2].tier_history[1][0] == pytest.approx(ahead[1].token_times_s[3])


def test_a_pool_of_vllm_has_a_block_that_nobody_gets() -> None:
    engine = build_simulated("vllm", TABLE, LAYERS, num_gpu_blocks=10, num_cpu_blocks=0, runtime=vllm_runtime(8))
    assert engine.kv.capacity(Tier.GPU) == 9


def test_only_vllm_of_today_reserves_whole_prompts() -> None:
    """A prompt of three blocks beside one of four, of six: in chunks it starts, whole it waits."""
    prompts = [one(output_len=30, prompt_len=16 * 3), one(output_len=2, prompt_len=16 * 4, name="b")]
    limits = {"num_gpu_blocks": 6, "max_num_batched_tokens": 64}
    papers, today = (served(prompts, Runtime(whole_prompts=whole), **limits) for whole in (False, True))
    assert papers[1].tier_history[1][0] == 0.0
    assert today[1].tier_history[1][0] >= today[0].last_token_s


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """Two requests that outgrow the pool: with a prefix cache the younger one computes less of its tokens again."""
    both = [ReplayRequest(name, 0.0, (token,) * 30, 60) for name, token in (("a", 1), ("b", 2))]

    def last_s(**options: object) -> float:
        records = served(both, OWN_ENGINE, num_gpu_blocks=9, **options)
        assert records[1].num_preemptions > 0
        return records[1].last_token_s

    assert last_s(cached_tiers=(Tier.GPU,)) < last_s()
