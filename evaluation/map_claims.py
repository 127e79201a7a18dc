"""Maps the papers' claims over the simulated machine: CPU bandwidth by GPU blocks, SIMULATED.

python evaluation/map_claims.py [--quick] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.options import Names, TraceOptions, experiment_settings
from evaluation.results.claims import load_claims
from evaluation.run import Point
from evaluation.studies.claims_map import map_points, show_map
from evaluation.study import Study, command

NAME = "claims-map"


@dataclass(frozen=True)
class Options(TraceOptions):
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


def points(options: Options) -> Sequence[Point]:
    return map_points(
        experiment_settings(NAME, options.config),
        load_claims(),
        names=options.settings,
        quick=options.quick,
        seed=options.seed,
        trace_dir=options.trace_dir,
    )


EXPERIMENT = Study(NAME, lambda run, console: show_map(load_claims(), run, console), points)
main = command(Options, lambda options: [EXPERIMENT])

if __name__ == "__main__":
    sys.exit(main())
