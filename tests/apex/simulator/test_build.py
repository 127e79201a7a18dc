"""Simulated engines: their limits where none are given, and how they describe themselves."""

from __future__ import annotations

import pytest

from apex.perf.online_correction import scaled_table
from apex.simulator.build import build_simulated
from apex.simulator.links import Interconnect
from swiftllm.config import EngineConfig
from swiftllm.core.request import RequestRefused, SamplingParams
from swiftllm.systems import systems
from tests.reference.linear_profile import flat_ends_table

TABLE = flat_ends_table(1e-7, 1e-7)


@pytest.mark.parametrize("system", systems())
def test_limits_are_those_of_a_real_engine_where_none_are_given(system: str) -> None:
    engine, real = build_simulated(system, TABLE, 2, num_gpu_blocks=1, num_cpu_blocks=1), EngineConfig("model")
    limits = engine.state.limits
    assert limits.max_num_batched_tokens == real.max_num_batched_tokens
    assert limits.max_num_seqs == real.max_num_seqs
    assert engine.kv.block_size == engine.describe()["block_size"] == real.block_size


def test_an_engine_describes_what_it_simulates() -> None:
    link = Interconnect(1e9, qkv_bytes_per_row=3, out_bytes_per_row=1)
    engine = build_simulated("apex", TABLE, 2, num_gpu_blocks=3, num_cpu_blocks=4, launch_s=1e-5, interconnect=link)
    description = engine.describe()
    assert (description["system"], description["num_layers"], description["launch_s"]) == ("apex", 2, 1e-5)
    assert (description["num_gpu_blocks"], description["num_cpu_blocks"]) == (3, 4)
    assert description["interconnect"]["bytes_per_s"] == 1e9
    assert description["strategy"]["strategy"] == "auto"


@pytest.mark.parametrize(("gpu", "cpu"), [(0, 9), (9, 0)])
def test_blocks_in_one_tier_are_enough(gpu: int, cpu: int) -> None:
    engine = build_simulated("neo", TABLE, 2, num_gpu_blocks=gpu, num_cpu_blocks=cpu)
    request = engine.add(engine.make_request("a", [1] * 20, SamplingParams(max_tokens=3)))
    while engine.has_unfinished():
        engine.step()
    assert request.output_len == 3


def test_by_default_it_serves_models_of_8192_tokens_and_32000_words() -> None:
    engine = build_simulated("neo", TABLE, 2, num_gpu_blocks=600, num_cpu_blocks=600)
    longest = SamplingParams(max_tokens=192)
    engine.make_request("longest", [31_999] * 8000, longest)
    for prompt in ([1] * 8001, [32_000]):
        with pytest.raises(RequestRefused):
            engine.make_request("more", prompt, longest)


def test_a_simulation_has_no_worker_to_restart_and_names_what_it_extrapolates() -> None:
    engine = build_simulated("neo", TABLE, 2, num_gpu_blocks=9, num_cpu_blocks=9)
    assert engine.stats().worker_restarts == 0
    assert engine.backend.extrapolated == frozenset()


def test_a_scheduler_may_believe_another_table_than_the_machine_s() -> None:
    believed = scaled_table(TABLE, gpu_batch=1.0, cpu_attention=2.0)
    engine = build_simulated("neo", TABLE, 2, num_gpu_blocks=9, num_cpu_blocks=9, scheduler_table=believed)
    assert engine.scheduler.model.table is believed
    right = build_simulated("neo", TABLE, 2, num_gpu_blocks=9, num_cpu_blocks=9)
    assert right.scheduler.model.table is TABLE
    requests = [e.add(e.make_request("a", [1] * 20, SamplingParams(max_tokens=3))) for e in (engine, right)]
    while engine.has_unfinished() or right.has_unfinished():
        engine.step(), right.step()
    assert engine.now() == right.now() and [request.output_len for request in requests] == [3, 3]
