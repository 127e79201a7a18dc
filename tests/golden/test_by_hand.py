"""Values that follow from a definition: blocks held, seconds of a formula, a rate that must come back."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

import pytest
import torch

from apex.perf.model import ProfileTable
from apex.perf.online_correction import scaled_table
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.request import SamplingParams, ServiceClass
from swiftllm.engine.backend import HostDied
from swiftllm.remote.protocol import FrameKind, Header
from swiftllm.remote.tier import Channel
from tests.apex.simulator.machines import profile
from tests.golden.plans import SYSTEMS, TABLE, WORKLOADS, run
from tests.golden.record import used_blocks
from tests.reference.linear_profile import LAYERS

BLOCK = 16
OFFLOADING = ("neo", "fastdecode", "apex", "adaptive", "omniserve", "omniserve-stepping")
GPU_BLOCKS = [(system, 8) for system in SYSTEMS] + [(system, 0) for system in ("neo", "fastdecode", "apex", "adaptive")]


@pytest.mark.parametrize("prompt", [BLOCK * n + beside for n in (1, 2) for beside in (-1, 0, 1)])
@pytest.mark.parametrize(("system", "num_gpu_blocks"), GPU_BLOCKS)
def test_a_request_holds_the_blocks_of_all_tokens_but_its_newest(system: str, num_gpu_blocks: int, prompt: int) -> None:
    """The newest token's K and V are computed with the next token, so a block is taken no earlier."""
    pools = {"num_gpu_blocks": num_gpu_blocks, "num_cpu_blocks": 8}
    engine = build_simulated(system, TABLE, LAYERS, **pools, block_size=BLOCK)
    sampling = SamplingParams(max_tokens=2 * BLOCK + 2, ignore_eos=True)
    request = engine.add(engine.make_request("a", (0,) * prompt, sampling))
    seen = 0
    while not request.is_finished:
        engine.step()
        if request.output_len > seen and not request.is_finished:
            seen = request.output_len
            assert used_blocks(engine) == -(-(prompt + seen - 1) // BLOCK)
    assert seen == 2 * BLOCK + 1 and used_blocks(engine) == 0


@pytest.mark.parametrize("classes", [(0, 1), (1, 0)])
def test_tokens_of_best_effort_requests_are_counted_whatever_comes_after_them(classes: tuple[int, int]) -> None:
    engine = build_simulated("vllm", TABLE, LAYERS, num_gpu_blocks=8, num_cpu_blocks=0)
    for number in classes:
        sampling = SamplingParams(max_tokens=5 + number, ignore_eos=True)
        engine.add(engine.make_request(str(number), (0,) * 9, sampling, service_class=list(ServiceClass)[number]))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().best_effort_output_tokens == 6


@pytest.mark.parametrize("system", OFFLOADING)
def test_no_block_is_lost_whichever_hosts_die_and_requests_are_aborted(system: str) -> None:
    workload = replace(WORKLOADS["aborts-and-deaths"], abort_share=0.2, iterations=25)
    deaths = 0
    for seed in range(11):
        deaths += run(system, workload, random.Random(seed)).stats().host_deaths  # checks all blocks at the end
    assert deaths > 5


@pytest.mark.parametrize(
    ("system", "gpu_batch", "cpu_attention"),
    [("adaptive", 1.0, 2.5), ("omniserve", 0.4, 1.0)],
)
def test_throughput_comes_back_once_a_wrong_table_is_corrected(
    system: str, gpu_batch: float, cpu_attention: float
) -> None:
    """The machine takes ``gpu_batch`` and ``cpu_attention`` times as long as believed."""
    machine = scaled_table(TABLE, gpu_batch, cpu_attention)

    def rate(believed: ProfileTable, **strategy: bool) -> float:
        config = StrategyConfig(disable_admission_control=True, tpot_slo_s=0.022, slo_margin=0.0, **strategy)
        pools = {"num_gpu_blocks": 400, "num_cpu_blocks": 4000, "max_num_batched_tokens": 1024}
        engine = build_simulated(system, machine, LAYERS, **pools, strategy=config, scheduler_table=believed)
        draw = random.Random(0)
        for number in range(60):
            sampling = SamplingParams(max_tokens=draw.randint(60, 180), ignore_eos=True)
            prompt = (0,) * draw.randint(150, 450)
            service_class = list(ServiceClass)[draw.random() > 0.3]
            engine.add(engine.make_request(str(number), prompt, sampling, service_class=service_class))
        while engine.has_unfinished():
            engine.step()
        return engine.stats().output_tokens / engine.now()

    corrected = rate(TABLE)
    assert corrected > 1.05 * rate(TABLE, disable_online_correction=True)
    assert corrected > 0.97 * rate(machine)


def test_calibrated_cpu_attention_rises_with_requests_as_computed_by_hand() -> None:
    """Llama-3.1-8B in float16 at 50 GB/s, over PCIe 4 x16 at 80% of 31.5 GB/s. A request's layer reads 4,096 bytes a
    token of context. It moves Q, K and V (32 and 2 x 8 heads of 128) to the host, and 32 heads of output back."""
    attention = profile("a10", "dual-xeon-6342", cpu_bandwidth_gb_s=50).cpu_attention
    crossing_s = 2 * (48 + 32) * 128 / (0.8 * 31.5e9)
    for context in (16, 2048):
        read_s = context * 4096 / 50e9
        assert attention(192, context) - attention(128, context) == pytest.approx(64 * (read_s + crossing_s), rel=1e-6)


def test_a_host_that_is_silent_ends_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftllm.remote.tier.SILENCE_S", 0.2)
    here, there = socket.socketpair()
    channel = Channel(here, "host")
    try:
        future = channel.ask(Header(FrameKind.GET), out=torch.zeros(1))
        assert channel.wait_dead(10.0), "nobody noticed"
        with pytest.raises(HostDied):
            future.wait()
    finally:
        there.close()
        channel.close()
