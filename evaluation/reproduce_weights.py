"""What 4-bit weights, streamed weights and the CPU tier of KV cache give on small cards, SIMULATED.

python evaluation/reproduce_weights.py [--help]
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
from evaluation.experiments.options import RunOptions, experiment_settings
from evaluation.experiments.placements.points import make_weight_points, with_gains
from evaluation.experiments.runner import Point, Run
from evaluation.figures.placements.weights import draw_weights
from evaluation.figures.style import show_figure
from evaluation.results.folder import FlatRecord

NAME = "weights"


@dataclass(frozen=True)
class Options(RunOptions):
    """Models in 16 and 4 bits on cards that hold them or not, with and without the CPU tier of KV cache. SIMULATED
    (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/weights.yaml. Results, figure and provenance go to
    results/weights/<run>/. Running the same command again continues an interrupted run.
    """


def print_weights(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each machine, model, weights, lengths and run."""
    lines = [
        (
            row["gpu"],
            row["host"],
            row["model"],
            row["weights"],
            row["mean_lengths"].replace(" in, ", "/").replace(" out", ""),
            row["run"],
            number(row["output_tokens_per_s"], ",.1f"),
            number(row["ratio_to_gpu_only"], ".2f"),
            number(row["gpu_busy_fraction"], ".0%"),
            row["placement"],
        )
        for row in rows
    ]
    titles = ("GPU", "host", "model", "weights", "in/out", "run", "tok/s", "/ GPU-only", "GPU busy", "placed")
    console.print("[bold]SIMULATED[/]: output tokens per second; 4-bit products are as fast as assumed")
    console.print("placed: boundaries that are resident / streamed / on the CPU")
    console.print(table(titles, lines, left=("GPU", "host", "model", "weights", "in/out", "run", "placed")))


def show(run: Run, console: Console) -> None:
    print_weights(run.summary, console)
    show_figure(draw_weights(run.summary), run.folder, console)


def points(options: Options) -> Sequence[Point]:
    made, refused = make_weight_points(experiment_settings(NAME, options.config))
    for reason in refused:
        stdout_console().print(f"not possible: {reason}", soft_wrap=True)
    return made


EXPERIMENT = Experiment(NAME, show, points, with_gains)
main = command(Options, lambda options: [EXPERIMENT])

if __name__ == "__main__":
    sys.exit(main())
