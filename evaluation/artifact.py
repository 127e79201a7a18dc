"""Runs the figures of both papers that apply to this machine, then writes the report page.

python evaluation/artifact.py [--hours 8] [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Literal

from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.measure.live_systems import LiveSystems
from evaluation.measure.processes import stop_on_sigterm
from evaluation.options import ResultsDir, experiment_settings
from evaluation.planning.plan import measures_settings
from evaluation.report import Options as ReportOptions
from evaluation.report import main as write_report
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.progress import print_line
from evaluation.run import Point, PointResult, RunPoint, one_line_errors
from evaluation.studies.figures import (
    FIG5,
    FIG6,
    FIG7,
    FigureJob,
    NeoOptions,
    make_job,
    neo_jobs,
    run_jobs,
    without_traceback,
)
from evaluation.studies.papers import FigureOptions
from swiftllm.machine import first_card

FIGURES = (FIG5, FIG6, FIG7)
SHARED = ("all_gpu_blocks", "plan", "rehearse", "jobs")
"""Options that mean the same to each figure."""
REHEARSED_REQUESTS = 32
"""Requests of every simulated point of a rehearsal."""
FAILS_AFTER, STOPS_AFTER = 1, 3
"""Measured points after which a rehearsal lets one fail, and interrupts the run."""


@dataclass(frozen=True)
class Options:
    """Figures 5, 6 and 7 of the APEX paper and 6 to 10a of NEO: SIMULATED, and measured where a GPU is.

    On a GPU the panels of its setting are measured with its model, pools and lengths, planned to end within --hours.
    The simulations come on top: about ten minutes on four cores. At the end results/report.html compares every claim
    of the papers. The same command continues an interrupted run, and repeats failed points.
    """

    hours: float = 8.0
    """Time for all measured points together."""
    gpu: Literal["t4", "a10"] | None = None
    """Measure in the papers' settings of this GPU instead of those of the GPU that is here."""
    all_gpu_blocks: bool = False
    """Give the KV cache all memory that the GPU has left, in place of the papers' number of blocks."""
    plan: bool = False
    """Print the plans, with predicted throughput and time, and stop."""
    rehearse: bool = False
    """Walk the same path on the CPU with tiny random models and few requests: plans, engines, vLLM's CPU build if it
    is installed, a failing point, an interruption, the report. Shows that all parts work, and measures nothing."""
    jobs: int | None = None
    """Simulated points to run in parallel; by default one per usable core."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to <figure>/<run>/ in this folder; a rehearsal's to rehearsal/<figure>/<run>/."""


class RehearsedFailure(RuntimeError):
    """A rehearsal lets this point fail, to show that the others go on and the next run repeats it."""


class Rehearsal:
    """Runs points, lets one fail, and interrupts the run some points later. Both happen once."""

    def __init__(self, run: RunPoint) -> None:
        self.run = run
        self.num_begun = 0

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        if point.concurrent:  # on one core, simulations come here too
            return self.run(point, label, console)
        self.num_begun += 1
        if self.num_begun == FAILS_AFTER + 1:
            raise RehearsedFailure("this point fails because this is a rehearsal")
        if self.num_begun == STOPS_AFTER + 1:
            raise KeyboardInterrupt
        return self.run(point, label, console)


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0 when every point is finished, 2 when nothing can run here."""
    console = stdout_console()
    results_dir = options.results_dir / "rehearsal" if options.rehearse else options.results_dir
    chosen = FigureOptions(
        setting=options.gpu and f"apex-{options.gpu}",
        num_requests=REHEARSED_REQUESTS if options.rehearse else None,
        results_dir=results_dir,
        **{name: getattr(options, name) for name in SHARED},
    )
    if measures_settings(chosen, first_card()):
        chosen = replace(chosen, hours=options.hours)
    else:
        text = "no GPU here: nothing is measured in a paper's setting, and --hours has no effect"
        print_line(console, text, "yellow")
    with without_traceback(console), LiveSystems(results_dir / "logs", console) as live:
        jobs = make_jobs(chosen, console, live)
        if options.rehearse and not options.plan:
            rehearse_faults(jobs, chosen, console, live)
        status = run_jobs(jobs, chosen, console, live.run_point)
    if options.plan:
        return status
    report = ReportOptions(output=results_dir / "report.html", results_dir=results_dir)
    return status | write_report(report)


def make_jobs(options: FigureOptions, console: Console, live: LiveSystems) -> list[FigureJob]:
    """All figures, without panels that do not apply here.

    Raises:
        ValueError: a setting does not fit this machine.
    """
    # A rehearsal starts vLLM for one figure alone: each start takes half a minute.
    jobs = [
        make_job(figure, options, console, live, with_server=figure is FIGURES[0] or not options.rehearse)
        for figure in FIGURES
    ]
    neo = NeoOptions(
        setting=options.setting and options.setting.replace("apex-", "neo-"),
        **{name: getattr(options, name) for name in ("hours", "num_requests", "results_dir", *SHARED)},
    )
    return jobs + neo_jobs(experiment_settings("neo"), neo, console, live)


def rehearse_faults(jobs: list[FigureJob], options: FigureOptions, console: Console, live: LiveSystems) -> None:
    """Run the first figure until the rehearsed interruption."""
    console.rule("rehearsal of a failing point and of an interruption", align="left")
    rehearsal = Rehearsal(live.run_point)
    try:
        run_jobs(jobs[:1], options, console, rehearsal.run_point)
    except SystemExit as stopped:
        console.print(f"interrupted as rehearsed (exit status {stopped.code}); now the same command again")


if __name__ == "__main__":
    stop_on_sigterm()
    sys.exit(main(parse_options(Options)))
