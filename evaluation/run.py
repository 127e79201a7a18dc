"""Runs the points of a study that its result folder does not have yet, and says what decides their numbers.

Points that measure this machine run one after another. Other points (``concurrent``: simulations) run in parallel
processes. A point's result never depends on the number of processes.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ParamSpec

from rich.console import Console

from apex.cli.output import stdout_console
from apex.perf.model import ProfileTable
from apex.replay.records import RequestRecord, RequestSummary
from evaluation.measure.processes import ChildEnded
from evaluation.results.folder import FlatRecord, ResultFolder, flat_record, median_record
from evaluation.results.progress import RunProgress, print_line
from evaluation.results.provenance import DISTURBING_CORES, fingerprint
from evaluation.traces.workloads import Lengths
from swiftllm.config import EngineConfig
from swiftllm.machine import usable_cores

BUSY_LOAD_PER_CORE = 0.75


@dataclass(frozen=True)
class Point:
    """One measurement. ``key`` names its files, repeats share a ``group``, ``task`` describes what to run."""

    key: str
    group: str
    label: str
    task: Any
    concurrent: bool = False
    """Whether other points may run at the same time. Then ``task`` and the function that runs it must be picklable."""
    cost: float = 1.0
    """Expected duration in any unit. Points of high cost start first; the time left is estimated from costs."""
    session: Hashable = None
    """Points of one session run one after another, since starting what they measure takes long."""


@dataclass(frozen=True)
class PointResult:
    """``values`` are flat summary fields; ``details`` are saved with them (engine, counters)."""

    values: Mapping[str, Any]
    records: Sequence[RequestRecord | RequestSummary]
    details: Mapping[str, Any] = field(default_factory=dict)


RunPoint = Callable[[Point, str, Console], PointResult]
"""Runs a point. Arguments: the point, the label for its progress bar, the console."""

Derive = Callable[[Sequence[FlatRecord]], list[FlatRecord]]
"""Adds fields to the rows of a summary that are computed from all rows together."""

unchanged_rows: Derive = list


@dataclass(frozen=True)
class Run:
    """A run of a study: its folder, the rows of finished points, the machine, labels of failed points.

    ``experiment`` is its name, None if the folder has no provenance.
    """

    folder: Path
    experiment: str | None
    summary: Sequence[FlatRecord]
    machine: Mapping[str, Any]
    failed: Sequence[str] = ()

    def print_outcome(self, console: Console) -> int:
        """Print the failures and the folder. Returns the exit status: 0 when every point is finished."""
        for label in self.failed:
            print_failure(f"{label}, see errors/ in the results", console)
        print_line(console, f"summary, raw records and provenance: {self.folder}")
        return 1 if self.failed else 0


def print_failure(text: str, console: Console) -> None:
    print_line(console, f"failed: {text}", "bold red")


def print_error(error: object, console: Console) -> None:
    """Print why nothing was run. Callers then return exit status 2."""
    print_line(console, f"error: {error}", "bold red")


Arguments = ParamSpec("Arguments")


def one_line_errors(main: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """A command whose invalid options, and files that it cannot read or write, end as one line, with exit status 2."""

    @functools.wraps(main)
    def command(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except (ValueError, OSError) as error:
            print_error(error, stdout_console())
            return 2

    return command


def run_unfinished_points(
    folder: ResultFolder,
    points: Sequence[Point],
    run_point: RunPoint,
    run_alone: RunPoint,
    jobs: int,
    console: Console,
) -> None:
    """Run the points that are not finished."""
    progress = RunProgress(len(points), console)
    left = []
    for point in points:
        if folder.finished_point(point.key) is None:
            left.append(point)
        else:
            progress.skip_point(point.label)
    together = [point for point in left if point.concurrent and jobs > 1]
    alone = by_session([point for point in left if point not in together])
    progress.print_plan(len(together), min(jobs, len(together)), len(alone))
    if any(not point.concurrent for point in alone):
        warn_if_busy(console)
    if together:
        run_together(folder, together, run_point, progress, jobs)
    for point in alone:
        label = progress.start_point(point.label)
        load = {} if point.concurrent else {"load_average_before": os.getloadavg()[0]}
        outcome = finish(folder, point, functools.partial(run_alone, point, label, console), load)
        progress.finish_point(point.label, outcome)


def by_session(points: Sequence[Point]) -> list[Point]:
    """The points with those of one session together, at the place of its first; others keep their order."""
    place: dict[Hashable, int] = {}
    for index, point in enumerate(points):
        place.setdefault(point.session, index)
    return sorted(points, key=lambda point: place[point.session])


def run_together(
    folder: ResultFolder, points: Sequence[Point], run_point: RunPoint, progress: RunProgress, jobs: int
) -> None:
    """Run points in up to ``jobs`` processes, the costliest first."""
    by_cost = sorted(points, key=lambda point: -point.cost)
    with (
        processes(min(jobs, len(points))) as pool,
        progress.pool_progress(sum(point.cost for point in points)) as lines,
    ):
        futures = {pool.submit(run_quietly, run_point, point): point for point in by_cost}
        for future in as_completed(futures):
            point = futures[future]
            lines.finish_point(point.label, finish(folder, point, future.result, {}), point.cost)


@contextlib.contextmanager
def processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for simulations. If the block ends early, what has not begun is cancelled.

    They do not import this program's ``__main__``, which may take a second: what they run stands in a module.
    """
    # A fresh interpreter for each process: forking one that has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    # Ctrl-C reaches every process of the terminal. The workers exit at once; the parent prints what is kept.
    at_once = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with ProcessPoolExecutor(number, mp_context=context, **at_once) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        sys.modules["__main__"] = program


def run_quietly(run_point: RunPoint, point: Point) -> PointResult:
    """Run a point in a worker process. The parent process shows the progress."""
    return run_point(point, point.label, Console(quiet=True))


def finish(folder: ResultFolder, point: Point, result: Callable[[], PointResult], details: Mapping[str, Any]) -> str:
    """Save a point's result, or why there is none. Returns a few words about it for the progress line."""
    try:
        return save_result(folder, point, result(), details)
    except Exception as error:
        return save_failure(folder, point, error)


def save_result(folder: ResultFolder, point: Point, result: PointResult, details: Mapping[str, Any]) -> str:
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
    """Save the traceback of a failed point. Returns the error in one line."""
    folder.save_error(point.key, "".join(traceback.format_exception(error)))
    if isinstance(error, ChildEnded):
        return f"FAILED: {error}; the others go on, and the same command runs it again"
    if isinstance(error, BrokenProcessPool):
        return "FAILED: a process died, perhaps for lack of memory; run the same command again with fewer --jobs"
    return f"FAILED: {type(error).__name__}: {error}"


def warn_if_busy(console: Console) -> None:
    """Warn before measuring if other work on the machine would disturb some of the points."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > BUSY_LOAD_PER_CORE * cores:
        text = f"this machine is busy (load average {load:.1f} on {cores} cores): times will be noisy, use --repeats"
        print_line(console, f"warning: {text}", "yellow")


def summarise(folder: ResultFolder, points: Sequence[Point]) -> list[FlatRecord]:
    """One flat record per group of repeats, in the order of the points, read from the saved files."""
    groups: dict[str, list[FlatRecord]] = {}
    for point in points:
        saved = folder.finished_point(point.key)
        if saved is not None:
            groups.setdefault(point.group, []).append(saved["values"])
    return [median_record(repeats) for repeats in groups.values()]


# -- what decides the numbers of points -------------------------------------------------------------------------------


def identity(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Everything that decides the numbers of points, but for the model folders of those that are measured."""
    return [{"key": point.key, "task": plain(point.task)} for point in points]


@functools.singledispatch
def plain(value: Any) -> Any:
    """A value as JSON values; a digest of what is large.

    Raises:
        TypeError: it is of no kind that this module knows.
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(one) for one in value]
    if is_dataclass(value):
        names = [field.name for field in fields(value) if field.compare and not field.name.endswith("timeout_s")]
        return {name: plain(getattr(value, name)) for name in names}
    raise TypeError(f"{type(value).__name__} has no plain form")


@plain.register
def _(path: Path) -> str:
    return path.name


@plain.register
def _(table: ProfileTable) -> dict[str, Any]:
    return {**table.identity, "times": fingerprint(asdict(table))}


@plain.register
def _(lengths: Lengths) -> dict[str, Any]:
    return lengths.identity


@plain.register
def _(function: FunctionType) -> str:
    return function.__qualname__


@plain.register
def _(engine: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(engine).items() if name != "model"}
