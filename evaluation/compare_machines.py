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
from apex.cli.parser import parse_options
from evaluation.experiments.experiment import Experiment, show_again
from evaluation.experiments.machines import IDEAL, make_machine_points, with_machine_totals
from evaluation.experiments.options import File, FromFolder, Jobs, ResultsDir, experiment_settings
from evaluation.experiments.runner import one_line_errors
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR

NAME = "machines"


@dataclass(frozen=True)
class Options:
    """Which machine with several GPUs for which model, and how: replicas of the engine or tensor parallelism, and what
    CPU attention adds. SIMULATED (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/machines.yaml. Results and provenance go to
    results/machines/<run>/. Running the same command again continues an interrupted run.
    """

    jobs: Jobs = None
    config: File = None
    """Experiment file to use instead of configs/experiments/machines.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to machines/<run>/ in this folder."""
    from_folder: FromFolder = None
    """Run nothing; print again from the summary.json of this result folder."""


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


EXPERIMENT = Experiment(NAME, lambda run, console: print_machines(run.summary, console), with_machine_totals)


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    if options.from_folder is not None:
        return show_again(options.from_folder, [EXPERIMENT])
    points, refused = make_machine_points(experiment_settings(NAME, options.config))
    return EXPERIMENT.run(points, options.results_dir, stdout_console(), options.jobs, refused=refused)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
