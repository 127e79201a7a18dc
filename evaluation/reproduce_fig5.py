"""Reproduces Figure 5 of the APEX paper: throughput of the systems over its four workloads.

python evaluation/reproduce_fig5.py [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.figures import FIG5 as FIGURE
from evaluation.studies.figures import figure_command
from evaluation.studies.papers import FigureOptions


@dataclass(frozen=True)
class Options(FigureOptions):
    """Figure 5 of the APEX paper: output throughput (a) on a T4 with OSC at varied output length, (b) on an A10 with
    Azure conversation, LiveBench and Dolphin-r1.

    Without arguments, the papers' GPUs are SIMULATED (predicted times, no GPU needed). Beside that it MEASURES: on a
    GPU the panels of its setting with the paper's model, pools and lengths, within --hours; without one the workloads
    scaled down with SmolLM2-135M, in about five minutes on two cores. Defaults come from configs/experiments/fig5.yaml.
    Results, figure and provenance go to results/fig5/<run>/.
    """


main = figure_command(Options, FIGURE)

if __name__ == "__main__":
    sys.exit(main())
