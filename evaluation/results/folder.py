"""Result folders: ``results/<name>/<run>/`` holds everything of one run, so that an interrupted run can continue.

    points/<key>.json      one finished point: its flat record and the engine's description of itself
    records/<key>.jsonl.gz its per-request records, one line each (read_records reads them)
    summary.json           list of flat records
    summary.md             the same as a table
    figure.png, figure.pdf
    provenance.json        configuration, machine, versions, every invocation
    errors/<key>.txt       why a point failed, until it succeeds

``<run>`` is a hash of everything that decides the numbers. So the same command continues an interrupted run, and a
changed configuration, machine or code starts a new folder. ``results/<name>/latest`` links to the last run.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apex.replay.records import RequestRecord, RequestSummary, record_values
from evaluation.results.provenance import (
    fingerprint,
    git_state,
    machine_identity,
    model_identity,
    software,
    source_hash,
)
from swiftllm.files import check_writable, rescue, save_result, write_atomically

if TYPE_CHECKING:
    from apex.cli.bench import BenchRun

FlatRecord = dict[str, Any]

# Every summary record has these; None where a value does not apply.
SUMMARY_FIELDS = (
    "system", "backend", "gpu", "model", "workload", "trace_origin", "num_requests",
    "output_len", "output_len_mean", "request_rate", "cpu_bandwidth_gb_s",
    "output_tokens_per_s", "output_tokens_per_s_mid_window", "requests_per_s",
    "goodput_requests_per_s", "ttft_target_s", "tpot_target_s",
    "per_token_latency_s_mean", "per_token_latency_s_p50", "per_token_latency_s_p90", "per_token_latency_s_p99",
    "ttft_s_mean", "ttft_s_p50", "ttft_s_p90", "ttft_s_p99",
    "tpot_s_mean", "tpot_s_p50", "tpot_s_p90", "tpot_s_p99",
    "completed", "failed", "wall_s", "gpu_batch_busy_fraction", "cpu_busy_fraction",
)  # fmt: skip


def records_file(folder: Path, key: str) -> Path:
    """The file of a point's records in a run's folder."""
    return folder / "records" / f"{key}.jsonl.gz"


def read_records(path: Path) -> list[dict[str, Any]]:
    """The per-request records of a point, in the workload's order."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


FORMER_NAMES = {
    "lane_busy_fraction": "gpu_batch_busy_fraction", "lane_threads": "gpu_batch_threads",
    "ticket_launch_us": "attention_launch_us", "ticket_us": "attention_us", "prefill_lane": "prefill_chunks",
    "max_cohorts": "max_cpu_batches", "cohorts-1": "cpu-batches-1", "cohorts-4": "cpu-batches-4",
    "lane_factor": "gpu_batch_factor",
}  # fmt: skip
"""Of columns, settings and rows in results recorded until 2026-11-28."""


def read_json(path: Path) -> Any:
    """A ``summary.json`` or ``provenance.json``, with today's names."""
    text = path.read_text()
    for former, name in FORMER_NAMES.items():
        text = text.replace(f'"{former}"', f'"{name}"')
    return json.loads(text)


def to_json(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False, default=str) + "\n"


class ResultFolder:
    """The folder of one run. ``configuration`` is JSON-able and holds everything that decides the numbers."""

    def __init__(self, name: str, configuration: Mapping[str, Any], results_dir: Path) -> None:
        self.identity = {
            "configuration": dict(configuration),
            "machine": machine_identity(),
            "versions": software(),
            "source_hash": source_hash(),
        }
        self.run = fingerprint(self.identity)
        self.path = results_dir / name / self.run
        self._unwritten: dict[str, Mapping[str, Any]] = {}  # finished points that are not in the folder
        check_writable(self.path)

    def record_invocation(self) -> None:
        """Add this invocation to provenance.json."""
        path = self.path / "provenance.json"
        earlier = json.loads(path.read_text())["invocations"] if path.is_file() else []
        invocation = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": [Path(sys.executable).name, *sys.argv],
            "git": git_state(),
            "load_average": os.getloadavg()[0],
        }
        write_atomically(path, to_json({"run": self.run, **self.identity, "invocations": [*earlier, invocation]}))

    def finished_point(self, key: str) -> dict[str, Any] | None:
        """The saved result of a point, or None if it is not finished."""
        path = self.path / "points" / f"{key}.json"
        return json.loads(path.read_text()) if path.is_file() else self._unwritten.get(key)

    def save_point(self, key: str, point: Mapping[str, Any], records: Iterable[RequestRecord | RequestSummary]) -> None:
        """Save a finished point. The JSON file is written last, because it marks the point as finished.

        Where the folder cannot be written to by now, the point is saved elsewhere, and is in this run's summary.
        """
        lines = "".join(json.dumps(record_values(record)) + "\n" for record in records)
        packed = gzip.compress(lines.encode(), mtime=0)  # the same records give the same bytes
        files = {records_file(self.path, key): packed, self.path / "points" / f"{key}.json": to_json(point)}
        try:
            for path, content in files.items():
                write_atomically(path, content)
            (self.path / "errors" / f"{key}.txt").unlink(missing_ok=True)
        except OSError as error:
            self._unwritten[key] = json.loads(to_json(point))
            for path, content in files.items():
                rescue(path, content, error)

    def save_error(self, key: str, text: str) -> None:
        save_result(self.path / "errors" / f"{key}.txt", text)

    def save_summary(self, records: Sequence[FlatRecord], table: str | None = None) -> None:
        """Write the records as JSON and as a Markdown table (by default ``markdown_table`` of the records).

        A run without any result does not become the latest one.
        """
        is_written = save_result(self.path / "summary.json", to_json(list(records)))
        save_result(self.path / "summary.md", markdown_table(records) if table is None else table)
        if records and is_written:
            link, fresh = self.path.parent / "latest", self.path.parent / f".latest.{os.getpid()}"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(self.run, target_is_directory=True)
            os.replace(fresh, link)


def flat_record(values: Mapping[str, Any]) -> FlatRecord:
    """A summary record: all SUMMARY_FIELDS first, then the other values.

    Raises:
        TypeError: a value is not a plain number, string, bool or None.
    """
    record = {name: values.get(name) for name in SUMMARY_FIELDS} | dict(values)
    for name, value in record.items():
        if value is not None and not isinstance(value, (str, int, float, bool)):
            raise TypeError(f"summary field {name}={value!r} is not flat")
    return record


DRAWN = ("output_tokens_per_s", "per_token_latency_s_mean")
"""Metrics that figures draw; rows also have the lowest and the highest repeat of these."""


def median_record(repeats: Sequence[FlatRecord]) -> FlatRecord:
    """The field-wise median of repeated measurements; values that are not numbers come from the first.

    With several repeats, ``<metric>_low`` and ``<metric>_high`` are the span of each metric in DRAWN.
    """
    merged = dict(repeats[0])
    for name, first in repeats[0].items():
        values = [record[name] for record in repeats]
        if isinstance(first, (int, float)) and not isinstance(first, bool) and None not in values:
            merged[name] = first if len(set(values)) == 1 else statistics.median(values)  # counts stay integers
            if name in DRAWN and len(repeats) > 1:
                merged |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    return merged | {"repeats": len(repeats)}


def span_of(record: FlatRecord, metric: str) -> tuple[float, float]:
    """The lowest and the highest repeat of a metric in DRAWN; for a single run, its value twice."""
    value = record[metric]
    return record.get(f"{metric}_low", value), record.get(f"{metric}_high", value)


SWEPT = (
    "case", "gpu", "model", "host", "kernel", "load", "request_rate", "output_len", "host_read_gb_s",
    "cpu_bandwidth_gb_s", "reading", "attention_launch_us", "num_gpu_blocks", "actual_over_believed",
    "online_correction",
)  # fmt: skip
"""Fields that a figure may sweep."""

PREDICTED = "predicted_output_tokens_per_s"
"""SIMULATED output tokens/s of a measured point, from the profile of the machine that measured it."""

TABLE = (
    ("system", "system", "{}"),
    ("workload", "workload", "{}"),
    ("output_len", "avg output", "{:.0f}"),
    ("trace_origin", "trace", "{}"),
    ("output_tokens_per_s", "output tok/s", "{:.1f}"),
    (PREDICTED, "predicted (SIMULATED tok/s)", "{:.1f}"),
    ("output_tokens_per_s_mid_window", "mid-window tok/s", "{:.1f}"),
    ("requests_per_s", "requests/s", "{:.2f}"),
    ("per_token_latency_s_mean", "per-token latency mean (s)", "{:.3f}"),
    ("per_token_latency_s_p99", "p99 (s)", "{:.3f}"),
    ("gpu_batch_busy_fraction", "GPU batch busy", "{:.0%}"),
    ("cpu_busy_fraction", "CPU worker busy", "{:.0%}"),
    ("completed", "completed", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
    ("wall_s", "wall (s)", "{:.1f}"),
)  # fmt: skip


def table_columns(records: Sequence[FlatRecord]) -> list[tuple[str, str, str]]:
    """Name, title and format of the summary table's columns; swept fields come before metrics.

    The prediction beside a measurement is a column only where a row has one. Rows with names of their own, since they
    share a system, begin with these.
    """
    named = [("row", "row", "{}")] if any(record.get("row") is not None for record in records) else []
    always = {name for name, _, _ in TABLE}
    swept = [name for name in SWEPT if name not in always and len({record.get(name) for record in records}) > 1]
    how = ("backend", "backend", "{}")  # distinguishes simulated from measured rows
    predicted = any(record.get(PREDICTED) is not None for record in records)
    rest = [column for column in TABLE[2:] if column[0] != PREDICTED or predicted]
    return [*named, *TABLE[:2], how, *((name, name.replace("_", " "), "{}") for name in swept), *rest]


def markdown_cell(value: Any, form: str) -> str:
    """A value as text: a dash for None, six digits if the column has no format."""
    if value is None:
        return "-"
    return f"{value:g}" if form == "{}" and isinstance(value, float) else form.format(value)


def markdown_table(records: Sequence[FlatRecord], columns: Sequence[tuple[str, str, str]] | None = None) -> str:
    """The records as Markdown. ``columns`` are (name, title, format); by default those of ``table_columns``."""
    columns = table_columns(records) if columns is None else columns
    rows = [[markdown_cell(record.get(name), form) for name, _, form in columns] for record in records]
    return "".join(f"{line}\n" for line in markdown_lines([title for _, title, _ in columns], rows))


def markdown_lines(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def save_bench(model: Path, setting: Mapping[str, Any], runs: Sequence[BenchRun], results_dir: Path) -> Path:
    """Save what `apex bench` measured, which finds this by name. Returns the folder, bench/<run>/ of ``results_dir``.

    ``setting`` is JSON-able and holds everything but the model that decides the numbers. Measuring the same again
    replaces the earlier results.
    """
    folder = ResultFolder("bench", {"experiment": "bench", "model": model_identity(model), **setting}, results_dir)
    folder.record_invocation()
    summary = []
    for run in runs:
        values, system = flat_record(run.figures), run.figures["system"]
        details = {"engine": run.description}
        folder.save_point(run.name, {"group": system, "values": values, "details": details}, run.records)
        summary.append(values)
    folder.save_summary(summary)
    return folder.path
