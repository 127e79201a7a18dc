"""Throughput of three systems over the bandwidth of a T4's host: python -m evaluation.examples.host_bandwidth"""

import sys
from dataclasses import dataclass

from evaluation.grid import FIELDS, Grid, concerns, simulate, simulated_point
from evaluation.options import RunOptions, experiment_settings
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.notes import figure_text
from evaluation.plots.style import show_figure, system_colour
from evaluation.results.frame import bases, frame_of, grouped, over, with_columns
from evaluation.study import Study, command

NAME, X = "host-bandwidth", "host_read_gb_s"


@dataclass(frozen=True)
class Options(RunOptions):
    """Throughput of NEO and adaptive over that of a GPU alone, on hosts of other memory, SIMULATED."""

    quick: bool = False
    """Few requests on two hosts."""


def points(options):
    grid = Grid.read(experiment_settings(NAME, options.config), FIELDS, "quick" if options.quick else None)
    return [simulated_point([f"{place[X]} GB/s"], simulate(place, [X])) for place in grid.places(concerns)]


def with_ratios(rows):
    frame = frame_of(rows)
    gpu_only = bases(frame, frame["system"] == "swiftllm", at=["setting"])
    return with_columns(rows, ratio=over(frame["output_tokens_per_s"], gpu_only))


def show(run, console):
    drawn = [row for row in run.summary if row[X]]
    lines = [
        Series(system, system_colour(system), [(row[X], row["ratio"]) for row in rows])
        for system, rows in grouped(drawn, "system").items()
    ]
    panel = LinePanel("T4", "GB/s that the host's cores read", "throughput over swiftllm, SIMULATED", lines, log_x=True)
    show_figure(line_figure([panel], figure_text("The host's bandwidth", drawn, run.machine)), run.folder, console)


main = command(Options, lambda options: [Study(NAME, show, points, with_ratios)])

if __name__ == "__main__":
    sys.exit(main())
