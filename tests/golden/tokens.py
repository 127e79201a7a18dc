"""Greedy tokens of a tiny random model in float32, with pools that force requests out of the GPU."""

from __future__ import annotations

import random
from pathlib import Path

from apex.build import build_system
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, ServiceClass
from tests.golden.plans import GPU_ONLY
from tests.golden.record import all_used_blocks_are_freed, offloading_iterations
from tests.reference.fake_engine import flat_table

PROFILE = flat_table(cpu_token_s=2e-6)  # decisions must not depend on how busy this machine is
SIZES = {"block_size": 4, "num_gpu_blocks": 60, "num_cpu_blocks": 400, "gpu_batch_threads": 1, "cpu_threads": 1}
REQUESTS, TOKENS = 20, 16
ON_THE_GPU = (*GPU_ONLY, "sarathi")


def tokens(model_dir: Path, system: str) -> tuple[list[str], int]:
    """What each request put out, and the number of iterations in which the CPU decoded."""
    draw = random.Random(11)
    strategy = None if system in GPU_ONLY else StrategyConfig(disable_admission_control=True)
    config = EngineConfig(str(model_dir), device="cpu", dtype="float32", max_num_batched_tokens=48, **SIZES)
    engine = build_system(system, config, strategy, profile=PROFILE)
    requests = [
        engine.add(
            engine.make_request(
                str(number),
                [draw.randrange(3, 128) for _ in range(draw.randint(1, 50))],
                SamplingParams(TOKENS, ignore_eos=True),
                service_class=(ServiceClass.LATENCY_SENSITIVE, ServiceClass.BEST_EFFORT)[number % 2],
            )
        )
        for number in range(REQUESTS)
    ]
    try:
        while engine.has_unfinished():
            engine.step()
        all_used_blocks_are_freed(engine)
        return [" ".join(map(str, request.output_token_ids)) for request in requests], offloading_iterations(engine)
    finally:
        engine.close()
