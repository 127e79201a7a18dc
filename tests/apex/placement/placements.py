"""Machines whose weights do not fit, engines that decode only, and measured times, for tests of placements."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

from apex.perf.model import Curve
from apex.placement import measured
from apex.placement.measured import StageTimes
from apex.simulator.build import build_simulated
from apex.simulator.predicted_machine import WeightPlacer, predict_machine
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.engine.engine import Engine
from swiftllm.model.placement import Placement
from swiftllm.runtime.memory import stage_bytes

BLOCK = 16
ITERATIONS = 8
MACHINES = {
    "t4": ("t4", "g4dn-4xlarge", "llama-2-13b"),
    "a10": ("a10", "dual-xeon-6342", "llama-2-13b"),
    "a10g": ("a10", "g5-16xlarge", "llama-3.1-70b"),
    "a4000": ("rtx-a4000", "ryzen-7950x", "llama-2-34b"),
    "h100": ("h100", "hgx-numa-node", "llama-3.1-70b"),
}


@functools.cache
def placer_of(name: str, weights: str = "auto") -> WeightPlacer:
    return WeightPlacer(predict_machine(*MACHINES[name], "float16", weights=weights), BLOCK)


@dataclass(frozen=True)
class Decoded:
    """Means of iterations in which all requests decode; ``contexts`` are tokens in each tier, all requests summed."""

    iteration_s: float
    tokens: float
    streamed_bytes: float
    contexts: dict[Tier, int]
    engine: Engine


def decode(system: str, placer: WeightPlacer, placement: Placement, num_gpu: int, num_cpu: int, prompt: int) -> Decoded:
    """Let requests decode under a placement until every iteration is like the one before, and measure it."""
    blocks_each = -(-prompt // BLOCK) + 8
    engine = build_simulated(
        system,
        placer.without_transfers(),
        placer.machine.model.num_layers,
        num_gpu_blocks=num_gpu * blocks_each,
        num_cpu_blocks=num_cpu * blocks_each,
        max_num_batched_tokens=32768,
        max_num_seqs=num_gpu + num_cpu,
        max_model_len=1 << 20,
        interconnect=placer.interconnect,
        weights=placer.with_placement(placement),
        scheduler_table=placer.scheduler_table(placement),
    )
    for i in range(num_gpu + num_cpu):
        engine.add(engine.make_request(str(i), (0,) * prompt, SamplingParams(max_tokens=120)))
    running = engine.state.running
    while sum(map(len, running.values())) < num_gpu + num_cpu or engine.state.prefilling:
        assert len(engine.state.requests) == num_gpu + num_cpu, "requests end before all of them decode"
        engine.step()
    for _ in range(2):
        engine.step()
    contexts = {tier: sum(r.num_tokens + ITERATIONS / 2 for r in queue) for tier, queue in running.items()}
    start_s, tokens, streamed = engine.now(), engine.stats().output_tokens, engine.backend.streamed_bytes
    for _ in range(ITERATIONS):
        engine.step()
    return Decoded(
        (engine.now() - start_s) / ITERATIONS,
        (engine.stats().output_tokens - tokens) / ITERATIONS,
        (engine.backend.streamed_bytes - streamed) / ITERATIONS,
        contexts,
        engine,
    )


def give_times(monkeypatch: pytest.MonkeyPatch, gpu: float, cpu: float, stream: float, attention: float = 0.0) -> None:
    """Engines measure these seconds of a stage in each place, whatever the rows, and of a byte of attention."""

    def timed(model, dtype, *_) -> StageTimes:
        curves = [Curve((1, 2), (seconds, seconds)) for seconds in (gpu, cpu)]
        return StageTimes(max(stage_bytes(model, dtype)), *curves, stream, read_bytes_per_s=1.0)

    rate = 1 / attention if attention else float("inf")
    monkeypatch.setattr(measured, "time_stage", timed)
    monkeypatch.setattr(measured, "attention_bytes_per_s", lambda *_: (rate, rate))
