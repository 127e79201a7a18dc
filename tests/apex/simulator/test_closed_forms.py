"""Simulated throughput against DESIGN's closed forms, at the numbers of a T4 and an A10, each system within 5%.

The formulas are written down here once more, in terms of the machine's own rates; the simulator's code and
``apex.schedulers.formulas`` are not used. An endless backlog of equal requests, decode-only: all decode all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.systems import systems

BLOCK = 16
ENDS_S = 1e-3
GPU_START_S, CPU_START_S = 1e-5, 5e-5


@dataclass(frozen=True)
class ClosedFormMachine:
    """A GPU, a host and a model: layers, bytes of one layer's weights and of a token's K and V in it, bytes/s."""

    layers: int
    weight_bytes: float
    kv_bytes: float
    gpu_bytes_per_s: float
    cpu_bytes_per_s: float
    prompt: int
    gpu_requests: int

    def linear_s(self, rows: float) -> float:
        """T_l: reading the weights, and a little for each row."""
        return self.weight_bytes / self.gpu_bytes_per_s + 2e-7 * rows

    def gpu_s(self, context_tokens: float) -> float:
        """T_g"""
        return GPU_START_S + context_tokens * self.kv_bytes / self.gpu_bytes_per_s

    def cpu_s(self, context_tokens: float) -> float:
        """T_c"""
        return CPU_START_S + context_tokens * self.kv_bytes / self.cpu_bytes_per_s

    def table(self) -> ProfileTable:
        def over_context(seconds) -> Surface:
            return Surface((1, 4001), tuple(Curve((0, 4000), (seconds(0), seconds(n * 4000))) for n in (1, 4001)))

        free = Surface((1, 2), (Curve((0, 1000), (0.0, 0.0)),) * 2)
        return ProfileTable(
            identity={},
            linear=Curve((1, 4001), (self.linear_s(1), self.linear_s(4001))),
            ends=Curve((1, 2), (ENDS_S, ENDS_S)),
            swap=Curve((0, 100), (1e-4, 2.1e-3)),
            prefill_attention=free,
            gpu_attention=over_context(self.gpu_s),
            cpu_attention=over_context(self.cpu_s),
        )


# Llama-2-7B in float16 on a T4, and Llama-3.1-8B on an A10 (its host's share of DRAM bandwidth as in DESIGN).
T4 = ClosedFormMachine(32, 2 * 202.4e6, 16384, 240e9, 50e9, prompt=500, gpu_requests=2)
A10 = ClosedFormMachine(32, 2 * 218.1e6, 4096, 480e9, 100e9, prompt=1250, gpu_requests=20)
SLOW_A10 = ClosedFormMachine(32, 2 * 218.1e6, 4096, 480e9, 30e9, prompt=3000, gpu_requests=8)
MACHINES = {"t4": T4, "a10": A10}


def decode_only(
    system: str,
    machine: ClosedFormMachine,
    num_gpu: int,
    num_cpu: int,
    strategy: StrategyConfig | None = None,
    iterations: int = 30,
) -> tuple[float, dict[Tier, float]]:
    """Output tokens per second, and each tier's context tokens, all requests summed, half-way through."""
    blocks_each = -(-machine.prompt // BLOCK)
    engine = build_simulated(
        system,
        machine.table(),
        machine.layers,
        # Room to grow, and none for one more request.
        num_gpu_blocks=num_gpu * blocks_each + blocks_each - 4 if num_gpu else 0,
        num_cpu_blocks=num_cpu * (blocks_each + 25),
        max_num_seqs=num_gpu + num_cpu,
        max_num_batched_tokens=4096,
        strategy=strategy,
    )
    for i in range(2 * (num_gpu + num_cpu)):
        engine.add(engine.make_request(str(i), (0,) * machine.prompt, SamplingParams(max_tokens=400)))
    state = engine.state
    while sum(map(len, state.running.values())) < num_gpu + num_cpu or state.prefilling:
        engine.step()
    assert {tier: len(queue) for tier, queue in state.running.items()} == {Tier.GPU: num_gpu, Tier.CPU: num_cpu}
    contexts = {}
    start_s, start_tokens, prefilled = engine.now(), engine.stats().output_tokens, engine.stats().prompt_tokens
    for iteration in range(iterations):
        if iteration == iterations // 2:
            contexts = {tier: sum(r.num_tokens for r in queue) for tier, queue in state.running.items()}
        engine.step()
    assert engine.stats().prompt_tokens == prefilled, "not decode-only"
    return (engine.stats().output_tokens - start_tokens) / (engine.now() - start_s), contexts


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("system", ["vllm", "swiftllm"])
def test_gpu_only(system: str, machine: ClosedFormMachine) -> None:
    """n / (L (T_l + T_g))"""
    n = machine.gpu_requests
    rate, context = decode_only(system, machine, n, 0)
    iteration_s = machine.layers * (machine.linear_s(n) + machine.gpu_s(context[Tier.GPU])) + ENDS_S
    assert rate == pytest.approx(n / iteration_s, rel=0.05)


@pytest.mark.parametrize(("machine", "n"), [(T4, 12), (T4, 40), (A10, 20), (A10, 80)])
def test_fastdecode(machine: ClosedFormMachine, n: int) -> None:
    """n / (2 L max(T_l, T_c)) of a half: while one half computes on the CPU, the other runs its stage."""
    rate, context = decode_only("fastdecode", machine, 0, n)
    layer_s = 2 * max(machine.linear_s(n / 2), machine.cpu_s(context[Tier.CPU] / 2))
    assert rate == pytest.approx(n / (machine.layers * layer_s + ENDS_S), rel=0.05)


@pytest.mark.parametrize(("machine", "num_cpu"), [(T4, 8), (T4, 18), (A10, 16), (A10, 32)])
@pytest.mark.parametrize("system", ["neo", "apex"])
def test_asymmetric_pipelining(system: str, machine: ClosedFormMachine, num_cpu: int) -> None:
    """(n + n_cpu) / (L (max(T_l0, T_c1) + max(T_l1 + T_g0, T_c0))), the CPU as full as it can be and still hide."""
    rate, context = decode_only(system, machine, machine.gpu_requests, num_cpu)
    each = context[Tier.CPU] / num_cpu
    gpu_batch = machine.gpu_requests
    in_1 = max(n for n in range(num_cpu + 1) if machine.cpu_s(n * each) <= machine.linear_s(gpu_batch) or not n)
    in_0 = num_cpu - in_1
    first_s = max(machine.linear_s(gpu_batch + in_0), machine.cpu_s(in_1 * each))
    second_s = max(machine.linear_s(in_1) + machine.gpu_s(context[Tier.GPU]), machine.cpu_s(in_0 * each))
    iteration_s = machine.layers * (first_s + second_s) + ENDS_S
    assert rate == pytest.approx((gpu_batch + num_cpu) / iteration_s, rel=0.05)


def test_asynchronous_overlap() -> None:
    """(n + n_cpu / L) / (L (T_l + T_g)): a joined CPU batch runs one layer an iteration, here L + 1 with the
    embedding's.

    The CPU is so slow that APEX's inequality fails by itself: N_G / N_C = 16 against 2 T_l / T_g + 3 + T_g / T_l = 12.
    """
    machine, gpu_batch, num_cpu = SLOW_A10, SLOW_A10.gpu_requests, 8 * SLOW_A10.gpu_requests
    one_cpu_batch = StrategyConfig(max_cpu_batches=1)
    rate, context = decode_only("apex", machine, gpu_batch, num_cpu, one_cpu_batch, iterations=4 * (machine.layers + 1))
    assert (
        machine.gpu_bytes_per_s / machine.cpu_bytes_per_s
        > 2 * machine.linear_s(gpu_batch) / machine.gpu_s(context[Tier.GPU]) + 3.5
    )
    joined_s = machine.linear_s(gpu_batch + num_cpu) - machine.linear_s(gpu_batch)
    iteration_s = machine.layers * (machine.linear_s(gpu_batch) + machine.gpu_s(context[Tier.GPU])) + ENDS_S + joined_s
    assert machine.cpu_s(context[Tier.CPU]) < iteration_s  # so each layer is ready when the GPU batch comes round
    assert rate == pytest.approx((gpu_batch + num_cpu / (machine.layers + 1)) / iteration_s, rel=0.05)


@pytest.mark.parametrize("num_cpu", [16, 32, 64])
def test_free_running(num_cpu: int) -> None:
    """(u n_cpu + q n) / (L R): a CPU batch runs a layer in R = T_c + t / 2 + T_l1, while the GPU batch runs q.

    t is a layer of the GPU batch, which is asked between two of them. A CPU batch that has its token waits for the next
    iteration, half a pass on average: it is under way for the share u of the time.
    """
    machine, gpu_batch = SLOW_A10, SLOW_A10.gpu_requests
    one_cpu_batch = StrategyConfig(strategy="asynchronous-overlap", max_cpu_batches=1)
    rate, context = decode_only("adaptive", machine, gpu_batch, num_cpu, one_cpu_batch, iterations=300)
    gpu_batch_s = machine.linear_s(gpu_batch) + machine.gpu_s(context[Tier.GPU]) + ENDS_S / machine.layers
    step_s = machine.linear_s(num_cpu)
    round_s = machine.cpu_s(context[Tier.CPU]) + gpu_batch_s / 2 + step_s
    pass_s = machine.layers * round_s * gpu_batch_s / (round_s - step_s)
    use = machine.layers * round_s / (machine.layers * round_s + pass_s / 2)
    gpu_batch_layers = (round_s - use * step_s) / gpu_batch_s
    assert rate == pytest.approx((use * num_cpu + gpu_batch_layers * gpu_batch) / (machine.layers * round_s), rel=0.05)


@pytest.mark.parametrize(("machine", "num_cpu"), [(T4, 18), (A10, 32), (SLOW_A10, 16), (SLOW_A10, 64)])
def test_adaptive_keeps_up_with_either_paper(machine: ClosedFormMachine, num_cpu: int) -> None:
    rates = {
        system: decode_only(system, machine, machine.gpu_requests, num_cpu, iterations=150)[0]
        for system in ("neo", "apex", "adaptive")
    }
    assert rates["adaptive"] > 0.98 * max(rates["neo"], rates["apex"])


def test_every_system_is_here() -> None:
    """Those of two service classes have their own: tests/apex/schedulers/omniserve/test_rates.py."""
    of_two_classes = {"omniserve", "omniserve-stepping", "sarathi", "llumnix"}
    assert set(systems()) - of_two_classes == {"vllm", "swiftllm", "fastdecode", "neo", "apex", "adaptive"}
