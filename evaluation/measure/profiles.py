"""Profiles of this machine: what a simulation of it rests on, and how far they predict what they do not hold."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface
from evaluation.drivers import SimulatedHardware, SimulatedTask, TorchTask
from swiftllm.config import EngineConfig
from swiftllm.scheduling.admission import SchedulerLimits

if TYPE_CHECKING:
    from evaluation.measure.live_systems import LaunchedTask
    from swiftllm.runtime.torch_backend import TorchBackend


FRESH_S = 5.0
"""Maximum age (seconds) at which the profile after one run is reused as the profile before the next."""


@dataclass(frozen=True)
class ProfiledMachine:
    """The simulator's input: times and limits of one engine configuration on this machine."""

    table: ProfileTable
    num_layers: int
    limits: SchedulerLimits
    dtype: str
    device: str


def simulated_twin(task: TorchTask | LaunchedTask, machine: ProfiledMachine) -> SimulatedTask:
    """What a measured point runs, for the simulator, on the times of ``machine``."""
    engine = task.engine
    model = Path(engine.model).name
    return SimulatedTask(
        system=task.system,
        hardware=SimulatedHardware(machine.device, model, machine.dtype, machine.table, machine.num_layers),
        num_gpu_blocks=engine.num_gpu_blocks,
        num_cpu_blocks=engine.num_cpu_blocks,
        lengths=task.lengths,
        limits=machine.limits,
        block_size=engine.block_size,
        values=task.values,
    )


@dataclass(frozen=True)
class OperationError:
    """Predicted over measured seconds minus 1, at sizes that are not in the table."""

    operation: str
    sizes: int
    median: float
    p90: float
    bias: float
    """The signed median: positive where the table predicts too slow a time."""


class MachineProfiles:
    """Measures profiles before and after runs. The profile after a run also serves as the one before the next run."""

    def __init__(self) -> None:
        self._last: tuple[EngineConfig, float, ProfiledMachine] | None = None

    def profile_before(self, config: EngineConfig) -> ProfiledMachine:
        if self._last is not None:
            last_config, taken_s, machine = self._last
            if last_config == config and time.monotonic() - taken_s < FRESH_S:
                return machine
        return self.profile_after(config)

    def profile_after(self, config: EngineConfig) -> ProfiledMachine:
        machine = measure_machine(config)
        self._last = (config, time.monotonic(), machine)
        return machine


@contextmanager
def idle_backend(config: EngineConfig) -> Iterator[TorchBackend]:
    """A backend that does nothing, with the worker thread of a serving engine."""
    from swiftllm.runtime.torch_backend import open_torch_backend
    from swiftllm.runtime.workers import CpuWorker  # torch is loaded only where something really runs

    backend = open_torch_backend(config, CpuWorker)
    try:
        yield backend
    finally:
        backend.close()


def measure_machine(config: EngineConfig) -> ProfiledMachine:
    from apex.perf.profile_cache import measure_profile
    from swiftllm.runtime.build import scheduler_limits

    with idle_backend(config) as backend:
        table, limits = measure_profile(config, backend), scheduler_limits(config, backend)
        return ProfiledMachine(table, backend.num_layers, limits, backend.dtype_name, backend.device_name)


def mean_machine(first: ProfiledMachine, second: ProfiledMachine) -> ProfiledMachine:
    """The mean of two profiles of one machine, since its speed drifts by the second with the other work on it."""
    return replace(first, table=mean_table(first.table, second.table))


def mean_table(first: ProfileTable, second: ProfileTable) -> ProfileTable:
    parts = {field.name: getattr(first, field.name) for field in fields(first)}
    for name, value in parts.items():
        if name != "identity":
            parts[name] = _mean(value, getattr(second, name))
    return ProfileTable(**parts)


def _mean(
    first: Curve | Surface | float | None, second: Curve | Surface | float | None
) -> Curve | Surface | float | None:
    if first is None or second is None:
        return None
    if isinstance(first, Surface):
        return Surface(first.firsts, tuple(map(_mean, first.curves, second.curves)))
    if isinstance(first, Curve):
        return Curve(first.sizes, tuple(map(_mean, first.seconds, second.seconds)))
    return (first + second) / 2


# -- operation by operation -------------------------------------------------------------------------------------------


def operation_errors(config: EngineConfig) -> list[OperationError]:
    """Profile the machine at the table's sizes and at held-out sizes in the same rounds; predict the held-out ones."""
    from apex.perf.profile_cache import make_workbench, profile_identity
    from apex.perf.profiler import SizeGrid, measure_seconds, table_from_seconds

    others = SizeGrid(
        linear_tokens=(3, 6, 12, 20, 40, 80, 112, 160, 224, 384, 768),
        sampled_rows=(3, 6, 12, 24, 48, 96),
        swapped_blocks=(4, 16),
        prefill_tokens=(8, 24, 48, 96, 192, 384),
        prefill_cached=(0, 64, 512),
        prefill_chunks_counts=(2, 4, 16),
        decode_requests=(2, 8, 32),
        decode_contexts=(64, 256, 1024),
        iteration_requests=(8, 32, 128),
    )
    with idle_backend(config) as backend:
        bench = make_workbench(config, backend)
        known, held_out = measure_seconds(bench, config.max_num_batched_tokens, SizeGrid(), others)
        model = PerfModel(table_from_seconds(known, profile_identity(config, backend)), backend.num_layers)
    errors = []
    for operation, predict in predictions(model).items():
        sizes = [size for size in held_out[operation] if size not in known[operation]]
        if sizes:
            relative = [predict(size) / held_out[operation][size] - 1.0 for size in sizes]
            errors.append(operation_error(operation, relative))
    return errors


def operation_error(operation: str, relative: Sequence[float]) -> OperationError:
    absolute = sorted(map(abs, relative))
    p90 = absolute[round(0.9 * (len(absolute) - 1))]
    return OperationError(operation, len(relative), statistics.median(absolute), p90, statistics.median(relative))


def predictions(model: PerfModel) -> dict[str, Callable]:
    """Seconds by size, for the operations of the profiler's grid."""
    return {
        "linear": model.linear_s,
        "first": model.first_stage_s,
        "last": model.last_stage_s,
        "prefill_attention": lambda size: model.prefill_attention_s([size]),
        "prefill_attention_cpu_tier": lambda size: model.prefill_attention_s([size], [size]),
        "prefill_chunks": lambda size: model.prefill_attention_s([(size[1], 0)] * size[0]),
        "gpu_attention": lambda size: model.gpu_attention_s(size[0], size[0] * size[1]),
        "cpu_attention": lambda size: model.cpu_attention_s(size[0], size[0] * size[1]),
        "swap": model.swap_s,
        "iteration": model.host_work_s,
    }
