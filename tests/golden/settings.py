"""Throughput and latency of every system on six predicted machines, to the bit."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console

from apex.simulator.paper_settings import load_setting
from apex.strategy import StrategyConfig
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedTask, run_simulated_point
from swiftllm.core.request import ServiceClass
from tests.golden.plans import GPU_ONLY

FIELDS = (
    "output_tokens_per_s", "per_token_latency_s_mean", "ttft_s_p99", "tpot_s_p99", "makespan_s", "iterations",
    "preemptions", "swapped_blocks", "completed", "failed",
)  # fmt: skip
SLOW_CPU_GB_S = 20.0


def lengths(number: int, prompts: tuple[int, int], outputs: tuple[int, int], rate: float = 0.0) -> Lengths:
    """``number`` requests drawn from both ranges: all at once, or ``rate`` a second with two classes."""
    rng, at_s, rows = random.Random(number), 0.0, []
    for _ in range(number):
        row = TraceRow(rng.randint(*prompts), rng.randint(*outputs), at_s)
        if rate:
            at_s += rng.expovariate(rate)
            row = replace(row, service_class=rng.choice(list(ServiceClass)))
        rows.append(row)
    return Lengths(WorkloadSpec("golden", number), "golden", Origin("fitted", "for tests"), tuple(rows))


def _all_served(task: SimulatedTask) -> SimulatedTask:
    return task if task.system in GPU_ONLY else replace(task, strategy=StrategyConfig(disable_admission_control=True))


def _a10(system: str) -> SimulatedTask:
    return _all_served(simulated_task(load_setting("apex-a10"), system, lengths(40, (200, 1500), (10, 80))))


def _t4(system: str) -> SimulatedTask:
    return _all_served(simulated_task(load_setting("apex-t4"), system, lengths(40, (50, 300), (10, 40))))


def _small_cpu_tier(system: str) -> SimulatedTask:
    return replace(_a10(system), num_cpu_blocks=800, num_gpu_blocks=1000)


def _slow_cpu(system: str) -> SimulatedTask:
    setting = replace(load_setting("apex-a10"), cpu_bandwidth_gb_s=SLOW_CPU_GB_S)
    return _all_served(simulated_task(setting, system, lengths(40, (200, 1500), (10, 80))))


def _mixed(system: str) -> SimulatedTask:
    return simulated_task(load_setting("apex-a10"), system, lengths(60, (200, 1500), (10, 80), rate=6.0))


def _tight(system: str) -> SimulatedTask:
    task = replace(_mixed(system), num_gpu_blocks=500)
    return task if system in GPU_ONLY else replace(task, strategy=StrategyConfig(ttft_slo_s=1.3, tpot_slo_s=0.08))


SETTINGS = {
    "a10": _a10, "t4": _t4, "small-cpu-tier": _small_cpu_tier, "slow-cpu": _slow_cpu, "mixed": _mixed, "tight": _tight,
}  # fmt: skip


def applies(system: str, setting: str) -> bool:
    """A slow CPU changes nothing for those that never decode there."""
    return setting != "slow-cpu" or system not in (*GPU_ONLY, "sarathi")


def row(system: str, setting: str) -> Mapping[str, Any]:
    point = Point(setting, setting, setting, SETTINGS[setting](system))
    values = run_simulated_point(point, setting, Console(file=io.StringIO())).values
    return {name: values[name] for name in FIELDS}
