"""Ways of dividing this machine's cores between the GPU batch and the CPU attention worker."""

from __future__ import annotations

import os
from dataclasses import dataclass

from swiftllm.config import EngineConfig
from swiftllm.machine import allowed_cores, usable_cores
from swiftllm.topology import count_physical

SERVER_LEAVES_FROM = 4
"""Hardware threads from which on a server beside a GPU leaves two of them. With fewer, CPU attention would lose half of
its threads or all."""


@dataclass
class _Server:
    is_here: bool = False


_server = _Server()


def serve_from_here() -> None:
    """Call it before the engine is built in a process that serves: another one, the front end, shares the cores."""
    _server.is_here = True


@dataclass(frozen=True)
class CoreDivision:
    """Threads of the GPU batch and of the CPU attention worker."""

    gpu_batch_threads: int
    cpu_threads: int
    reason: str
    """Why so many, for people."""

    def gpu_batch_input(self) -> str:
        return f"{counted(self.gpu_batch_threads)} ({self.reason})"


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def most_gpu_batch_threads(cores: int) -> int:
    """As many as there are cores, unless OMP_NUM_THREADS asks for fewer: the GPU batch computes in OpenMP threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(cores, int(asked))) if asked.isdigit() else cores


def physical_cores() -> int:
    """Of those that this process may use: hardware threads of one core count once."""
    return count_physical(allowed_cores())


def core_divisions(config: EngineConfig, *, without_gpu: bool) -> list[CoreDivision]:
    """The divisions to choose from, the one with most GPU batch threads first; a single one if there is no choice.

    A GPU batch on a CPU has all cores, half of them or a quarter, since its linear layers are mostly the larger part of
    the work. The worker has the rest. If the GPU batch has all cores, the worker has them too: each sleeps while it
    waits for the other, and the system schedules the excess threads. OMP_NUM_THREADS, if set, bounds the GPU batch.

    Beside a GPU one thread launches. The worker has all other hardware threads, or leaves a physical core to that
    thread, or has half of the hardware threads: attention waits for memory, so a core's second thread may add little.
    In a server it leaves two hardware threads at least, from :data:`SERVER_LEAVES_FROM` on: its helpers spin between
    calls, and the front end and the reader of the CPU tier would take turns with them.
    Each rank of several divides an equal share of the cores.
    """
    cores = max(1, usable_cores() // config.tensor_parallel)
    if not without_gpu:
        physical = min(cores, max(1, physical_cores() // config.tensor_parallel))
        most = cores - (2 if _server.is_here and cores >= SERVER_LEAVES_FROM else 1)
        choices = [min(most, part) for part in (most, physical - 1, cores // 2)]
        workers = [config.cpu_threads] if config.cpu_threads else choices
        return [CoreDivision(1, worker, "a GPU computes it") for worker in dict.fromkeys(max(1, n) for n in workers)]
    if config.gpu_batch_threads is not None:
        gpu_batches, reason = [config.gpu_batch_threads], "as asked for"
    else:
        most = most_gpu_batch_threads(cores)
        gpu_batches = [min(most, part) for part in (cores, cores // 2, cores // 4)]
        reason = "one for every core" if most == cores else "as OMP_NUM_THREADS has it"
    return [
        CoreDivision(gpu_batch, config.cpu_threads or (cores - gpu_batch if gpu_batch < cores else cores), reason)
        for gpu_batch in dict.fromkeys(max(1, gpu_batch) for gpu_batch in gpu_batches)
    ]
