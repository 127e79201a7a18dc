"""Validates the simulator on this machine: real runs of the torch backend beside the same runs simulated.

python evaluation/validate.py [--help]

Each engine's profile table, measured here, is all the simulator knows of the machine. Prints, per workload and system,
the measured and the simulated throughput and the error of the latter. Meant for a quiet machine: a profile measured
while it was busy makes the simulator slow, and a real run meanwhile makes it look fast.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro
from rich.console import Console
from rich.table import Table

from apex.perf_model import ProfileTable
from evaluation.experiment import Point, PointResult, run_experiment
from evaluation.fig5 import configuration, make_points
from evaluation.paths import RESULTS_DIR
from evaluation.provenance import fingerprint
from evaluation.reproduce_fig5 import Options as Fig5Options
from evaluation.reproduce_fig5 import make_plan
from evaluation.results import FlatRecord
from evaluation.simulated_point import SimulatedHardware, SimulatedTask, run_simulated_point
from evaluation.torch_point import TorchTask, run_torch_point
from swiftllm.config import EngineConfig
from swiftllm.scheduler import SchedulerLimits


@dataclass(frozen=True)
class Options:
    """Run some workloads of Figure 5 for real and simulated, and compare."""

    model: Path | None = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    systems: tuple[str, ...] = ("swiftllm", "neo", "apex")
    """Systems to validate."""
    workloads: tuple[str, ...] = ("osc", "azure-conv")
    """Workloads of configs/experiments/fig5.yaml."""
    output_len: float = 96
    """Average output length, before scaling, of workloads that sweep it."""
    num_requests: int = 24
    """Requests of every workload."""
    repeats: int = 3
    """Measure every real run so often; the median counts, and the spread says how far it is to be trusted."""
    results_dir: Path = RESULTS_DIR
    """Results go to validate/<run>/ in this folder."""


@dataclass(frozen=True)
class Machine:
    """What the simulator is told: times and limits of one engine configuration."""

    table: ProfileTable
    num_layers: int
    limits: SchedulerLimits
    dtype: str
    device: str

    @staticmethod
    def of(config: EngineConfig) -> Machine:
        """Build the engine once; its profile is measured now if there is none in the cache."""
        from apex.systems import build_system  # loads torch

        engine = build_system("apex", config)
        try:
            backend = engine.backend
            table = engine.scheduler.model.table
            return Machine(table, backend.num_layers, engine.scheduler.limits, backend.dtype_name, backend.device_name)
        finally:
            engine.close()


def simulated_twin(point: Point, machine: Machine) -> Point:
    """The same point for the simulator."""
    task: TorchTask = point.task
    model = Path(task.engine.model).name
    twin = SimulatedTask(
        system=task.system,
        hardware=SimulatedHardware(machine.device, model, machine.dtype, machine.table, machine.num_layers),
        num_gpu_blocks=task.engine.num_gpu_blocks,
        num_cpu_blocks=task.engine.num_cpu_blocks,
        lengths=task.lengths,
        limits=machine.limits,
        block_size=task.engine.block_size,
        values=task.values,
    )
    key = f"{point.key}-simulated"
    return Point(key, key, f"{point.label}, simulated", twin)


def run_point(point: Point, label: str, console: Console) -> PointResult:
    run = run_simulated_point if isinstance(point.task, SimulatedTask) else run_torch_point
    return run(point, label, console)


@dataclass(frozen=True)
class Comparison:
    """One system on one workload: output tokens per second of each real run and of the simulated one."""

    workload: str
    output_len: float
    system: str
    measured: tuple[float, ...]
    simulated: float

    @property
    def error(self) -> float:
        """By how much the simulated throughput is too high, relative to the median of the real runs."""
        return self.simulated / statistics.median(self.measured) - 1.0


def compare(summary: Sequence[FlatRecord]) -> list[Comparison]:
    """What was both measured and simulated, in the order of the summary."""
    by_place: dict[tuple[str, float, str], tuple[list[float], list[float]]] = {}
    for record in summary:
        place = (record["workload"], record["output_len"], record["system"])
        measured, simulated = by_place.setdefault(place, ([], []))
        if record["output_tokens_per_s"]:
            (simulated if record["backend"] == "simulated" else measured).append(record["output_tokens_per_s"])
    return [
        Comparison(*place, tuple(measured), simulated[0])
        for place, (measured, simulated) in by_place.items()
        if measured and simulated
    ]


def print_comparisons(comparisons: Sequence[Comparison], machine: str, console: Console) -> None:
    table = Table(title=f"Output tokens/s on {machine}: measured and SIMULATED", title_justify="left")
    for title in ("workload", "out", "system", "measured", "spread", "SIMULATED", "error"):
        table.add_column(title, justify="left" if title in ("workload", "system") else "right", no_wrap=True)
    by_system: dict[str, list[float]] = {}
    for item in comparisons:
        table.add_row(
            item.workload,
            f"{item.output_len:.0f}",
            item.system,
            f"{statistics.median(item.measured):.1f}",
            f"{min(item.measured):.1f}-{max(item.measured):.1f}",
            f"{item.simulated:.1f}",
            f"{item.error:+.1%}",
        )
        by_system.setdefault(item.system, []).append(abs(item.error))
    console.print(table)
    means = ", ".join(f"{system} {statistics.fmean(values):.1%}" for system, values in by_system.items())
    console.print(f"mean absolute error: {means}", highlight=False)


def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, whatever the errors are."""
    console = Console()
    wanted = Fig5Options(
        model=options.model,
        systems=options.systems,
        workloads=options.workloads,
        num_requests=options.num_requests,
        output_lens=(options.output_len,),
        repeats=options.repeats,
    )
    try:
        plan = make_plan(wanted)
        real = make_points(plan)
    except (ValueError, FileNotFoundError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    # Each repeat is a record of its own: their spread is part of the answer.
    real = [replace(point, group=point.key) for point in real]
    machines = {config: Machine.of(config) for config in dict.fromkeys(point.task.engine for point in real)}
    twins: dict[tuple[str, str], Point] = {}
    for point in real:
        what = (point.task.lengths.digest(), point.task.system)
        twins.setdefault(what, simulated_twin(point, machines[point.task.engine]))
    described = {
        **configuration(plan, real),
        "experiment": "validate",
        # A run simulated from other tables is another run.
        "profiles": [fingerprint(asdict(machine.table)) for machine in machines.values()],
    }
    points = [*real, *twins.values()]
    outcome = run_experiment("validate", described, points, run_point, options.results_dir, console)
    comparisons = compare(outcome.summary)
    if comparisons:
        print_comparisons(comparisons, machines[real[0].task.engine].device, console)
    for label in outcome.failed:
        console.print(f"failed: {label}", style="bold red", highlight=False, markup=False)
    console.print(f"summary, raw records and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
