"""Reproduces Figure 7 of the APEX paper: throughput relative to SwiftLLM against the output length.

python evaluation/reproduce_fig7.py [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.figures import FIG7 as FIGURE
from evaluation.studies.figures import figure_command
from evaluation.studies.papers import FigureOptions


@dataclass(frozen=True)
class Options(FigureOptions):
    """Figure 7 of the APEX paper: throughput relative to SwiftLLM over the average output length, prompts of 1,000
    tokens, on an A10.

    Without arguments everything is SIMULATED (predicted times, no GPU needed), in about three minutes on two cores.
    On a machine with a GPU the panels of its setting are also MEASURED, within --hours. Without one --backend torch
    measures a scaled-down version. Defaults come from
    configs/experiments/fig7.yaml. Results, figure and provenance go to results/fig7/<run>/.
    """


main = figure_command(Options, FIGURE)

if __name__ == "__main__":
    sys.exit(main())
