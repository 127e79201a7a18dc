"""The search for a placement, against all placements there are, and the formulas."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from apex.placement.budget import Load
from apex.placement.costs import BoundaryCost
from apex.placement.formulas import batch_s, beside_copies_s, hidden_kv_bytes, one_request_s, split_s
from apex.placement.search import choose_exactly, choose_placement, iteration_s
from apex.simulator.placed_machine import WeightPlacer
from apex.simulator.predicted_machine import predict_machine
from swiftllm.machine import GIB
from swiftllm.model.placement import SLOTS, Place, Placement, all_resident, spread
from tests.apex.placement.placements import BLOCK, MACHINES, decode, placer_of

LAYERS = 4
COSTS = [BoundaryCost(weight_bytes=100.0, gpu_s=0.1, cpu_s=3.0, stream_s=2.0)] * 6


@pytest.mark.parametrize("machine", ["t4", "a10", "a4000"])
@pytest.mark.parametrize(("rows", "more"), [(1, 1), (60, 0), (300, 0)])
def test_no_placement_is_more_than_2_percent_faster(machine: str, rows: int, more: int) -> None:
    """A model of four layers has 243 placements; those that fit are simulated, each in a steady state."""
    predicted = predict_machine(*MACHINES[machine], "float16")
    placer = WeightPlacer(replace(predicted, model=replace(predicted.model, num_layers=LAYERS)), BLOCK)
    gpu_bytes = (SLOTS + more) * max(placer.boundary_bytes)
    costs, effect = placer.costs(rows), placer.copy_effect
    chosen = choose_exactly(costs, gpu_bytes, effect=effect).placement

    def simulated_s(placement: Placement) -> float:
        return decode("swiftllm", placer, placement, rows, 0, prompt=16).iteration_s

    fitting = [
        placement
        for placement in map(Placement, itertools.product(Place, repeat=LAYERS + 1))
        if placement.gpu_bytes(placer.boundary_bytes) <= gpu_bytes
    ]
    assert chosen in fitting
    assert simulated_s(chosen) <= 1.02 * min(map(simulated_s, fitting))


def test_many_rows_stream_and_few_rows_are_computed_by_the_cpu() -> None:
    predicted = predict_machine(*MACHINES["a4000"], "float16")
    placer = WeightPlacer(predicted, BLOCK)
    budget = SLOTS * max(placer.boundary_bytes)
    few, some, many = (choose_placement(placer.costs(n), budget, effect=placer.copy_effect) for n in (1, 30, 2000))
    assert few.placement.count(Place.STREAMED) == 0
    assert some.placement.count(Place.STREAMED) and some.placement.count(Place.CPU)
    assert many.placement.count(Place.CPU) == 0 and many.iteration_s == pytest.approx(many.stream_s, rel=0.03)


def test_the_iteration_is_the_longer_of_stream_and_computation() -> None:
    streamed = Placement((Place.STREAMED,) * 6)
    assert iteration_s(streamed, COSTS) == pytest.approx(12.0)
    assert iteration_s(all_resident(5), COSTS, other_s=0.6) == pytest.approx(1.2)
    assert iteration_s(Placement((Place.CPU,) * 6), COSTS) == pytest.approx(18.0)
    mixed = spread(6, 3, 3)
    assert iteration_s(mixed, COSTS) == pytest.approx(9.3)  # CPU 9, GPU 0.3; the stream's 6 are hidden
    choice = choose_placement(COSTS, gpu_bytes=200.0)
    assert choice.placement.count(Place.STREAMED) == 4 and choice.iteration_s == pytest.approx(8.0)
    assert "4 streamed, 2 on the CPU" in choice.describe()


def test_slots_limit_how_far_copies_run_ahead() -> None:
    """After a boundary of 3 s on the CPU two copies are there; the third is waited for."""
    places = (Place.CPU, Place.STREAMED, Place.STREAMED, Place.STREAMED)
    costs = [BoundaryCost(1.0, 0.0, 6.0, 2.0)] * 4
    assert iteration_s(Placement(places), costs) == pytest.approx(8.0)


def test_more_memory_is_never_slower_and_too_little_is_refused() -> None:
    seconds = [choose_placement(COSTS, gpu_bytes=100.0 * n).iteration_s for n in range(7)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] == pytest.approx(0.6)
    with pytest.raises(ValueError, match="give more"):
        choose_placement(COSTS, gpu_bytes=-1.0)


@pytest.mark.parametrize("number", [1, 5, 41])
def test_boundaries_are_spread_evenly(number: int) -> None:
    for streamed in range(number + 1):
        for on_cpu in range(number - streamed + 1):
            placement = spread(number, streamed, on_cpu)
            assert (placement.count(Place.STREAMED), placement.count(Place.CPU)) == (streamed, on_cpu)
            at = [index for index, place in enumerate(placement.places) if place is Place.STREAMED]
            gaps = {end - start for start, end in itertools.pairwise(at)}
            assert not gaps or max(gaps) - min(gaps) <= 1


def test_formulas() -> None:
    assert one_request_s(100.0, 20.0, 30.0) == 2.0
    assert one_request_s(100.0, 20.0, 30.0, gpu_s=1.0) == 2.6
    assert batch_s(100.0, 60.0, 0.5, 20.0, 30.0, 50.0) == 5.0
    assert batch_s(100.0, 180.0, 0.5, 20.0, 30.0, 50.0) == 8.0
    assert batch_s(100.0, 60.0, 9.0, 20.0, 30.0, 50.0) == 9.0
    assert batch_s(100.0, 60.0, 0.5, 20.0, 30.0, 50.0, cpu_linear_s=3.0) == 7.0
    hidden = hidden_kv_bytes(100.0, 20.0, 30.0, 50.0)
    assert batch_s(100.0, hidden, 0.0, 20.0, 30.0, 50.0) == pytest.approx(5.0)
    assert batch_s(100.0, 1.1 * hidden, 0.0, 20.0, 30.0, 50.0) > 5.0
    assert beside_copies_s(1.0, copies_s=9.0, dram_share=0.2) == 1.25  # at 0.8 of the rate all the time
    assert beside_copies_s(4.0, copies_s=1.0, dram_share=0.2) == 4.2
    assert split_s(1.0, 2.0, 3.0) == 3.0


def test_cores_that_attend_are_not_given_boundaries_to_compute() -> None:
    """For requests whose KV cache the CPU reads anyway, streaming is faster: the search knows, the simulator agrees."""
    placer, load = placer_of("t4"), Load(200, 1000, 1024, offloads=True)
    streamed = placer.place("auto", load)
    alone = placer.place("auto", replace(load, max_num_seqs=4))  # of which the GPU holds all
    assert streamed.choice.placement.count(Place.CPU) == 0 < alone.choice.placement.count(Place.CPU)
    rates = []
    for placed in (streamed, alone):
        done = decode("adaptive", placer, placed.choice.placement, 2, 60, 700)
        rates.append(done.tokens / done.iteration_s)
    assert rates[0] > 1.1 * rates[1]


@pytest.mark.parametrize("cpu_computes", [True, False])
def test_too_little_memory_is_refused_with_the_least_that_works(cpu_computes: bool) -> None:
    placer, load = placer_of("t4"), Load(200, 1000, 64, offloads=True, cpu_computes=cpu_computes)
    slots = 0 if cpu_computes else SLOTS * max(placer.boundary_bytes)
    with pytest.raises(ValueError, match=r"0\.00 GiB .* stay on the GPU.*: give at least .*, or auto$") as refusal:
        placer.place(0, load)
    least = float(re.search(r"--weights-gpu-memory (\S+)\)", str(refusal.value))[1])
    assert 0 <= least - (placer.other_bytes + slots) / GIB <= 0.01
    assert placer.place(least, load).num_cpu_blocks > 0
    with pytest.raises(ValueError, match=f"give at least {least:.2f} "):
        placer.place(least - 0.01, load)
