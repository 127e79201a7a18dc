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

from apex.cli.output import number
from evaluation.experiments.machines import IDEAL, machine_points, with_machine_totals
from evaluation.options import RunOptions, experiment_settings
from evaluation.plots.table import rows_table
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.study import Study, command

NAME = "machines"


@dataclass(frozen=True)
class Options(RunOptions):
    """Which machine with several GPUs for which model, and how: replicas of the engine or tensor parallelism, and what
    CPU attention adds. SIMULATED (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/machines.yaml. Results and provenance go to
    results/machines/<run>/. Running the same command again continues an interrupted run.
    """


COLUMNS = (
    ("machine", "machine", "s"), ("model", "model", "s"), ("in/out", "lengths", "s"), ("replicas", "arrangement", "s"),
    ("system", "system", "s"), ("tok/s", "rate", ""), ("/ GPU only", "ratio_to_gpu_only", ".2f"),
    ("all-reduce", "all_reduce_share", ".0%"), ("CPU busy", "cpu_busy_fraction", ".0%"),
)  # fmt: skip


def print_machines(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each system, machine, model, arrangement and pair of lengths; the best of a machine is bold."""
    lines = []
    for row in (row for row in rows if row["run"] != IDEAL):
        lengths = f"{row['input_len']:.0f}/{row['output_len_mean']:.0f}"
        arrangement = f"{row['replicas']} x {row['tensor_parallel']} GPU"
        lines.append({**row, "lengths": lengths, "arrangement": arrangement})
    for here in grouped(lines, "machine", "model", lambda row: f"{row['input_len']:.0f}").values():
        best = max(row["machine_tokens_per_s"] or 0.0 for row in here)
        for row in here:
            rate = number(row["machine_tokens_per_s"], ",.0f")
            row["rate"] = f"[bold]{rate}[/]" if row["machine_tokens_per_s"] == best else rate
    console.print("[bold]SIMULATED[/]: output tokens per second of the whole machine; the best of each is bold")
    console.print(rows_table(lines, COLUMNS))


EXPERIMENT = Study(
    NAME,
    lambda run, console: print_machines(run.summary, console),
    lambda options: machine_points(experiment_settings(NAME, options.config)),
    with_machine_totals,
)
main = command(Options, lambda options: [EXPERIMENT])

if __name__ == "__main__":
    sys.exit(main())
