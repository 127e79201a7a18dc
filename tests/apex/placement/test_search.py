"""The search for a placement, against all placements there are, and the formulas."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from apex.placement.search import (
    CopyEffect,
    PlacementProblem,
    Rates,
    StageCost,
    TimedPlacement,
    UniformLoad,
    batch_s,
    beside_copies_s,
    fastest_placements,
    iteration_s,
    refined_placement,
)
from apex.simulator.predicted_machine import WeightPlacer, predict_machine
from swiftllm.machine import GIB
from swiftllm.model.placement import SLOTS, Place, Placement, all_resident, spread
from tests.apex.placement.placements import BLOCK, MACHINES, decode, placer_of

LAYERS = 4
OF_DENSE = (Place.RESIDENT, Place.STREAMED, Place.CPU)
COSTS = [StageCost(weight_bytes=100.0, gpu_s=0.1, cpu_s=3.0, stream_s=2.0)] * 6


def fastest(costs: Sequence[StageCost], gpu_bytes: float, **options: object) -> TimedPlacement:
    return fastest_placements(PlacementProblem(costs, gpu_bytes, **options))[0]


def seconds_of(placement: Placement, costs: Sequence[StageCost] = COSTS, **options: object) -> float:
    return iteration_s(placement, PlacementProblem(costs, 0.0, **options))


@pytest.mark.parametrize("machine", ["t4", "a10", "a4000"])
@pytest.mark.parametrize(("rows", "more"), [(1, 1), (60, 0), (300, 0)])
def test_no_placement_is_more_than_2_percent_faster(machine: str, rows: int, more: int) -> None:
    """A model of four layers has 243 placements; those that fit are simulated, each in a steady state."""
    predicted = predict_machine(*MACHINES[machine], "float16")
    placer = WeightPlacer(replace(predicted, model=replace(predicted.model, num_layers=LAYERS)), BLOCK)
    gpu_bytes = (SLOTS + more) * max(placer.stage_bytes)
    costs, effect = placer.costs(rows), placer.rates.copy_effect
    chosen = refined_placement(PlacementProblem(costs, gpu_bytes, effect=effect)).placement

    def simulated_s(placement: Placement) -> float:
        return decode("swiftllm", placer, placement, rows, 0, prompt=16).iteration_s

    fitting = [
        placement
        for placement in map(Placement, itertools.product(OF_DENSE, repeat=LAYERS + 1))
        if placement.gpu_bytes(placer.stage_bytes) <= gpu_bytes
    ]
    assert chosen in fitting
    assert simulated_s(chosen) <= 1.02 * min(map(simulated_s, fitting))


def test_many_rows_stream_and_few_rows_are_computed_by_the_cpu() -> None:
    predicted = predict_machine(*MACHINES["a4000"], "float16")
    placer = WeightPlacer(predicted, BLOCK)
    budget = SLOTS * max(placer.stage_bytes)
    few, some, many = (fastest(placer.costs(n), budget, effect=placer.rates.copy_effect) for n in (1, 30, 2000))
    assert few.placement.count(Place.STREAMED) == 0
    assert some.placement.count(Place.STREAMED) and some.placement.count(Place.CPU)
    assert many.placement.count(Place.CPU) == 0 and many.iteration_s == pytest.approx(many.stream_s, rel=0.03)


def test_the_iteration_is_the_longer_of_stream_and_computation() -> None:
    streamed = Placement((Place.STREAMED,) * 6)
    assert seconds_of(streamed) == pytest.approx(12.0)
    assert seconds_of(all_resident(5), other_s=0.6) == pytest.approx(1.2)
    assert seconds_of(Placement((Place.CPU,) * 6)) == pytest.approx(18.0)
    mixed = spread(6, 3, 3)
    assert seconds_of(mixed) == pytest.approx(9.3)  # CPU 9, GPU 0.3; the stream's 6 are hidden
    choice = fastest(COSTS, gpu_bytes=200.0)
    assert choice.placement.count(Place.STREAMED) == 4 and choice.iteration_s == pytest.approx(8.0)
    assert "4 streamed, 2 on the CPU" in choice.describe()


def test_slots_limit_how_far_copies_run_ahead() -> None:
    """After a stage of 3 s on the CPU two copies are there; the third is waited for."""
    places = (Place.CPU, Place.STREAMED, Place.STREAMED, Place.STREAMED)
    costs = [StageCost(1.0, 0.0, 6.0, 2.0)] * 4
    assert seconds_of(Placement(places), costs) == pytest.approx(8.0)


def test_more_memory_is_never_slower_and_too_little_is_refused() -> None:
    seconds = [fastest(COSTS, gpu_bytes=100.0 * n).iteration_s for n in range(7)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="give more"):
        fastest(COSTS, gpu_bytes=-1.0)


@pytest.mark.parametrize("number", [1, 5, 41])
def test_stages_are_spread_evenly(number: int) -> None:
    for streamed in range(number + 1):
        for on_cpu in range(number - streamed + 1):
            placement = spread(number, streamed, on_cpu)
            assert (placement.count(Place.STREAMED), placement.count(Place.CPU)) == (streamed, on_cpu)
            at = [index for index, place in enumerate(placement.places) if place is Place.STREAMED]
            gaps = {end - start for start, end in itertools.pairwise(at)}
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_formulas() -> None:
    rates = Rates(pcie=20.0, cpu_attention=30.0, dram=50.0, chunk_bytes=8.0)
    assert batch_s(100.0, 60.0, 0.5, rates) == 5.0
    assert batch_s(100.0, 180.0, 0.5, rates) == 8.0
    assert batch_s(100.0, 60.0, 9.0, rates) == 9.0
    assert batch_s(100.0, 60.0, 0.5, rates, cpu_linear_s=3.0) == 7.0
    assert rates.copy_effect == CopyEffect(dram_share=0.4, wait_s=0.2)
    assert beside_copies_s(1.0, copies_s=9.0, dram_share=0.2) == 1.25  # at 0.8 of the rate all the time
    assert beside_copies_s(4.0, copies_s=1.0, dram_share=0.2) == 4.2


def test_cores_that_attend_are_not_given_stages_to_compute() -> None:
    """For requests whose KV cache the CPU reads anyway, streaming is faster: the search knows, the simulator agrees."""
    placer = placer_of("t4")
    # Of four requests the GPU holds all.
    streamed, alone = (placer.place("auto", UniformLoad(n, 200, 1000), offloads=True) for n in (1024, 4))
    assert streamed.timed.placement.count(Place.CPU) == 0 < alone.timed.placement.count(Place.CPU)
    rates = []
    for placed in (streamed, alone):
        done = decode("adaptive", placer, placed.timed.placement, 2, 60, 700)
        rates.append(done.tokens / done.iteration_s)
    assert rates[0] > 1.1 * rates[1]


@pytest.mark.parametrize("cpu_computes", [True, False])
def test_too_little_memory_is_refused_with_the_least_that_works(cpu_computes: bool) -> None:
    placer = placer_of("t4")
    place = partial(placer.place, workload=UniformLoad(64, 200, 1000), offloads=True, cpu_computes=cpu_computes)
    slots = 0 if cpu_computes else SLOTS * max(placer.stage_bytes)
    with pytest.raises(ValueError, match=r"0\.00 GiB .* stay on the GPU.*: give at least .*, or auto$") as refusal:
        place(0)
    least = float(re.search(r"--weights-gpu-memory (\S+)\)", str(refusal.value))[1])
    assert 0 <= least - (placer.other_bytes + slots) / GIB <= 0.01
    assert place(least).num_cpu_blocks > 0
    with pytest.raises(ValueError, match=f"give at least {least:.2f} "):
        place(least - 0.01)


def test_nothing_is_streamed_where_that_neither_saves_memory_nor_time() -> None:
    """Rounding had decided: a stage was streamed for nothing, and its slots took room from KV cache."""
    placer = WeightPlacer(predict_machine("t4", "g4dn-4xlarge", "gpt-oss-20b", "float16"), BLOCK)
    placed = placer.place("auto", UniformLoad(100, 20, 500), offloads=False)
    assert placed.timed.placement.is_all_resident
