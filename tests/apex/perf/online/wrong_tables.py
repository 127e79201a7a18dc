"""Simulated engines whose scheduler predicts from another table than the one that decides the times."""

from __future__ import annotations

import random

from apex.perf.model import ProfileTable
from apex.perf.online_correction import scaled_table
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

TABLE = flat_ends_table(gpu_token_s=2e-8, cpu_token_s=1.5e-7, cpu_start_s=1e-5)


def simulated_engine(
    system: str,
    *,
    gpu_batch: float = 1.0,
    cpu_attention: float = 1.0,
    table: ProfileTable = TABLE,
    strategy: StrategyConfig | None = None,
    num_gpu_blocks: int = 400,
    num_cpu_blocks: int = 4000,
) -> Engine:
    """The machine takes ``gpu_batch`` and ``cpu_attention`` times as long as in ``table``, from which is predicted."""
    return build_simulated(
        system,
        scaled_table(table, gpu_batch, cpu_attention),
        LAYERS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        strategy=strategy,
        scheduler_table=table,
    )


def add_requests(engine: Engine, count: int, prompt: int = 300, output: int = 120, seed: int = 0) -> None:
    rng = random.Random(seed)
    for i in range(count):
        tokens = rng.randint(prompt // 2, prompt * 3 // 2)
        sampling = SamplingParams(max_tokens=rng.randint(output // 2, output * 3 // 2), ignore_eos=True)
        engine.add(engine.make_request(f"{seed}-{i}", (0,) * tokens, sampling))


def run(engine: Engine) -> float:
    """Run to the end; returns output tokens per second of virtual time."""
    while engine.has_unfinished():
        engine.step()
    return engine.stats().output_tokens / engine.now()
