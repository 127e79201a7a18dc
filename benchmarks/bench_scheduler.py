"""Measures the cost of scheduling: ``plan()``, ``observe()`` and ``apply()`` per iteration, at 1,000 running requests.

The scheduler is the real one; the engine is simulated, so that no model runs. Measured is the CPU time of the
scheduler's thread. The thread never waits, so this is its real time on an otherwise idle core. Other work on the
machine still slows it down through caches and memory.

python benchmarks/bench_scheduler.py [--help]
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import numpy as np
from rich.progress import track

from apex.cli.options import parse_options
from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from evaluation.results.folder import ResultFolder, flat_record
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.provenance import git_state
from swiftllm.core.request import SamplingParams, ServiceClass
from swiftllm.engine.engine import Engine
from swiftllm.machine import cpu_model
from swiftllm.systems import find_system, systems

LIMIT_MS = 1.0
NUM_LAYERS = 32
WARM_UP_ITERATIONS = 1200
ROUNDS = 8
ITERATIONS = 50  # per round
BLOCK_SIZE = 16
OF_TWO_CLASSES = ("omniserve", "omniserve-stepping", "sarathi")


@dataclass(frozen=True)
class Options:
    """Measure every system's scheduler, in time per iteration, with three mixes of requests; takes some minutes."""

    results_dir: Path = RESULTS_DIR
    """Results go to scheduler/<run>/ in this folder."""


@dataclass(frozen=True)
class Mix:
    """Numbers of requests that fit the tiers at full length, and the ranges from which lengths are drawn.

    With ``systems``, only those are measured, and requests beyond the first ``gpu_requests`` are best-effort ones.
    """

    name: str
    gpu_requests: int
    cpu_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    systems: tuple[str, ...] = ()


MIXES = (
    Mix("all on the GPU", 1000, 0, (200, 400), (2000, 2000)),
    Mix("GPU and CPU", 200, 800, (200, 400), (2000, 2000)),
    Mix("GPU and CPU, prompts all the time", 200, 800, (200, 400), (200, 1400)),
    Mix("400 latency-sensitive, 600 best-effort", 400, 600, (200, 400), (2000, 2000), OF_TWO_CLASSES),
)
TARGETS = StrategyConfig(tpot_slo_s=1.0, disable_admission_control=True)
"""Long enough for all requests of a mix at once."""


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


def running_engine(system: str, mix: Mix) -> Engine:
    """An engine past its warm-up, with more requests waiting; a GPU-only system has all requests on the GPU."""
    num_requests = mix.gpu_requests + mix.cpu_requests
    blocks_each = (mix.prompt_tokens[1] + mix.output_tokens[1]) // BLOCK_SIZE + 2
    offloads = find_system(system).needs_predictions
    engine = build_simulated(
        system,
        example_table(),
        NUM_LAYERS,
        num_gpu_blocks=(mix.gpu_requests if offloads else num_requests) * blocks_each,
        num_cpu_blocks=num_requests * blocks_each,
        max_num_batched_tokens=8192,
        max_num_seqs=num_requests,
        strategy=TARGETS if system in OF_TWO_CLASSES else None,
        cached_tiers=find_system(system).cached_tiers,
    )
    draw = random.Random(0)
    for i in range(6 * num_requests):
        prompt = (0,) * draw.randint(*mix.prompt_tokens)
        sampling = SamplingParams(max_tokens=draw.randint(*mix.output_tokens))
        is_best_effort = mix.systems and i >= mix.gpu_requests
        service_class = ServiceClass.BEST_EFFORT if is_best_effort else ServiceClass.LATENCY_SENSITIVE
        # A salt of its own: nothing of the prefix cache is found, and every full block gets a name.
        engine.add(engine.make_request(str(i), prompt, sampling, service_class=service_class, cache_salt=str(i)))
    for _ in range(WARM_UP_ITERATIONS):
        engine.step()
    return engine


class Case:
    """A running engine in a separate process, as in production."""

    def __init__(self, system: str, mix: Mix) -> None:
        self.system, self.mix = system, mix
        self.rounds: list[dict[str, list[float]]] = []
        self._process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def start(self) -> None:
        self._process.submit(_start, self.system, self.mix).result()

    def run_round(self) -> None:
        self.rounds.append(self._process.submit(_run_round).result())

    def close(self) -> None:
        self._process.shutdown()


def _start(system: str, mix: Mix) -> None:
    global _engine
    _engine = running_engine(system, mix)


def _run_round() -> dict[str, list[float]]:
    """Per iteration: seconds of scheduling, running requests of each tier, computed prompt tokens."""
    scheduler, state, stopwatch = _engine.scheduler, _engine.state, Stopwatch()
    plan, observe, apply = scheduler.plan, scheduler.observe, state.apply
    scheduler.plan, scheduler.observe, state.apply = map(stopwatch.wrap, (plan, observe, apply))
    values: dict[str, list[float]] = {"seconds": [], "gpu": [], "cpu": [], "prefill_tokens": []}
    for _ in range(ITERATIONS):
        stopwatch.seconds, prefills_before = 0.0, _engine.stats().prompt_tokens
        _engine.step()
        values["seconds"].append(stopwatch.seconds)
        for tier, queue in state.running.items():
            values[tier.value].append(len(queue))
        values["prefill_tokens"].append(_engine.stats().prompt_tokens - prefills_before)
    scheduler.plan, scheduler.observe, state.apply = plan, observe, apply
    return values


def verdict(median_ms: float, p99_ms: float) -> str:
    if p99_ms < LIMIT_MS:
        return f"below {LIMIT_MS:g} ms"
    return f"median below {LIMIT_MS:g} ms" if median_ms < LIMIT_MS else f"NOT below {LIMIT_MS:g} ms"


def summarise(case: Case) -> dict[str, Any]:
    """Figures over the iterations of all rounds. The range of the rounds' medians shows how steady the machine was."""
    values = {name: [value for one in case.rounds for value in one[name]] for name in case.rounds[0]}
    median_ms, p99_ms = np.percentile(values["seconds"], (50, 99)) * 1e3
    medians_ms = [float(np.median(one["seconds"])) * 1e3 for one in case.rounds]
    running_gpu, running_cpu = float(np.mean(values["gpu"])), float(np.mean(values["cpu"]))
    return {
        "system": case.system,
        "backend": "measured: scheduler cost",
        "mix": case.mix.name,
        "running_requests": running_gpu + running_cpu,
        "running_gpu": running_gpu,
        "running_cpu": running_cpu,
        "prefill_tokens_per_iteration": float(np.mean(values["prefill_tokens"])),
        "median_ms": float(median_ms),
        "p99_ms": float(p99_ms),
        "best_round_median_ms": min(medians_ms),
        "worst_round_median_ms": max(medians_ms),
        "verdict": verdict(median_ms, p99_ms),
    }


COLUMNS = ("mix", "system", "GPU + CPU running", "median ms", "p99 ms", "medians of rounds", "verdict")


def cells(record: dict[str, Any]) -> tuple[str, ...]:
    return (
        record["mix"],
        record["system"],
        f"{record['running_gpu']:.0f} + {record['running_cpu']:.0f}",
        f"{record['median_ms']:.3f}",
        f"{record['p99_ms']:.3f}",
        f"{record['best_round_median_ms']:.3f} to {record['worst_round_median_ms']:.3f}",
        record["verdict"],
    )


def main(options: Options) -> None:
    """Measure, print, save."""
    configuration = {
        "benchmark": "scheduler",
        "mixes": [asdict(mix) for mix in MIXES],
        "warm_up_iterations": WARM_UP_ITERATIONS,
        "rounds": ROUNDS,
        "iterations": ITERATIONS,
        "clock": "thread CPU time",
    }
    folder = ResultFolder("scheduler", configuration | {"date": time.ctime()}, options.results_dir)
    folder.record_invocation()
    state = git_state()
    print(f"{cpu_model()}, commit {state['commit']}{' with changes' if state['dirty'] else ''}", flush=True)
    cases = [Case(system, mix) for mix in MIXES for system in mix.systems or systems()]
    try:
        for case in track(cases, "starting"):
            case.start()
        for _ in track(range(ROUNDS), "rounds"):  # the cases are interleaved, so that drift affects all alike
            for case in cases:
                case.run_round()
    finally:
        for case in cases:
            case.close()
    records = [flat_record(summarise(case)) for case in cases]
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, records)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    folder.save_summary(records, table)
    print(table)
    print(f"summary and provenance: {folder.path}")


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_scheduler.py"))
