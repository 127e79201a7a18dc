"""Reproduces Figure 6 of the APEX paper: average per-token latency against the request rate.

python evaluation/reproduce_fig6.py [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.studies.figures import FIG6 as FIGURE
from evaluation.studies.figures import figure_command
from evaluation.studies.papers import FigureOptions


@dataclass(frozen=True)
class Options(FigureOptions):
    """Figure 6 of the APEX paper: mean per-token latency over the request rate, (a) on a T4 with OSC, (b) on an A10
    with Azure conversation.

    Without arguments everything is SIMULATED (predicted times, no GPU needed), in about two minutes on two cores.
    On a machine with a GPU the panels of its setting are also MEASURED, within --hours. Without one --backend torch
    measures a scaled-down version. Defaults come from
    configs/experiments/fig6.yaml. Results, figure and provenance go to results/fig6/<run>/.
    """


main = figure_command(Options, FIGURE)

if __name__ == "__main__":
    sys.exit(main())
