"""The result folder of `apex bench`, which imports this module by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apex.cli.bench import BenchRun
from evaluation.results.folder import ResultFolder, flat_record
from evaluation.results.provenance import model_identity

NAME = "bench"


def save_bench(model: Path, setting: Mapping[str, Any], runs: Sequence[BenchRun], results_dir: Path) -> Path:
    """Save the results of each system in bench/<run>/ of ``results_dir``. Returns that folder.

    ``setting`` is JSON-able and holds everything but the model that decides the numbers. Measuring the same again
    replaces the earlier results.
    """
    folder = ResultFolder(NAME, {"experiment": NAME, "model": model_identity(model), **setting}, results_dir)
    folder.record_invocation()
    summary = []
    for run in runs:
        values, system = flat_record(run.figures), run.figures["system"]
        details = {"engine": run.description}
        folder.save_point(system, {"group": system, "values": values, "details": details}, run.records)
        summary.append(values)
    folder.save_summary(summary)
    return folder.path
