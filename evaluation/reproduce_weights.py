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

from evaluation.experiments.placements.show import draw_weights
from evaluation.options import RunOptions, experiment_settings
from evaluation.plots.style import show_figure
from evaluation.results.folder import FlatRecord
from evaluation.results.tables import rows_table
from evaluation.run import Run
from evaluation.studies.weights import weight_points, with_gains
from evaluation.study import Study, command

NAME = "weights"


@dataclass(frozen=True)
class Options(RunOptions):
    """Models in 16 and 4 bits on cards that hold them or not, with and without the CPU tier of KV cache. SIMULATED
    (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/weights.yaml. Results, figure and provenance go to
    results/weights/<run>/. Running the same command again continues an interrupted run.
    """


COLUMNS = (
    ("GPU", "gpu", "s"), ("host", "host", "s"), ("model", "model", "s"), ("weights", "weights", "s"),
    ("in/out", "mean_lengths", "s"), ("run", "run", "s"), ("tok/s", "output_tokens_per_s", ",.1f"),
    ("/ GPU-only", "ratio_to_gpu_only", ".2f"), ("GPU busy", "gpu_busy_fraction", ".0%"), ("placed", "placement", "s"),
)  # fmt: skip


def print_weights(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each machine, model, weights, lengths and run."""
    lines = [{**row, "mean_lengths": row["mean_lengths"].replace(" in, ", "/").replace(" out", "")} for row in rows]
    console.print("[bold]SIMULATED[/]: output tokens per second; 4-bit products are as fast as assumed")
    console.print("placed: stages that are resident / streamed / on the CPU")
    console.print(rows_table(lines, COLUMNS))


def show(run: Run, console: Console) -> None:
    print_weights(run.summary, console)
    show_figure(draw_weights(run.summary), run.folder, console)


EXPERIMENT = Study(NAME, show, lambda options: weight_points(experiment_settings(NAME, options.config)), with_gains)
main = command(Options, lambda options: [EXPERIMENT])

if __name__ == "__main__":
    sys.exit(main())
