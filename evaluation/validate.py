"""Validates the simulator on this machine: real runs of the torch backend beside the same runs simulated.

python evaluation/validate.py [--help]

A profile table measured right before each real run is all the simulator knows of the machine. Prints, per workload and
system, the measured and the SIMULATED throughput and the error of the latter.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro
from rich.console import Console
from rich.table import Table

from apex.perf_model import ProfileTable
from evaluation.experiment import Point, PointResult, run_experiment
from evaluation.fig5 import configuration, make_points
from evaluation.paths import RESULTS_DIR
from evaluation.reproduce_fig5 import Options as Fig5Options
from evaluation.reproduce_fig5 import make_plan
from evaluation.results import FlatRecord
from evaluation.simulated_point import SimulatedHardware, SimulatedTask, run_simulated_point
from evaluation.torch_point import TorchTask, run_torch_point
from swiftllm.config import EngineConfig
from swiftllm.scheduler import SchedulerLimits

if TYPE_CHECKING:
    from swiftllm.engine import Engine


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
    repeats: int = 2
    """Profile, run and simulate everything so often; the median error counts, the spread tells how steady it is."""
    results_dir: Path = RESULTS_DIR
    """Results go to validate/<run>/ in this folder."""


@dataclass(frozen=True)
class Machine:
    """What the simulator is told of the machine: the times and limits of one engine configuration."""

    table: ProfileTable
    num_layers: int
    limits: SchedulerLimits
    dtype: str
    device: str


def start_measured(system: str, config: EngineConfig) -> tuple[Engine, Machine]:
    """Profile the machine afresh and build the system with that very table.

    A machine's speed drifts by the minute with whatever else runs on it: a profile of another hour says little.
    """
    from apex.systems import build_system, measure_profile  # loads torch

    probe = build_system("apex", config)  # a profile wants the worker thread that serves; swiftllm has none
    try:
        backend = probe.backend
        table = measure_profile(config, backend)
        machine = Machine(table, backend.num_layers, probe.scheduler.limits, backend.dtype_name, backend.device_name)
    finally:
        probe.close()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        table.save(path)
        return build_system(system, config, profile=path), machine


def run_pair(point: Point, label: str, console: Console) -> PointResult:
    """The real run, with the simulated one's figures under ``simulated_*`` names."""
    machines = []

    def build(system: str, config: EngineConfig) -> Engine:
        engine, machine = start_measured(system, config)
        machines.append(machine)
        return engine

    real = run_torch_point(point, label, console, build)
    (machine,) = machines
    simulated = run_simulated_point(simulated_twin(point, machine), f"{label}, simulated", console)
    rate, simulated_rate = (result.values["output_tokens_per_s"] for result in (real, simulated))
    values = {
        **real.values,
        "simulated_output_tokens_per_s": simulated_rate,
        "simulated_error": simulated_rate / rate - 1.0 if rate and simulated_rate else None,
    }
    details = {**real.details, "profile": asdict(machine.table), "simulated": dict(simulated.values)}
    return PointResult(values, real.records, details)


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
    return replace(point, task=twin)


def print_comparison(summary: Sequence[FlatRecord], console: Console) -> None:
    """``summary`` has a record for each pair of runs, repeats one by one."""
    by_place: dict[tuple[str, float, str], list[FlatRecord]] = {}
    for record in summary:
        if record["simulated_error"] is not None:
            by_place.setdefault((record["workload"], record["output_len"], record["system"]), []).append(record)
    table = Table(title="Output tokens/s of this machine: measured and SIMULATED", title_justify="left")
    for title in ("workload", "out", "system", "measured", "SIMULATED", "error", "spread"):
        table.add_column(title, justify="left" if title in ("workload", "system") else "right", no_wrap=True)
    by_system: dict[str, list[float]] = {}
    for (workload, output_len, system), records in by_place.items():
        errors = [record["simulated_error"] for record in records]
        table.add_row(
            workload,
            f"{output_len:.0f}",
            system,
            f"{statistics.median(record['output_tokens_per_s'] for record in records):.1f}",
            f"{statistics.median(record['simulated_output_tokens_per_s'] for record in records):.1f}",
            f"{statistics.median(errors):+.1%}",
            f"{min(errors):+.1%} to {max(errors):+.1%}",
        )
        by_system.setdefault(system, []).append(abs(statistics.median(errors)))
    console.print(table)
    means = ", ".join(f"{system} {statistics.fmean(values):.1%}" for system, values in by_system.items())
    console.print(f"mean absolute error: {means or 'nothing to compare'}", highlight=False)


def main(options: Options) -> int:
    """Returns the exit status: 0 when every run is finished, whatever the errors are."""
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
        points = [replace(point, group=point.key) for point in make_points(plan)]  # the spread is part of the answer
    except (ValueError, FileNotFoundError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    described = {**configuration(plan, points), "experiment": "validate"}
    outcome = run_experiment("validate", described, points, run_pair, options.results_dir, console)
    print_comparison(outcome.summary, console)
    for label in outcome.failed:
        console.print(f"failed: {label}", style="bold red", highlight=False, markup=False)
    console.print(f"summary, raw records, profiles and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
