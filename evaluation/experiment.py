"""Runs the points of an experiment one after another into a result folder, but those already there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation.progress import RunProgress
from evaluation.provenance import usable_cores
from evaluation.records import RequestRecord
from evaluation.results import FlatRecord, ResultFolder, flat_record, median_record

BUSY_LOAD_PER_CORE = 0.75


@dataclass(frozen=True)
class Point:
    """One measurement. ``key`` names its files; its repeats share ``group``; ``task`` is what to run."""

    key: str
    group: str
    label: str
    task: Any


@dataclass(frozen=True)
class PointResult:
    """``values`` are flat summary fields, ``details`` whatever else is worth keeping (engine, counters)."""

    values: Mapping[str, Any]
    records: Sequence[RequestRecord]
    details: Mapping[str, Any] = field(default_factory=dict)


RunPoint = Callable[[Point, str, Console], PointResult]
"""Runs a point; takes the point, the label for its progress bar, and the console."""


@dataclass(frozen=True)
class Outcome:
    """What came of an experiment: folder, summary (finished points only), labels of failed points."""

    folder: Path
    summary: list[FlatRecord]
    failed: list[str]


def run_experiment(
    name: str,
    configuration: Mapping[str, Any],
    points: Sequence[Point],
    run_point: RunPoint,
    results_dir: Path,
    console: Console | None = None,
) -> Outcome:
    """Run all points that are not finished yet and write the summary.

    A point that raises is reported with its traceback in ``errors/`` and tried again by the next invocation;
    the others still run.
    """
    keys = [point.key for point in points]
    if len(set(keys)) < len(keys):
        raise ValueError(f"points share keys: {sorted(key for key in set(keys) if keys.count(key) > 1)}")
    console = console or Console()
    folder = ResultFolder(name, configuration, results_dir)
    folder.note_invocation()
    warn_if_busy(console)
    progress = RunProgress(len(points), console)
    failed = []
    for point in points:
        if folder.finished_point(point.key) is not None:
            progress.skip_point(point.label)
            continue
        try:
            load = os.getloadavg()[0]
            result = run_point(point, progress.start_point(point.label), console)
            values = flat_record(result.values)
        except Exception as error:
            failed.append(point.label)
            folder.save_error(point.key, traceback.format_exc())
            progress.finish_point(point.label, f"FAILED: {type(error).__name__}: {error}")
            continue
        saved = {
            "group": point.group,
            "values": values,
            "details": {**result.details, "load_average_before": load},
        }
        folder.save_point(point.key, saved, result.records)
        rate = values["output_tokens_per_s"]
        outcome = "no tokens" if rate is None else f"{rate:.1f} output tok/s"
        progress.finish_point(point.label, outcome + (f", {values['failed']} failed" if values["failed"] else ""))
    summary = summarise(folder, points)
    folder.save_summary(summary)
    return Outcome(folder.path, summary, failed)


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
