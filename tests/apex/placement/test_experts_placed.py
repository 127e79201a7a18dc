"""Experts in host memory: what the search, the simulator and an engine make of them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apex.build import build_system
from apex.perf.model import Curve
from apex.placement import measured
from apex.placement.measured import EngineMemory, MeasuredCosts, StageTimes, place_weights
from apex.placement.search import (
    ExpertsCost,
    PlacementProblem,
    StageCost,
    UniformLoad,
    best_budget,
    estimate_budget,
    iteration_s,
    most_cpu_rows,
    refined_placement,
)
from apex.simulator.hardware_files import LayerShape
from apex.simulator.predicted_machine import (
    WeightPlacer,
    cpu_experts_curve,
    gpu_experts_curve,
    predict_machine,
)
from apex.simulator.predicted_profile import bits_per_element, host_read_gb_s
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, Placement, with_experts_on_host
from swiftllm.runtime.memory import expert_bytes, stage_bytes
from tests.apex.placement.placements import BLOCK, decode
from tests.apex.placement.test_measured import config_for
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_experts import make_tiny_experts
from tests.swiftllm.runtime.test_streams import prompts, serve

COPIED, COMPUTED = (ExpertsCost(90.0, 1.0, 2.0, 0.2, are_copied) for are_copied in (True, False))


@functools.cache
def placer() -> WeightPlacer:
    return WeightPlacer(predict_machine("t4", "g4dn-4xlarge", "qwen3-30b-a3b", "float16", weights="int4"), BLOCK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_experts(tmp_path_factory.mktemp("experts"), "Qwen3Moe", num_hidden_layers=4)


def test_few_rows_are_computed_by_the_cpu_and_many_are_worth_a_copy() -> None:
    """Where both multiply and copy at constant rates the limit is (E / k) (bits / 16) F / beta."""
    experts, per_token, elements, flops, rate = 128, 8, 3 * 2048 * 768, 8e11, 1.2e10
    limit = most_cpu_rows(
        lambda rows: 2 * rows * per_token * elements / flops, lambda _: experts * elements * 4.19 / 8 / rate
    )
    assert limit == int(experts / per_token * 4.19 / 16 * flops / rate) == 279
    assert most_cpu_rows(lambda _: 2.0, lambda _: 1.0) == 0


def test_an_iteration_computes_or_copies_experts() -> None:
    first = StageCost(10.0, 0.1, 0.1, 0.1)
    for experts, seconds in ((COMPUTED, 0.1 + 3 * 1.2 + 0.3), (COPIED, 6.0)):
        costs = [first, *[StageCost(100.0, 0.3, 5.0, 2.2, experts=experts)] * 4]
        placement = Placement((Place.RESIDENT, Place.EXPERTS, Place.EXPERTS, Place.RESIDENT, Place.EXPERTS))
        assert iteration_s(placement, PlacementProblem(costs, 0.0)) == pytest.approx(seconds)
        # Two slots of 90 and what is left of all stages: three of four at least are not whole.
        problem = PlacementProblem(costs, 10.0 + 4 * 10.0 + 2 * 90.0 + 90.0, most_cpu_rows=7, cpu_computes=False)
        chosen = refined_placement(problem).placement
        assert problem.gpu_bytes_of(chosen) <= problem.gpu_bytes
        if experts is COPIED:  # fewer bytes than whole stages
            assert chosen.count(Place.EXPERTS) == 3 and chosen.most_cpu_rows == 7
        else:
            assert chosen.count(Place.EXPERTS) == 0
            chosen = refined_placement(replace(problem, cpu_computes=True)).placement
            assert chosen.count(Place.EXPERTS) == 3 and chosen.places[0] is Place.RESIDENT


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("count", [9, 30])
def test_the_formula_agrees_with_the_simulator(count: int, more: int) -> None:
    """On both sides of the limit: nothing is copied, or the experts alone once an iteration."""
    rows = placer().most_cpu_rows + more
    placement = replace(with_experts_on_host(49, count), most_cpu_rows=placer().most_cpu_rows)
    found = decode("swiftllm", placer(), placement, rows, 0, prompt=16)
    other_s = placer().other_s(rows, found.contexts[next(iter(found.contexts))] / rows, rows)
    problem = PlacementProblem(placer().costs(rows), 0.0, other_s, placer().rates.copy_effect)
    assert found.iteration_s == pytest.approx(iteration_s(placement, problem), rel=0.03)
    assert found.streamed_bytes == (0.0 if more < 0 else pytest.approx(count * max(problem.expert_sizes)))


def test_one_stream_takes_what_the_cpu_reads_and_a_hop_a_layer() -> None:
    placement = replace(with_experts_on_host(49, 48), most_cpu_rows=placer().most_cpu_rows)
    found, resident = (
        decode("swiftllm", placer(), chosen, 1, 0, prompt=16).iteration_s
        for chosen in (placement, Placement((Place.RESIDENT,) * 49))
    )
    read_s = 48 * cpu_experts_curve(*about())(1)
    hops_s = 48 * (50e-6 + 2 * placer().interconnect.latency_s)
    saved_s = 48 * gpu_experts_curve(placer().machine.gpu, *about()[1:])(1)
    assert found == pytest.approx(resident + read_s + hops_s - saved_s, rel=0.01)


def about() -> tuple:
    machine = placer().machine
    return machine.host, LayerShape.from_config(machine.model), 2, machine.model.quantisation


def test_all_cores_share_dram_and_each_multiplies_for_itself() -> None:
    host, shape, itemsize, scheme = about()
    curve = cpu_experts_curve(host, shape, itemsize, scheme)
    code_bytes = shape.ffn_weights * bits_per_element(scheme, shape.hidden_size) / 8
    of_reads = 8 * code_bytes / (host_read_gb_s(host) * 1e9 * host["cpu_linear_read_fraction"])
    assert curve(1) == pytest.approx(of_reads)  # eight experts of one row
    cores = replace(host, figures={**host.figures, "cores": replace(host.figures["cores"], value=64)})
    assert cpu_experts_curve(cores, shape, itemsize, scheme)(1) == pytest.approx(of_reads)
    assert cpu_experts_curve(cores, shape, itemsize, scheme)(512) < curve(512) / 4


@pytest.mark.parametrize("requests", [4, 16])
def test_with_a_cpu_tier_nothing_attends_there_while_the_cpu_computes_experts(requests: int) -> None:
    """Attention would add to the time of the experts, for which the GPU waits."""
    load = UniformLoad(requests, 1000, 200)
    alone, with_tier = (placer().place("auto", load, offloads=offloads) for offloads in (False, True))
    assert with_tier.timed.placement.count(Place.EXPERTS) > 0
    assert with_tier.num_gpu_blocks * BLOCK >= requests * load.context
    assert with_tier.predicted_tokens_per_s >= alone.predicted_tokens_per_s


def test_auto_places_experts_where_a_t4_is_too_small() -> None:
    load = UniformLoad(16, 1000, 200)
    placed = placer().place("auto", load, offloads=False)
    placement = placed.timed.placement
    assert placement.count(Place.EXPERTS) > 0 and placement.most_cpu_rows == placer().most_cpu_rows
    assert placement.gpu_bytes(placer().stage_bytes, placed.weights.experts.stage_bytes) < placer().gpu_kv_bytes(0)

    class WithoutExperts(WeightPlacer):
        def costs(self, rows: float) -> list[StageCost]:
            return [replace(cost, experts=None) for cost in super().costs(rows)]

    other = best_budget(WithoutExperts(placer().machine, BLOCK), load, offloads=False)
    assert placed.predicted_tokens_per_s > 1.2 * other.tokens_per_s


def test_an_engine_places_them_by_measured_times_and_gives_the_same_tokens(folder, monkeypatch) -> None:
    sizes = stage_bytes(ModelConfig.from_folder(folder), torch.float32)
    experts = expert_bytes(ModelConfig.from_folder(folder), torch.float32)
    config, some_prompts = config_for(folder, 3.3), prompts((7, 19, 3, 22))
    expected = serve(build_system("swiftllm", replace(config, weights_gpu_memory=None)), some_prompts)

    def timed(*_) -> StageTimes:
        gpu, cpu, of_experts = (Curve((1, 64), pair) for pair in ((1e-3, 1e-3), (9.0, 9.0), (2e-3, 65e-3)))
        return StageTimes(max(sizes), gpu, cpu, 0.02, 1e9, of_experts, max(experts))

    for system in ("swiftllm", "apex"):
        with pytest.MonkeyPatch.context() as patch, fake_gpu(1):
            patch.setattr(measured, "time_stage", timed)
            engine = build_system(system, config, profile=flat_table(cpu_token_s=2e-6))
            placement = engine.backend.placement
            assert serve(engine, some_prompts) == expected
        assert set(placement.places) == {Place.RESIDENT, Place.EXPERTS}
        assert placement.most_cpu_rows == pytest.approx(20 * max(experts) / max(sizes) - 1, abs=1)
        assert placement.gpu_bytes(sizes, experts) <= 3.3 * max(sizes)


def test_measured_attention_on_the_cpu_adds_to_experts_there(folder) -> None:
    """Attention that would hide beside the experts makes the search keep requests on the device."""
    model = ModelConfig.from_folder(folder)
    sizes, experts = stage_bytes(model, torch.float32), expert_bytes(model, torch.float32)
    gpu, cpu, of_experts = (Curve((1, 2048), pair) for pair in ((5e-3, 5e-3), (9.0, 9.0), (6e-3, 6e-3)))
    times = StageTimes(max(sizes), gpu, cpu, 5.0, 1e9, of_experts, max(experts))
    memory = EngineMemory(config_for(folder, 3.3), model, torch.float32, 1 << 30)
    each, load = memory.kv_bytes_per_token, UniformLoad(4, 20, 20)

    class RoomForTwo(MeasuredCosts):
        def gpu_kv_bytes(self, weight_bytes: float) -> float:
            return 2 * load.context * each

    found = []
    for attention_s in (1e-4, 1e-2):  # of two requests; an iteration takes 24 ms, experts on the CPU half of it
        costs = RoomForTwo(memory, times, 1e9, 2 * load.context * memory.cpu_kv_bytes_per_token / attention_s)
        assert costs.cpu_attention_s(2, load.context) == pytest.approx(attention_s)
        budget = costs.other_bytes + with_experts_on_host(5, 3).gpu_bytes(sizes, experts)
        found.append(estimate_budget(costs, budget, load, offloads=True))
    assert found[0].requests > 3
    assert found[0].tokens_per_s > 1.2 * found[1].tokens_per_s


def test_a_stage_is_timed_with_its_experts_on_the_cpu(folder, monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit_bytes", lambda: 1 << 20)
    found: list[StageTimes] = []
    time_stage = measured.time_stage
    monkeypatch.setattr(measured, "time_stage", lambda *given: found.append(time_stage(*given)) or found[-1])
    with fake_gpu(0):
        place_weights(config_for(folder, 3.0))
    (times,) = found
    assert times.experts is not None and times.experts.sizes == (1, 2, 4, 8, 16, 32) and times.gpu.sizes == (1, 8, 32)
    assert 0 < times.expert_bytes < times.weight_bytes and min(times.experts.seconds) > 0.0
