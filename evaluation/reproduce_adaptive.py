"""Compares the scheduler `adaptive` with the papers' schedulers on 25 simulated cases.

python evaluation/reproduce_adaptive.py [--quick] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from apex.environment import PACKAGES, use_environment

    use_environment(*PACKAGES)

from typing import Annotated, Literal

import tyro
from rich.table import Table

from apex.cli.output import number, stdout_console, table
from apex.cli.parser import parse_options
from evaluation.experiments.adaptive_cases import make_case_points, with_ratios
from evaluation.experiments.options import Folder, Names, experiment_settings
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import print_error, run_experiment
from evaluation.experiments.simulated_sweeps import describe_simulated_points
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR
from swiftllm.machine import usable_cores

NAME = "adaptive"
COLUMNS = (
    ("case", "case", "s"),
    ("system", "system", "s"),
    ("tok/s", "output_tokens_per_s", ".1f"),
    ("over best", "ratio_to_best_published", ".3f"),
    ("of bound", "fraction_of_bound", ".2f"),
    ("TTFT p50", "ttft_s_p50", ".1f"),
    ("p99 (s)", "ttft_s_p99", ".1f"),
    ("TPOT p50", "tpot_s_p50", ".3f"),
    ("p99 (s)", "tpot_s_p99", ".3f"),
    ("lane", "lane_busy_fraction", ".0%"),
    ("CPU", "cpu_busy_fraction", ".0%"),
)


@dataclass(frozen=True)
class Options:
    """Throughput of the scheduler `adaptive` beside the papers' schedulers, SIMULATED (predicted times, no GPU needed).

    The cases come from configs/experiments/adaptive.yaml. Results and provenance go to results/adaptive/<run>/. Running
    the same command again continues an interrupted run.
    """

    cases: Names = None
    """Cases to run; by default all of the experiment file."""
    systems: Names = None
    """Systems to compare, in this order; by default those of the experiment file."""
    quick: bool = False
    """Fewer requests in every case: a minute instead of some, but mostly filling and draining."""
    kernel: str | None = None
    """CPU attention kernel of every system: native, ispc or llamafile; by default the one of the system's paper."""
    hand_over_us: float = 0.0
    """What submitting a ticket to the CPU worker costs the lane, in microseconds."""
    without: Literal["prompt-chunks", "free-running", "lockstep"] | None = None
    """Switch off one of the ideas of adaptive, to see what it is worth."""
    seed: int = 0
    """Seed of the lengths."""
    jobs: int | None = None
    """Points to run in parallel; by default one per usable core. The results do not depend on it."""
    trace_dir: Folder = None
    """Folder with trace files, searched before the cache."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Experiment file to use instead of configs/experiments/adaptive.yaml."""
    results_dir: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = RESULTS_DIR
    """Results go to adaptive/<run>/ in this folder."""


def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    console = stdout_console()
    try:
        settings = experiment_settings(NAME, options.config)
        points = make_case_points(
            settings,
            cases=options.cases,
            systems=options.systems,
            quick=options.quick,
            kernel=options.kernel,
            hand_over_us=options.hand_over_us,
            without=options.without,
            seed=options.seed,
            trace_dir=options.trace_dir,
        )
    except (ValueError, FileNotFoundError) as error:
        print_error(error, console)
        return 2
    described = {"experiment": NAME, "simulated": describe_simulated_points(points)}
    complete = with_ratios(settings["published"])
    jobs = options.jobs or usable_cores()
    outcome = run_experiment(NAME, described, points, run_point, options.results_dir, console, jobs, complete)
    if outcome.summary:
        console.print("\nSIMULATED; over best: throughput over the best of " + ", ".join(settings["published"]))
        console.print(results_table(outcome.summary))
    return outcome.print_outcome(console)


def results_table(summary: Sequence[FlatRecord]) -> Table:
    rows = [tuple(number(record[field], form) for _, field, form in COLUMNS) for record in summary]
    return table([title for title, _, _ in COLUMNS], rows, left=("case", "system"))


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
