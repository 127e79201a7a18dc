"""Reproduces Figure 7 of the APEX paper: throughput relative to SwiftLLM against the output length.

python evaluation/reproduce_fig7.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from evaluation.experiments.papers.figure import PaperFigure
from evaluation.experiments.papers.jobs import figure_command
from evaluation.experiments.papers.options import FigureOptions
from evaluation.plots.apex_paper import RATE, draw_fig7
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import kind_of, reading_of


def with_gains(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows, those of ``apex`` with what its gains are over their theory (APEX sections 5.2 and 5.4).

    ``gain_over_600``: its ratio to ``neo`` over that at 600 output tokens, where a plateau is said to begin.
    ``gain_over_b_a``: its gain over ``swiftllm``, ratio less 1, over S = b / a. b, the share of time in which decodes
    dominate, is taken as 1; a is the GPU's rate of attention over the CPU's.
    """
    rates = {(reading_of(row), kind_of(row), row["output_len"], row["system"]): row[RATE] for row in rows}

    def ratio(row: FlatRecord, other: str, output_len: float) -> float | None:
        ours, theirs = (rates.get((reading_of(row), kind_of(row), output_len, name)) for name in (row["system"], other))
        return ours / theirs if ours and theirs else None

    result = []
    for row in rows:
        gains: dict[str, float | None] = {}
        if row["system"] == "apex" and row.get("gpu_attention_gb_s") and not row.get("sensitivity"):
            here, at_600 = ratio(row, "neo", row["output_len"]), ratio(row, "neo", 600)
            over_gpu, a = (
                ratio(row, "swiftllm", row["output_len"]),
                row["gpu_attention_gb_s"] / row["cpu_bandwidth_gb_s"],
            )
            gains["gain_over_600"] = here / at_600 if here and at_600 else None
            gains["gain_over_b_a"] = (over_gpu - 1) * a if over_gpu else None
        result.append({**row, **gains})
    return result


FIGURE = PaperFigure(
    "fig7",
    "Figure 7: throughput over the output length",
    lambda run: draw_fig7(run.summary, run.machine),
    "output_tokens_per_s",
    "throughput",
    derive=with_gains,
)


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
