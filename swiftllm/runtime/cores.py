"""Ways of dividing this machine's cores between the lane and the CPU attention worker."""

from __future__ import annotations

import os
from dataclasses import dataclass

from swiftllm.config import EngineConfig
from swiftllm.machine import usable_cores


@dataclass(frozen=True)
class CoreDivision:
    """Threads of the lane and of the CPU attention worker."""

    lane_threads: int
    cpu_threads: int
    reason: str
    """Why so many, for people."""

    def describe_lane(self) -> str:
        return f"{counted(self.lane_threads)} ({self.reason})"


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def most_lane_threads(cores: int) -> int:
    """As many as there are cores, unless OMP_NUM_THREADS asks for fewer: the lane computes in OpenMP threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(cores, int(asked))) if asked.isdigit() else cores


def core_divisions(config: EngineConfig, *, lane_on_cpu: bool) -> list[CoreDivision]:
    """The divisions to choose from, the one with most lane threads first; a single one if there is no choice.

    A lane on a CPU has all cores, half of them or a quarter, since its linear layers are mostly the larger part of the
    work. The worker has the rest. If the lane has all cores, the worker has them too: each sleeps while it waits for
    the other, and the system schedules the excess threads. OMP_NUM_THREADS, if set, bounds the lane.
    Each rank of several divides an equal share of the cores.
    """
    cores = max(1, usable_cores() // config.tensor_parallel)
    if not lane_on_cpu:
        lanes, reason = [1], "a GPU computes it"
    elif config.lane_threads is not None:
        lanes, reason = [config.lane_threads], "as asked for"
    else:
        most = most_lane_threads(cores)
        lanes = [min(most, part) for part in (cores, cores // 2, cores // 4)]
        reason = "one for every core" if most == cores else "as OMP_NUM_THREADS has it"
    return [
        CoreDivision(lane, config.cpu_threads or (cores - lane if lane < cores else cores), reason)
        for lane in dict.fromkeys(max(1, lane) for lane in lanes)
    ]
