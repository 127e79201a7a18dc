"""Validates the simulator: real runs of the torch backend on this machine, or of vLLM elsewhere, against the same runs
simulated.

python evaluation/validate.py [--help], or: apex validate
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from apex.cli.options import ConfigFile, SystemName, parse_command
from apex.cli.output import stdout_console
from evaluation.results.paths import RESULTS_DIR
from evaluation.run import one_line_errors
from evaluation.studies.papers import FigureOptions
from evaluation.validation.judge import show_runs
from evaluation.validation.this_machine import run_pairs


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
    run: tuple[str, ...] = ()
    """Instead, predict real runs of vLLM on other cards, each from the operator tables in its folder: a folder, or a
    name in configs/groundtruth. Prints and draws measured beside SIMULATED. docs/simulator.md describes the files."""
    run_model: Path | None = None
    """Folder of the config.json of the run's model, where the model is not known by its name."""
    terms: bool = False
    """With --run: also the errors term by term, of cards in configs/hardware."""
    results_dir: Path = RESULTS_DIR
    """Results go to validate/<run>/ in this folder, those of --run to real-runs/<run>/."""


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every run is finished, whatever the errors; 2 for invalid options. With ``--run``
    1 where an error has grown, see :func:`show_runs`."""
    if options.run:
        return show_runs(
            options.run, options.run_model, options.results_dir, stdout_console(), with_terms=options.terms
        )
    if options.terms or options.run_model:
        raise ValueError("--terms and --run-model mean nothing without --run")
    wanted = FigureOptions(
        model=options.model,
        systems=options.systems,
        workloads=options.workloads,
        num_requests=options.num_requests,
        output_lens=(options.output_len,),
        repeats=options.repeats,
        results_dir=options.results_dir,
    )
    return run_pairs(wanted, stdout_console())


def command(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; ``arguments`` are those of the process by default."""
    return main(parse_command(Options, "apex validate", sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    sys.exit(command())
