"""Compares ways to run a model on a machine with several GPUs: replicas, tensor parallelism, CPU attention.

python evaluation/compare_machines.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

from apex.cli.output import number, stdout_console, table
from evaluation.experiments.experiment import Experiment, command
from evaluation.experiments.machines import IDEAL, make_machine_points, with_machine_totals
from evaluation.experiments.options import RunOptions, experiment_settings
from evaluation.experiments.runner import Point
from evaluation.results.folder import FlatRecord

NAME = "machines"


@dataclass(frozen=True)
class Options(RunOptions):
    """Which machine with several GPUs for which model, and how: replicas of the engine or tensor parallelism, and what
    CPU attention adds. SIMULATED (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/machines.yaml. Results and provenance go to
    results/machines/<run>/. Running the same command again continues an interrupted run.
    """


def print_machines(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each system, machine, model, arrangement and pair of lengths; the best of a machine is bold."""
    shown = [row for row in rows if row["run"] != IDEAL]
    best: dict[tuple[str, ...], float] = {}
    for row in shown:
        best[_question(row)] = max(best.get(_question(row), 0.0), row["machine_tokens_per_s"] or 0.0)
    lines = []
    for row in shown:
        rate = number(row["machine_tokens_per_s"], ",.0f")
        is_best = row["machine_tokens_per_s"] == best[_question(row)]
        lines.append(
            (
                row["machine"],
                row["model"],
                f"{row['input_len']:.0f}/{row['output_len_mean']:.0f}",
                f"{row['replicas']} x {row['tensor_parallel']} GPU",
                row["system"],
                f"[bold]{rate}[/]" if is_best else rate,
                number(row["ratio_to_gpu_only"], ".2f"),
                number(row["all_reduce_share"], ".0%"),
                number(row["cpu_busy_fraction"], ".0%"),
            )
        )
    titles = ("machine", "model", "in/out", "replicas", "system", "tok/s", "/ GPU only", "all-reduce", "CPU busy")
    console.print("[bold]SIMULATED[/]: output tokens per second of the whole machine; the best of each is bold")
    console.print(table(titles, lines, left=("machine", "model", "in/out", "replicas", "system")))


def _question(row: FlatRecord) -> tuple[str, ...]:
    return row["machine"], row["model"], f"{row['input_len']:.0f}"


def points(options: Options) -> Sequence[Point]:
    made, refused = make_machine_points(experiment_settings(NAME, options.config))
    for reason in refused:
        stdout_console().print(f"not possible: {reason}", soft_wrap=True)
    return made


EXPERIMENT = Experiment(NAME, lambda run, console: print_machines(run.summary, console), points, with_machine_totals)
main = command(Options, lambda options: [EXPERIMENT])

if __name__ == "__main__":
    sys.exit(main())
