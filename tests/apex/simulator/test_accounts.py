"""The simulator's accounts add up, and the same run gives the same bits."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from apex.simulator.build import build_simulated
from apex.simulator.links import Interconnect, SimulatedStates
from apex.strategy import StrategyConfig
from swiftllm.core.plan import StepResult
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from swiftllm.systems import systems
from tests.reference.linear_profile import flat_ends_table


def mixed_engine(
    system: str,
    interconnect: Interconnect | None = None,
    windows: tuple[int | None, ...] | None = None,
    states: SimulatedStates | None = None,
) -> tuple[Engine, list[Request]]:
    engine = build_simulated(
        system,
        flat_ends_table(3e-7, 5e-7),
        4,
        num_gpu_blocks=40,
        num_cpu_blocks=200,
        max_num_seqs=32,
        launch_s=1e-4,
        interconnect=interconnect,
        windows=windows,
        states=states,
        cached_tiers=() if states is None else tuple(Tier),
        strategy=StrategyConfig(disable_admission_control=True),
    )
    draw = random.Random(7)
    requests = []
    for i in range(60):
        prompt, sampling = [1] * draw.randint(1, 300), SamplingParams(max_tokens=draw.randint(1, 120))
        requests.append(engine.add(engine.make_request(str(i), prompt, sampling)))
    return engine, requests


PCIE = Interconnect(1e9, qkv_bytes_per_row=12_288, out_bytes_per_row=8_192, latency_s=1e-5, dram_bytes_per_s=4e9)


@pytest.mark.parametrize(
    ("interconnect", "windows", "states"),
    [
        (None, None, None),
        (PCIE, None, None),
        (PCIE, (40, None) * 2, None),
        (PCIE, None, SimulatedStates(1e-4)),
        (PCIE, None, SimulatedStates(1e-4, num_snapshots=5)),
    ],
    ids=["no link", "link", "attention windows", "linear attention", "snapshots of states"],
)
@pytest.mark.parametrize("system", systems())
def test_tokens_blocks_and_busy_times_add_up(
    system: str,
    interconnect: Interconnect | None,
    windows: tuple[int | None, ...] | None,
    states: SimulatedStates | None,
) -> None:
    engine, requests = mixed_engine(system, interconnect, windows, states)
    results: list[StepResult] = []
    run = engine.executor.run
    engine.executor.run = lambda plan: results.append(run(plan)) or results[-1]
    while engine.has_unfinished():
        engine.step()
        engine.kv.check_blocks()
        for request in requests:
            assert engine.kv.num_held(request) == engine.kv.blocks_for(request.num_kv_slots)
        if states is not None:
            assert set(engine.kv.state_slots.of_request) == set(engine.kv.block_tables)
    assert all(request.output_len == request.sampling.max_tokens for request in requests)
    stats, busy, makespan_s = engine.stats(), engine.backend.busy, engine.now()
    assert (sum(stats.prefix_hits.values()) > 0) == (states is not None and states.num_snapshots > 0)
    assert stats.output_tokens == sum(request.sampling.max_tokens for request in requests)
    assert engine.status()["blocks_used"] == {"gpu": 0, "cpu": 0}
    assert stats.duration_s == pytest.approx(makespan_s)  # no time passes outside iterations
    assert busy.cpu_s == pytest.approx(stats.cpu_busy_s)
    waited_s = stats.duration_s - stats.gpu_batch_busy_s
    assert busy.gpu_s + waited_s <= makespan_s * (1 + 1e-9)
    for seconds in (busy.gpu_s, busy.cpu_s, busy.to_host_s, busy.to_gpu_s):
        assert 0.0 <= seconds <= makespan_s * (1 + 1e-9)
    if system in ("neo", "fastdecode", "apex"):
        assert busy.cpu_s > 0
    for request in requests:
        assert request.token_times_s == sorted(request.token_times_s)
        assert request.token_times_s[-1] <= makespan_s


@pytest.mark.parametrize("system", systems())
def test_the_same_run_gives_the_same_bits(system: str) -> None:
    def times() -> list[list[float]]:
        engine, requests = mixed_engine(system, PCIE)
        while engine.has_unfinished():
            engine.step()
        return [request.token_times_s for request in requests]

    assert times() == times()


SYSTEMS = ("swiftllm", "neo", "adaptive", "omniserve")


def print_token_times() -> None:
    for system in SYSTEMS:
        engine, requests = mixed_engine(system, PCIE)
        while engine.has_unfinished():
            engine.step()
        print(system, [[time.hex() for time in request.token_times_s] for request in requests])


def test_another_process_gives_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """Its sets have another order."""
    root = Path(__file__).resolve().parents[3]
    printed = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import print_token_times; print_token_times()"],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    print_token_times()
    assert capsys.readouterr().out == printed
    assert printed.count("\n") == len(SYSTEMS)


@pytest.mark.parametrize("system", systems())
def test_aborts_in_mid_flight_leave_the_pools_empty(system: str) -> None:
    engine, requests = mixed_engine(system)
    draw = random.Random(3)
    while engine.has_unfinished():
        engine.step()
        victim = draw.choice(requests)
        if draw.random() < 0.3 or engine.stats().iterations > 120:
            engine.abort(victim.request_id)
    assert any(request.finish_reason.value == "abort" for request in requests)
    assert engine.status()["blocks_used"] == {"gpu": 0, "cpu": 0}
    assert not engine.executor.cpu_batches


def test_unknown_systems_and_empty_pools_are_refused() -> None:
    table = flat_ends_table(1e-7, 1e-7)
    with pytest.raises(ValueError, match="swiftllm, neo"):
        build_simulated("orca", table, 2, num_gpu_blocks=1, num_cpu_blocks=1)
    with pytest.raises(ValueError, match="no blocks"):
        build_simulated("neo", table, 2, num_gpu_blocks=0, num_cpu_blocks=0)
