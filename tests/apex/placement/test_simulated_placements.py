"""Simulated iterations with weights off the GPU, against the closed forms, within 3% on five machines."""

from __future__ import annotations

import pytest

from apex.perf.model import PerfModel
from apex.placement.search import PlacementProblem, batch_s, iteration_s
from apex.simulator.predicted_machine import WeightPlacer
from swiftllm.core.request import Tier
from swiftllm.model.placement import Place, Placement, spread
from tests.apex.placement.placements import MACHINES, decode, placer_of

PROMPT = 2000
CASES = {"link-bound": ("fastdecode", 0.4), "cpu-bound": ("fastdecode", 1.6), "neo": ("neo", 0.2)}


def all_streamed(placer: WeightPlacer) -> Placement:
    return Placement((Place.STREAMED,) * len(placer.stage_bytes))


@pytest.mark.parametrize(("system", "factor"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_batch_takes_the_longest_of_stream_cpu_and_gpu(machine: str, system: str, factor: float) -> None:
    """max(S/beta, K/b + S/D, GPU work), on either side of K*."""
    placer = placer_of(machine)
    rates, model = placer.rates, PerfModel(placer.machine.table, placer.machine.model.num_layers)
    streamed_bytes = sum(placer.stage_bytes)
    token_bytes = placer.machine.model.kv_bytes_per_token(2)
    most = streamed_bytes * rates.cpu_attention * (1 / rates.pcie - 1 / rates.dram)  # K*: read at no extra time
    requests = max(2, round(factor * most / (token_bytes * PROMPT)))
    found = decode(system, placer, all_streamed(placer), 0, requests, PROMPT)
    kv_bytes = found.contexts[Tier.CPU] * token_bytes
    gpu_s = model.num_layers * model.linear_s(requests) + model.outside_layers_s(requests)
    assert found.iteration_s == pytest.approx(batch_s(streamed_bytes, kv_bytes, gpu_s, rates), rel=0.03)
    assert found.tokens == requests


@pytest.mark.parametrize(("machine", "weights"), [*((name, "auto") for name in MACHINES), ("t4", "int4")])
def test_one_request_keeps_link_and_cpu_at_work(machine: str, weights: str) -> None:
    """(W + b G) / (beta + b): nothing is resident, and as much is streamed as crosses while the CPU works."""
    placer = placer_of(machine, weights)
    link, model = placer.interconnect, PerfModel(placer.machine.table, placer.machine.model.num_layers)
    costs, effect = placer.costs(1), placer.rates.copy_effect
    read_s = costs[1].cpu_s / (1.0 - effect.dram_share)
    cpu_bytes_per_s = costs[1].weight_bytes / (read_s + costs[1].crossing_s + effect.wait_s)
    other_s = model.num_layers * model.gpu_attention_s(1, PROMPT) + model.outside_layers_s(1)
    number = len(costs)
    gpu_s = other_s + costs[1].gpu_s * number * link.bytes_per_s / (link.bytes_per_s + cpu_bytes_per_s)
    num_bytes = sum(placer.stage_bytes) + cpu_bytes_per_s * gpu_s  # meanwhile the CPU waits
    closed_s = num_bytes / (link.bytes_per_s + cpu_bytes_per_s)
    streamed = round(closed_s / costs[1].stream_s)
    placement = spread(number, streamed, number - streamed)
    found = decode("swiftllm", placer, placement, 1, 0, PROMPT)
    assert found.iteration_s == pytest.approx(closed_s, rel=0.03)
    problem = PlacementProblem(costs, 0.0, other_s, effect)
    assert found.iteration_s == pytest.approx(iteration_s(placement, problem), rel=0.03)
    assert found.streamed_bytes == placement.bytes_at(Place.STREAMED, placer.stage_bytes)
