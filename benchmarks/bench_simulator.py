"""Measures the speed of the simulator: iterations per second with 32 layers, and the shares of its parts.

python benchmarks/bench_simulator.py [--help]
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from apex.cli.options import parse_options
from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from evaluation.results.folder import ResultFolder, flat_record, markdown_table
from evaluation.results.paths import RESULTS_DIR
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.systems import systems

NUM_LAYERS = 32
ITERATIONS = 1000
# (requests the GPU tier holds, requests the CPU tier holds); contexts of some thousand tokens.
SIZES = ((16, 64), (64, 256), (200, 800))
PARTS = ("plan", "run", "apply")  # what makes up the time of a step
COLUMNS = (
    ("system", "system", "{}"),
    ("gpu_requests", "requests on the GPU", "{}"),
    ("cpu_requests", "requests on the CPU", "{}"),
    ("iterations_per_s", "iterations/s", "{:.0f}"),
    ("plan_share", "in plan", "{:.0%}"),
    ("run_share", "in run", "{:.0%}"),
    ("apply_share", "in apply", "{:.0%}"),
)


@dataclass(frozen=True)
class Options:
    """Measure how fast every system is simulated, at three sizes; takes about two minutes."""

    results_dir: Path = RESULTS_DIR
    """Results go to bench_simulator/<run>/ in this folder."""


def example_table() -> ProfileTable:
    """Times similar to those of an 8B model on an A10-class card; only their proportions matter."""

    def over_context(token_s: float) -> Surface:
        return Surface((1, 2), (Curve((0, 1000), (1e-6, 1000 * token_s)), Curve((0, 1000), (1e-6, 2000 * token_s))))

    return ProfileTable(
        identity={},
        linear=Curve((1, 128, 512), (8e-4, 9e-4, 3e-3)),
        ends=Curve((1, 256), (1e-3, 2e-3)),
        swap=Curve((1, 32), (2e-4, 6e-3)),
        prefill_attention=Surface((1, 512), (Curve((0, 1024), (1e-5, 3e-5)), Curve((0, 1024), (3e-4, 9e-4)))),
        gpu_attention=over_context(7e-9),
        cpu_attention=over_context(4e-8),
    )


def running_engine(system: str, num_gpu: int, num_cpu: int) -> Engine:
    """An engine past its prefills, with more requests waiting."""
    engine = build_simulated(
        system,
        example_table(),
        NUM_LAYERS,
        num_gpu_blocks=num_gpu * 80,
        num_cpu_blocks=num_cpu * 80,
        max_num_batched_tokens=2048,
        max_num_seqs=num_gpu + num_cpu,
        strategy=StrategyConfig(disable_admission_control=True),  # all requests come at once
    )
    for i in range(2 * (num_gpu + num_cpu)):
        engine.add(engine.make_request(str(i), (0,) * 900, SamplingParams(max_tokens=2000)))
    while engine.stats().output_tokens < num_gpu + num_cpu // 4:
        engine.step()
    return engine


def measure(system: str, num_gpu: int, num_cpu: int) -> dict[str, Any]:
    """Iterations per second of real time, and the shares of scheduler, executor and bookkeeping in a profiled run."""
    engine = running_engine(system, num_gpu, num_cpu)
    start_s = time.perf_counter()
    for _ in range(ITERATIONS):
        engine.step()
    seconds = time.perf_counter() - start_s
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(ITERATIONS // 10):
        engine.step()
    profiler.disable()
    times = pstats.Stats(profiler).stats  # by file, line and name

    def cumulative_s(function: Callable[..., Any]) -> float:
        code = function.__code__
        return times[code.co_filename, code.co_firstlineno, code.co_name][3]

    functions = type(engine.scheduler).plan, type(engine.executor).run, type(engine.state).apply
    step_s = cumulative_s(type(engine).step)
    shares = {f"{name}_share": cumulative_s(part) / step_s for name, part in zip(PARTS, functions, strict=True)}
    return {
        "system": system,
        "backend": "measured: simulator speed",
        "model": f"{NUM_LAYERS} layers",
        "gpu_requests": num_gpu,
        "cpu_requests": num_cpu,
        "iterations_per_s": ITERATIONS / seconds,
        "wall_s": seconds,
        **shares,
    }


def main(options: Options) -> None:
    """Measure, print, save."""
    configuration = {"benchmark": "simulator", "sizes": SIZES, "iterations": ITERATIONS, "date": time.ctime()}
    folder = ResultFolder("bench_simulator", configuration, options.results_dir)
    folder.record_invocation()
    records = []
    for num_gpu, num_cpu in SIZES:
        for system in systems():
            record = flat_record(measure(system, num_gpu, num_cpu))
            records.append(record)
            spent = ", ".join(f"{name} {record[f'{name}_share']:.0%}" for name in PARTS)
            rate = record["iterations_per_s"]
            print(f"{system:10} {num_gpu:4} + {num_cpu:4} requests: {rate:6.0f} iterations/s; {spent}", flush=True)
    folder.save_summary(records, markdown_table(records, COLUMNS))
    print(f"summary and provenance: {folder.path}")


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_simulator.py"))
