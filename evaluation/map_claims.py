"""Maps the papers' claims over the simulated machine: CPU bandwidth by GPU blocks, SIMULATED.

python evaluation/map_claims.py [--quick] [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here


from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.claims_map.points import make_map_points
from evaluation.experiments.experiment import Experiment, show_again
from evaluation.experiments.options import File, FromFolder, Jobs, Names, ResultsDir, TraceDir, experiment_settings
from evaluation.experiments.runner import one_line_errors
from evaluation.figures.claims_map.show import show_map
from evaluation.results.claims import load_claims
from evaluation.results.paths import RESULTS_DIR

NAME = "claims-map"


@dataclass(frozen=True)
class Options:
    """Where in the plane of CPU bandwidth and GPU blocks the papers' claims would hold, SIMULATED (predicted times, no
    GPU needed). The map takes long and shows the time left.

    The plane and the panels come from configs/experiments/claims-map.yaml, the claims from configs/claims.yaml.
    Results, figure, table and provenance go to results/claims-map/<run>/. Running the same command again continues an
    interrupted run.
    """

    settings: Names = None
    """Settings of configs/experiments/papers.yaml to map, such as apex-t4; by default all of the experiment file."""
    quick: bool = False
    """Fewer requests, so less time; some ratios then differ much from those of the figures."""
    seed: int = 0
    """Seed of the lengths."""
    jobs: Jobs = None
    trace_dir: TraceDir = None
    config: File = None
    """Experiment file to use instead of configs/experiments/claims-map.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to claims-map/<run>/ in this folder."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from the summary.json of this result folder."""


EXPERIMENT = Experiment(NAME, lambda run, console: show_map(load_claims(), run, console))


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 for invalid options."""
    if options.from_folder is not None:
        return show_again(options.from_folder, [EXPERIMENT])
    points = make_map_points(
        experiment_settings(NAME, options.config),
        load_claims(),
        names=options.settings,
        quick=options.quick,
        seed=options.seed,
        trace_dir=options.trace_dir,
    )
    return EXPERIMENT.run(points, options.results_dir, stdout_console(), options.jobs)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
