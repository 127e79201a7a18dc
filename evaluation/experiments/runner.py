"""Runs the points of an experiment into a result folder, but those already there.

Points that measure this machine run one after another. Points that do not (``concurrent``: simulations) run in
parallel processes; a point's result never depends on how many.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from apex.cli.output import stdout_console
from apex.replay.records import RequestRecord, RequestSummary
from evaluation.results.folder import FlatRecord, ResultFolder, flat_record, median_record
from evaluation.results.other_work import DISTURBING_CORES
from evaluation.results.progress import RunProgress
from swiftllm.machine import usable_cores

BUSY_LOAD_PER_CORE = 0.75


@dataclass(frozen=True)
class Point:
    """One measurement. ``key`` names its files; its repeats share ``group``; ``task`` is what to run."""

    key: str
    group: str
    label: str
    task: Any
    concurrent: bool = False
    """Whether other points may run at the same time; then ``task`` and the function that runs it are picklable."""
    cost: float = 1.0
    """How long it takes, in any unit: the longest start first, and the time left is told from it."""


@dataclass(frozen=True)
class PointResult:
    """``values`` are flat summary fields, ``details`` whatever else is worth keeping (engine, counters)."""

    values: Mapping[str, Any]
    records: Sequence[RequestRecord | RequestSummary]
    details: Mapping[str, Any] = field(default_factory=dict)


RunPoint = Callable[[Point, str, Console], PointResult]
"""Runs a point; takes the point, the label for its progress bar, and the console."""

Complete = Callable[[Sequence[FlatRecord]], list[FlatRecord]]
"""Adds to the rows of a summary what only all of them together tell."""

unchanged_rows: Complete = list


@dataclass(frozen=True)
class Outcome:
    """What came of an experiment: folder, summary (finished points only), labels of failed points."""

    folder: Path
    summary: list[FlatRecord]
    failed: list[str]

    def print_outcome(self, console: Console) -> int:
        """Print what failed and where everything is. Returns the exit status: 0 when every point is finished."""
        for label in self.failed:
            print_failure(f"{label}, see errors/ in the results", console)
        console.print(f"summary, raw records and provenance: {self.folder}", highlight=False, soft_wrap=True)
        return 1 if self.failed else 0


def print_failure(text: str, console: Console) -> None:
    console.print(f"failed: {text}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def print_error(error: object, console: Console) -> None:
    """Say why nothing was run; the exit status that goes with it is 2."""
    console.print(f"error: {error}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def run_experiment(
    name: str,
    configuration: Mapping[str, Any],
    points: Sequence[Point],
    run_point: RunPoint,
    results_dir: Path,
    console: Console | None = None,
    jobs: int = 1,
    complete: Complete = unchanged_rows,
) -> Outcome:
    """Run all points that are not finished yet and write the summary.

    A point that raises is reported with its traceback in ``errors/`` and tried again by the next invocation;
    the others still run. At most ``jobs`` concurrent points run at a time, before those that want the machine alone.

    Raises:
        SystemExit: it was interrupted, or nothing can be written there; the user has been told.
    """
    keys = [point.key for point in points]
    if len(set(keys)) < len(keys):
        raise ValueError(f"points share keys: {sorted(key for key in set(keys) if keys.count(key) > 1)}")
    console = console or stdout_console()
    try:
        folder = ResultFolder(name, configuration, results_dir)
        folder.record_invocation()
    except OSError as error:
        print_error(f"cannot write results: {error}; choose another folder with --results-dir", console)
        raise SystemExit(2) from None
    try:
        failed = run_unfinished_points(folder, points, run_point, jobs, console)
    except KeyboardInterrupt:
        kept = sum(folder.finished_point(key) is not None for key in keys)
        text = f"interrupted: {kept} of {len(points)} points are kept in {folder.path}; the same command goes on there"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
        raise SystemExit(128 + signal.SIGINT) from None
    summary = complete(summarise(folder, points))
    folder.save_summary(summary)
    return Outcome(folder.path, summary, [point.label for point in points if point.label in failed])


def run_unfinished_points(
    folder: ResultFolder, points: Sequence[Point], run_point: RunPoint, jobs: int, console: Console
) -> list[str]:
    """Run the points that are not finished. Returns the labels of those that failed."""
    progress = RunProgress(len(points), console)
    left = []
    for point in points:
        if folder.finished_point(point.key) is None:
            left.append(point)
        else:
            progress.skip_point(point.label)
    together = [point for point in left if point.concurrent and jobs > 1]
    alone = [point for point in left if point not in together]
    progress.print_plan(len(together), min(jobs, len(together)), len(alone))
    if any(not point.concurrent for point in alone):
        warn_if_busy(console)
    failed = run_together(folder, together, run_point, progress, jobs) if together else []
    return failed + run_one_by_one(folder, alone, run_point, progress, console)


def run_one_by_one(
    folder: ResultFolder, points: Sequence[Point], run_point: RunPoint, progress: RunProgress, console: Console
) -> list[str]:
    """Run points in this process, in their order. Returns the labels of those that failed."""
    failed = []
    for point in points:
        label = progress.start_point(point.label)
        load = {} if point.concurrent else {"load_average_before": os.getloadavg()[0]}
        try:
            outcome = save_result(folder, point, run_point(point, label, console), load)
        except Exception as error:
            failed.append(point.label)
            outcome = save_failure(folder, point, error)
        progress.finish_point(point.label, outcome)
    return failed


def run_together(
    folder: ResultFolder, points: Sequence[Point], run_point: RunPoint, progress: RunProgress, jobs: int
) -> list[str]:
    """Run points in up to ``jobs`` processes, the longest first. Returns the labels of those that failed."""
    failed = []
    # A fresh interpreter for each process: forking one that has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches every process of the terminal: these end at once, and their parent tells what is kept.
    at_once = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with ProcessPoolExecutor(min(jobs, len(points)), mp_context=context, **at_once) as pool:
        try:
            with progress.pool_progress(sum(point.cost for point in points)) as lines:
                by_cost = sorted(points, key=lambda point: -point.cost)
                futures = {pool.submit(run_quietly, run_point, point): point for point in by_cost}
                for future in as_completed(futures):
                    point = futures[future]
                    try:
                        outcome = save_result(folder, point, future.result(), {})
                    except Exception as error:
                        failed.append(point.label)
                        outcome = save_failure(folder, point, error)
                    lines.finish_point(point.label, outcome, point.cost)
        except BaseException:  # interrupted: what has not begun need not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failed


def run_quietly(run_point: RunPoint, point: Point) -> PointResult:
    """Run a point in a process of its own, whose parent shows the progress."""
    return run_point(point, point.label, Console(quiet=True))


def save_result(folder: ResultFolder, point: Point, result: PointResult, details: Mapping[str, Any]) -> str:
    """Save a point's result; returns it in a few words."""
    values = flat_record(result.values)
    saved = {"group": point.group, "values": values, "details": {**result.details, **details}}
    folder.save_point(point.key, saved, result.records)
    rate = values["output_tokens_per_s"]
    kind = "SIMULATED output tok/s" if values["backend"] == "simulated" else "output tok/s"
    outcome = "no tokens" if rate is None else f"{rate:.1f} {kind}"
    others = values.get("others_busy_cores") or 0.0
    disturbed = f", other work kept {others:.1f} cores busy" if others > DISTURBING_CORES else ""
    return outcome + disturbed + (f", {values['failed']} failed" if values["failed"] else "")


def save_failure(folder: ResultFolder, point: Point, error: Exception) -> str:
    """Save why a point failed; returns it in a line."""
    folder.save_error(point.key, "".join(traceback.format_exception(error)))
    if isinstance(error, BrokenProcessPool):
        return "FAILED: a process died, perhaps for lack of memory; run the same command again with fewer --jobs"
    return f"FAILED: {type(error).__name__}: {error}"


def warn_if_busy(console: Console) -> None:
    """Other work on the machine falls on some points and not on others; say so before minutes go by."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > BUSY_LOAD_PER_CORE * cores:
        text = f"this machine is busy (load average {load:.1f} on {cores} cores): times will be noisy, use --repeats"
        console.print(f"warning: {text}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def summarise(folder: ResultFolder, points: Sequence[Point]) -> list[FlatRecord]:
    """One flat record per group of repeats, in the order of the points, from the saved files alone."""
    groups: dict[str, list[FlatRecord]] = {}
    for point in points:
        saved = folder.finished_point(point.key)
        if saved is not None:
            groups.setdefault(point.group, []).append(saved["values"])
    return [median_record(repeats) for repeats in groups.values()]
