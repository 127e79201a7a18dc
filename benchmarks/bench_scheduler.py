"""What scheduling costs: seconds of ``schedule()`` and ``update()`` together, per iteration, at 1,000 running requests.

The engine runs on predicted times, so the executor's work is not in the way; the scheduler is the real one. Counted is
the CPU time of its thread: it never waits, so that is its real time on a core of its own, whatever else runs here.

python benchmarks/bench_scheduler.py
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from apex.simulation import SIMULATED_SYSTEMS, build_simulated
from benchmarks.bench_simulator import NUM_LAYERS, table
from evaluation.paths import RESULTS_DIR
from evaluation.results import ResultFolder, flat_record
from swiftllm.engine import Engine
from swiftllm.request import SamplingParams
from swiftllm.vllm_scheduler import GPU_ONLY_SCHEDULERS

LIMIT_MS = 1.0
WARM_UP_ITERATIONS = 1200
ITERATIONS = 400
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Mix:
    """So many requests fit the tiers, growth included; lengths are drawn from a range."""

    name: str
    gpu_requests: int
    cpu_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


MIXES = (
    Mix("all on the GPU", 1000, 0, (200, 400), (2000, 2000)),
    Mix("GPU and CPU", 200, 800, (200, 400), (2000, 2000)),
    Mix("GPU and CPU, prompts all the time", 200, 800, (200, 400), (200, 1400)),
)


class Stopwatch:
    """Sums the CPU time of the calls it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_s = time.thread_time()
            result = call(*arguments)
            self.seconds += time.thread_time() - start_s
            return result

        return timed


def running_engine(system: str, mix: Mix) -> Engine:
    """An engine past its start, with more requests waiting; a GPU-only system has all of the mix on the GPU."""
    num_requests = mix.gpu_requests + mix.cpu_requests
    blocks_each = (mix.prompt_tokens[1] + mix.output_tokens[1]) // BLOCK_SIZE + 2
    offloads = system not in GPU_ONLY_SCHEDULERS
    engine = build_simulated(
        system,
        table(),
        NUM_LAYERS,
        num_gpu_blocks=(mix.gpu_requests if offloads else num_requests) * blocks_each,
        num_cpu_blocks=num_requests * blocks_each,
        max_num_batched_tokens=8192,
        max_num_seqs=num_requests,
    )
    draw = random.Random(0)
    for i in range(6 * num_requests):
        prompt = (0,) * draw.randint(*mix.prompt_tokens)
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=draw.randint(*mix.output_tokens)))
    for _ in range(WARM_UP_ITERATIONS):
        engine.step()
    return engine


def verdict(median_ms: float, p99_ms: float) -> str:
    if p99_ms < LIMIT_MS:
        return f"below {LIMIT_MS:g} ms"
    return f"median below {LIMIT_MS:g} ms" if median_ms < LIMIT_MS else f"NOT below {LIMIT_MS:g} ms"


def measure(system: str, mix: Mix) -> dict[str, Any]:
    engine = running_engine(system, mix)
    scheduler, stopwatch, iteration_s = engine.scheduler, Stopwatch(), []
    scheduler.schedule, scheduler.update = stopwatch.wrap(scheduler.schedule), stopwatch.wrap(scheduler.update)
    num_running, prefills_before = [], engine.stats().prefill_tokens
    for _ in range(ITERATIONS):
        stopwatch.seconds = 0.0
        engine.step()
        iteration_s.append(stopwatch.seconds)
        num_running.append(sum(map(len, scheduler.running.values())))
    median_ms, p99_ms = np.percentile(iteration_s, (50, 99)) * 1e3
    return {
        "system": system,
        "backend": "measured: scheduler cost",
        "mix": mix.name,
        "running_requests": float(np.mean(num_running)),
        **{f"running_{tier.value}": len(queue) for tier, queue in scheduler.running.items()},
        "prefill_tokens_per_iteration": (engine.stats().prefill_tokens - prefills_before) / ITERATIONS,
        "median_ms": float(median_ms),
        "p99_ms": float(p99_ms),
        "verdict": verdict(median_ms, p99_ms),
    }


def main() -> None:
    configuration = {
        "benchmark": "scheduler",
        "mixes": [asdict(mix) for mix in MIXES],
        "iterations": ITERATIONS,
        "clock": "thread CPU time",
    }
    folder = ResultFolder("scheduler", configuration | {"date": time.ctime()}, RESULTS_DIR)
    folder.note_invocation()
    records = []
    # A process for each case, as an engine has one to itself.
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh, max_tasks_per_child=1) as pool:
        for mix in MIXES:
            for system in SIMULATED_SYSTEMS:
                record = flat_record(pool.submit(measure, system, mix).result())
                records.append(record)
                print(
                    f"{system:10} {mix.name:34} {record['running_gpu']:4} + {record['running_cpu']:4} running: median "
                    f"{record['median_ms']:.3f} ms, p99 {record['p99_ms']:.3f} ms: {record['verdict']}",
                    flush=True,
                )
    folder.save_summary(records)
    print(f"summary and provenance: {folder.path}")


if __name__ == "__main__":
    main()
