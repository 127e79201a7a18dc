"""Simulated engines with more requests than the GPU tier holds, and their timelines."""

from __future__ import annotations

import random
from dataclasses import replace

from apex.simulator.build import build_simulated
from apex.simulator.hardware_files import load_gpu, load_host, load_model_config
from apex.simulator.links import Interconnect
from apex.simulator.predicted_profile import hardware_profile
from apex.strategy import StrategyConfig
from apex.timeline.recorder import recording
from apex.timeline.spans import Timeline
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine

LAYERS = 12
LINK = Interconnect(1e10, qkv_bytes_per_row=12_288, out_bytes_per_row=8_192, latency_s=1e-5, dram_bytes_per_s=4e10)
EVERYTHING = 10**6  # iterations: more than any run here has
OVERLAP = StrategyConfig(strategy="asynchronous-overlap")


def simulated_engine(
    system: str, strategy: StrategyConfig | None = None, link: Interconnect | None = None, cpu_gb_s: float = 10
) -> Engine:
    """More requests than the GPU tier holds, of all kinds of lengths."""
    model = replace(load_model_config("llama-3.1-8b"), num_layers=LAYERS)
    table = hardware_profile(load_gpu("a10"), load_host("g5-4xlarge"), model, cpu_bandwidth_gb_s=cpu_gb_s)
    engine = build_simulated(
        system, table, LAYERS, num_gpu_blocks=60, num_cpu_blocks=800, strategy=strategy, interconnect=link
    )
    draw_number = random.Random(5)
    for index in range(24):
        lengths = draw_number.randint(1, 300), draw_number.randint(1, 40)
        engine.add(engine.make_request(str(index), (1,) * lengths[0], SamplingParams(max_tokens=lengths[1])))
    return engine


def record(engine: Engine, **window: int | None) -> Timeline:
    total = sum(request.sampling.max_tokens for request in engine.state.requests.values())
    window = {"num_iterations": EVERYTHING, **window}
    with recording(engine, **window, progress=lambda: engine.stats().output_tokens / total) as recorder:
        while engine.has_unfinished():
            engine.step()
    return recorder.timeline(engine.describe()["system"], "here", simulated=True)
