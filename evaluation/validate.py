"""Validates the simulator on this machine: real runs of the torch backend against the same runs simulated.

python evaluation/validate.py [--help], or: apex validate

The simulator's only input about the machine is profile tables, measured right before and after each real run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console
from rich.table import Table

from apex.cli.config_file import ConfigFile, parse_command
from apex.cli.flags import SystemName
from apex.cli.output import stdout_console
from evaluation.experiments.experiment import Experiment
from evaluation.experiments.measured_sweeps import describe_measured_plan, make_measured_points
from evaluation.experiments.options import FigureOptions, make_measured_plan
from evaluation.experiments.profile_check import (
    MachineProfiles,
    OperationError,
    ProfiledMachine,
    mean_machine,
    operation_errors,
)
from evaluation.experiments.runner import Point, PointResult, Run, one_line_errors
from evaluation.experiments.simulated_point import SimulatedHardware, SimulatedTask, run_simulated_point
from evaluation.experiments.torch_point import TorchTask, run_torch_point
from evaluation.figures.validation import draw_validation
from evaluation.plots.style import save_figure
from evaluation.results.folder import FlatRecord, to_json
from evaluation.results.paths import RESULTS_DIR
from swiftllm.config import EngineConfig
from swiftllm.files import write_atomically

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

AIM = 0.1


@dataclass(frozen=True)
class Options(ConfigFile):
    """Run workloads of Figure 5 both for real and SIMULATED with this machine's own profile, and report the error.

    With the default model on two cores, each system, workload and repeat takes about 12 s. Running the same command
    again continues an interrupted run.
    """

    model: Path | None = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    systems: tuple[SystemName, ...] = ("swiftllm", "neo", "apex")
    """Systems to validate."""
    workloads: tuple[str, ...] = ("osc", "azure-conv")
    """Workloads of configs/experiments/fig5.yaml."""
    output_len: float = 96
    """Average output length (tokens, before scaling) of workloads that sweep it."""
    num_requests: int = 32
    """Number of requests of every workload."""
    repeats: int = 3
    """How many times to profile, run and simulate everything; reports the median error and its spread."""
    results_dir: Path = RESULTS_DIR
    """Results go to validate/<run>/ in this folder."""


class PairRunner:
    """Runs each point for real and simulated."""

    def __init__(self, profiles: MachineProfiles) -> None:
        self._profiles = profiles

    def run_pair(self, point: Point, label: str, console: Console) -> PointResult:
        """The result of the real run, with the figures of the simulated run under ``simulated_*`` names."""
        task: TorchTask = point.task
        before = self._profiles.profile_before(task.engine)
        real = run_torch_point(point, label, console, lambda system, config: build_profiled(system, config, before))
        machine = mean_machine(before, self._profiles.profile_after(task.engine))
        simulated = run_simulated_point(simulated_twin(point, machine), f"{label}, simulated", console)
        rate, simulated_rate = (result.values["output_tokens_per_s"] for result in (real, simulated))
        values = {
            **real.values,
            "simulated_output_tokens_per_s": simulated_rate,
            "simulated_error": simulated_rate / rate - 1.0 if rate and simulated_rate else None,
            "simulated_iterations": simulated.values["iterations"],
        }
        details = {**real.details, "profile": asdict(machine.table), "simulated": dict(simulated.values)}
        return PointResult(values, real.records, details)


def build_profiled(system: str, config: EngineConfig, machine: ProfiledMachine) -> Engine:
    """The system, with a scheduler that predicts from the table just measured."""
    from apex.systems import build_system  # imported late: it loads torch

    return build_system(system, config, profile=machine.table)


def simulated_twin(point: Point, machine: ProfiledMachine) -> Point:
    """The same point, for the simulator."""
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


# -- report -----------------------------------------------------------------------------------------------------------


def comparison(summary: Sequence[FlatRecord]) -> list[FlatRecord]:
    """A record for each workload and system: medians and the spread of errors over its pairs of runs."""
    by_place: dict[tuple, list[FlatRecord]] = {}
    for record in summary:
        if record["simulated_error"] is not None:
            by_place.setdefault((record["workload"], record["output_len"], record["system"]), []).append(record)
    compared = []
    for (workload, output_len, system), records in by_place.items():

        def median(name: str, records: Sequence[FlatRecord] = records) -> float:
            return statistics.median(record[name] for record in records)

        errors = [record["simulated_error"] for record in records]
        others = [cores for record in records if (cores := record.get("others_busy_cores")) is not None]
        compared.append(
            {
                "workload": workload,
                "output_len": output_len,
                "system": system,
                "repeats": len(records),
                "measured": median("output_tokens_per_s"),
                "simulated": median("simulated_output_tokens_per_s"),
                "error": median("simulated_error"),
                "lowest_error": min(errors),
                "highest_error": max(errors),
                "mean_absolute_error": statistics.fmean(map(abs, errors)),
                "others_busy_cores": max(others, default=None),
            }
        )
    return compared


def system_errors(compared: Sequence[FlatRecord]) -> dict[str, float]:
    """Mean absolute error of each system over its workloads and repeats."""
    by_system: dict[str, list[float]] = {}
    for record in compared:
        by_system.setdefault(record["system"], []).append(record["mean_absolute_error"])
    return {system: statistics.fmean(errors) for system, errors in by_system.items()}


def print_comparison(compared: Sequence[FlatRecord], console: Console) -> None:
    table = Table(title="Output tokens/s of this machine: measured and SIMULATED", title_justify="left")
    for title in ("workload", "out", "system", "measured", "SIMULATED", "error", "spread", "others"):
        table.add_column(title, justify="left" if title in ("workload", "system") else "right", no_wrap=True)
    for record in compared:
        others = record["others_busy_cores"]
        table.add_row(
            record["workload"],
            f"{record['output_len']:.0f}",
            record["system"],
            f"{record['measured']:.1f}",
            f"{record['simulated']:.1f}",
            f"{record['error']:+.1%}",
            f"{record['lowest_error']:+.1%} to {record['highest_error']:+.1%}",
            "-" if others is None else f"{others:.2f}",
        )
    console.print(table)
    means = ", ".join(
        f"{system} {error:.1%}" + ("" if error <= AIM else f" (above the aim of {AIM:.0%})")
        for system, error in system_errors(compared).items()
    )
    console.print(f"mean absolute error of all runs: {means or 'nothing to compare'}", highlight=False)
    console.print("others: cores that other work on this machine kept busy in the worst repeat", highlight=False)


def print_operations(errors: Sequence[OperationError], console: Console) -> None:
    table = Table(title="Profile table at sizes that were held out: predicted against measured", title_justify="left")
    for title in ("operation", "sizes", "median", "90%", "bias"):
        table.add_column(title, justify="left" if title == "operation" else "right", no_wrap=True)
    for error in errors:
        name = error.operation.replace("_", " ")
        table.add_row(name, str(error.sizes), f"{error.median:.1%}", f"{error.p90:.1%}", f"{error.bias:+.1%}")
    console.print(table)


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every run is finished, whatever the errors; 2 for invalid options."""
    wanted = FigureOptions(
        model=options.model,
        systems=options.systems,
        workloads=options.workloads,
        num_requests=options.num_requests,
        output_lens=(options.output_len,),
        repeats=options.repeats,
    )
    plan = make_measured_plan("fig5", wanted)
    # One group per repeat, since the spread is reported.
    points = [replace(point, group=point.key) for point in make_measured_points(plan)]

    def show(run: Run, console: Console) -> None:
        compared = comparison(run.summary)
        if compared:
            errors = operation_errors(points[0].task.engine)
            print_operations(errors, console)
            report = {"systems": system_errors(compared), "points": compared, "operations": [asdict(e) for e in errors]}
            write_atomically(run.folder / "comparison.json", to_json(report))
            save_figure(draw_validation(run.summary, run.machine, AIM), run.folder)
        print_comparison(compared, console)

    run_pair = PairRunner(MachineProfiles()).run_pair
    described = describe_measured_plan(plan, points)
    return Experiment("validate", show).run(
        points, options.results_dir, stdout_console(), configuration=described, run_point=run_pair
    )


def command(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; ``arguments`` are those of the process by default."""
    return main(parse_command(Options, "apex validate", sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(command())
