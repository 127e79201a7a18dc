"""Moves between the tiers within a target, and whose turn it is after long waits. SIMULATED."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apex.perf.model import Curve
from apex.schedulers.omniserve import OCCUPANCY, RESIDENCE, IterationLength, Turns
from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine
from tests.apex.schedulers.omniserve.random_load import BE, TABLE, add, simulated_engine


def engine_of(block_s: float, num_gpu_blocks: int) -> Engine:
    """A block takes so long to move; iterations take 17 ms, and may take 40."""
    table = replace(TABLE, swap=Curve((0, 100), (0.0, 100 * block_s)))
    targets = {"tpot_slo_s": 0.04, "slo_margin": 0.0, "disable_admission_control": True}
    return simulated_engine("omniserve", num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=200, table=table, **targets)


@pytest.mark.parametrize(("block_s", "moves"), [(1e-5, True), (1e-2, False)])
def test_who_makes_way_moves_if_its_blocks_move_within_the_target(block_s: float, moves: bool) -> None:
    engine = engine_of(block_s, num_gpu_blocks=40)
    rest = add(engine, "rest", 320, 100, BE)
    add(engine, "first", 80, 200)
    while len(engine.state.decoding[Tier.GPU]) < 2:
        engine.step()
    second = add(engine, "second", 256, 50)
    while not second.output_len:
        engine.step()
    assert [where for _, where in rest.tier_history][:3] == ["waiting", "gpu", "cpu" if moves else "waiting"]


@pytest.mark.parametrize(("block_s", "moves"), [(1e-5, True), (1e-2, False)])
def test_one_comes_back_if_its_blocks_move_within_the_target(block_s: float, moves: bool) -> None:
    engine = engine_of(block_s, num_gpu_blocks=20)
    first, rest = add(engine, "first", 160, 30), add(engine, "rest", 160, 60, BE)
    while not first.is_finished:
        engine.step()
    assert rest.tier is Tier.CPU
    while not rest.is_finished:
        engine.step()
    assert ("gpu" in [where for _, where in rest.tier_history]) == moves


def test_the_mean_iteration_is_that_of_the_last_256() -> None:
    engine = simulated_engine("omniserve", num_gpu_blocks=400, disable_admission_control=True)
    add(engine, "urgent", 160, 9)
    engine.state.begin_plan()
    length, longest = IterationLength(), 4 * RESIDENCE
    for number in range(1, longest + RESIDENCE + 1):
        length.add_iteration(1e-3 if number <= longest else 2e-3, number)
    mean_s = 2e-3 - 1e-3 * (1 - 1 / RESIDENCE) ** RESIDENCE
    growth = OCCUPANCY * 400 * 16 / 160
    limit_s = length.limit_s(engine.state, engine.scheduler.model, 1.0, 0.0)
    assert limit_s == pytest.approx(growth * mean_s, rel=1e-6)


def test_it_is_nobodys_turn_who_waits_for_blocks_of_older_ones() -> None:
    """All nine blocks are held after the first tokens; the youngest wants another one for its second token."""
    engine = simulated_engine("omniserve", num_gpu_blocks=1, num_cpu_blocks=9, disable_admission_control=True)
    older, youngest = [add(engine, name, 32, 16, BE) for name in "ab"], add(engine, "c", 47, 40, BE)
    while min(request.output_len for request in older) < 8:
        engine.step()
    assert youngest.num_tokens > youngest.num_kv_slots and not engine.kv.num_free(Tier.CPU)
    assert youngest.last_served < min(request.last_served for request in older)
    engine.state.begin_plan()
    assert Turns(0).overdue_decode(engine.state) in older
