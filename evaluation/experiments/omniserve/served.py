"""Two classes of service over HTTP on this machine: a server for each point, MEASURED at the client.

First come latency-sensitive requests alone, on a GPU pool that never fills. Their median gap between tokens and their
most KV blocks at once decide the targets and the pool of all other points.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from apex.replay.metrics import Targets
from apex.replay.records import RequestRecord
from apex.strategy import StrategyConfig
from apex.workloads.requests import Lengths
from evaluation.experiments.grid import Grid, Place
from evaluation.experiments.http_point import HttpTask, run_http_point
from evaluation.experiments.omniserve.streams import latency_sensitive, with_best_effort
from evaluation.experiments.runner import Point, PointResult
from evaluation.results.folder import FlatRecord
from swiftllm.config import EngineConfig
from swiftllm.core.request import ServiceClass

FLAGS = ("tpot_slo_s", "ttft_slo_s", "slo_margin", "num_gpu_blocks", "num_cpu_blocks")
"""Fields of a place that are options of its server."""
BLOCK_SIZE = EngineConfig("").block_size
READY_TIMEOUT_S = 300.0
URGENT = ServiceClass.LATENCY_SENSITIVE.value


@dataclass(frozen=True)
class ServedTask:
    """A server and what it is sent. ``values`` are fields of the row that are known beforehand.

    With ``tries_refusals`` the server is also asked what it must refuse (:func:`refusals`).
    """

    system: str
    model: Path = field(compare=False)
    flags: Mapping[str, Any]
    lengths: Lengths
    targets: Targets
    duration_s: float
    values: Mapping[str, Any]
    logs: Path = field(compare=False)
    tries_refusals: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The server's command without address and port."""
        flags = [part for name, value in self.flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        flags += ["--no-enable-prefix-caching"]  # as in the paper; not all systems here have one
        return (sys.executable, "-m", "apex", "serve", str(self.model), "--system", self.system, *flags)


def read_http_grid(section: Mapping[str, Any], variant: str | None) -> Grid:
    """The grid of the section ``http``: latency-sensitive requests alone, each system with best effort beside them, and
    a long best-effort queue."""
    known = ("panel", "baseline", "system", "best_effort", "num_cpu_blocks", "ttft_slo_s", "slo_margin", "duration_s")
    notes = ("shows", "streams", "tpot_over_alone", "pool_over_alone", "ample_blocks")
    return Grid.read(section, known, variant, notes)


def found_here(section: Mapping[str, Any], alone: FlatRecord) -> dict[str, Any]:
    """Target in seconds per token, and GPU pool in blocks, from the row of latency-sensitive requests alone."""
    tpot_s = section["tpot_over_alone"] * alone["latency_sensitive_gap_s_p50"]
    blocks = math.ceil(section["pool_over_alone"] * alone["latency_sensitive_blocks"])
    return {"tpot_slo_s": round(tpot_s, 4), "num_gpu_blocks": blocks}


def served_point(place: Place, streams: Mapping[str, Any], model: Path, logs: Path) -> Point:
    """The point of a place of :func:`read_http_grid` that also has a pool, a seed and ``trace_dir``."""
    of_run = {name: place[name] for name in ("duration_s", "seed", "trace_dir")}
    urgent = latency_sensitive(**streams["latency_sensitive"], **of_run)
    stream = streams[place["best_effort"]] if place.get("best_effort") else None
    place = {"tpot_slo_s": StrategyConfig().tpot_slo_s, **place}
    flags = {name: place[name] for name in FLAGS if name in place}
    targets = Targets(place["ttft_slo_s"], place["tpot_slo_s"])
    row = {
        "panel": place["panel"],
        "baseline": place["baseline"],
        "setting": None,
        "setting_title": "this machine",
        "best_effort": stream and stream["workload"],
        "best_effort_queued": stream and stream["backlog"],
        "ttft_slo_s": targets.ttft_s,
        "tpot_slo_s": targets.tpot_s,
        "num_gpu_blocks": place["num_gpu_blocks"],
        "num_cpu_blocks": place.get("num_cpu_blocks", 0),
        "cpu_hosts": 1,
        "admission_control": True,
        "rate_interval_s": None,
        "slower": 1.0,
    }
    lengths = with_best_effort(urgent, stream, **of_run)
    names = (place["panel"], place["system"])
    key = "-".join(names)
    log, refuses = logs / f"{key}.log", place["panel"] == "queued"
    task = ServedTask(place["system"], model, flags, lengths, targets, place["duration_s"], row, log, refuses)
    return Point(key, key, ", ".join(names), task)


def run_served_point(point: Point, label: str, console: Console) -> PointResult:
    """Start the point's server, send it the requests, and stop it.

    Raises:
        ServerNotReady, ServerEnded, NothingServed: the server did not start, died or served nothing.
    """
    from evaluation.experiments.omniserve.refusals import refusals
    from evaluation.measure.server import ServerCommand, launched_server  # the HTTP client is needed only here

    task: ServedTask = point.task
    command = ServerCommand(task.system, task.arguments)
    with launched_server(command, task.logs, READY_TIMEOUT_S) as running:
        http = HttpTask(
            running.server,
            task.model,
            task.lengths,
            task.values,
            duration_s=task.duration_s,
            targets=task.targets,
            launched=running,
        )
        result = run_http_point(replace(point, task=http), label, console)
        refused = refusals(running.server, task.flags["num_gpu_blocks"] * BLOCK_SIZE) if task.tries_refusals else {}
    urgent = [record for record in result.records if record.service_class == URGENT]
    values = {
        **result.values,
        "backend": "server",
        "server": "apex serve",
        "latency_sensitive_gap_s_p50": median_gap_s(urgent),
        "latency_sensitive_blocks": most_blocks(urgent),
        "latency_sensitive_refused": sum(record.refused for record in urgent),
        "best_effort_refused": sum(record.refused for record in result.records) - sum(r.refused for r in urgent),
        **refused,
    }
    return PointResult(values, result.records, {**result.details, "command": command.describe()})


def median_gap_s(records: Sequence[RequestRecord]) -> float | None:
    """The median of all gaps between two tokens of a request."""
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_times_s, record.token_times_s[1:], strict=False)
    ]
    return sorted(gaps)[len(gaps) // 2] if gaps else None


def most_blocks(records: Sequence[RequestRecord]) -> int:
    """The most KV blocks that requests hold at once, if each has all that it ever needs from its arrival to its end."""
    changes = []
    for record in records:
        if record.token_times_s:
            blocks = -(-(record.prompt_len + record.wanted_output_len - 1) // BLOCK_SIZE)
            changes += [(record.arrival_s, blocks), (record.last_token_s, -blocks)]
    held = most = 0
    for _, blocks in sorted(changes):
        held += blocks
        most = max(most, held)
    return most


def contract(rows: Sequence[FlatRecord]) -> list[tuple[str, str, str, bool]]:
    """What must hold over HTTP: words, bound, number found, and whether it holds. A row that is missing is left out."""
    at = {(row["panel"], row["system"]): row for row in rows}
    lines = []
    for (panel, system), row in at.items():
        if panel != "both" or system == row["baseline"]:
            continue
        if (share := row["slo_attainment"]) is not None:
            lines.append((f"{system}: share within both targets", "95% at least", f"{share:.1%}", share >= 0.95))
        if (points := row["points_over_alone"]) is not None:
            words = f"{system}: points over latency-sensitive requests alone"
            lines.append((words, "-3 at least", f"{points:+.2f}", points >= -3))
        if (ratio := row["best_effort_over_baseline"]) is not None:
            words = f"{system}: best-effort tokens/s over {row['baseline']}"
            lines.append((words, "1.3 at least", f"{ratio:.2f}", ratio >= 1.3))
    if queued := at.get(("queued", "omniserve")):
        refused, waiting = queued["latency_sensitive_refused"], queued["best_effort_queued"]
        words = f"latency-sensitive requests refused beside {waiting:,} best-effort ones"
        found = f"{refused} of {queued['latency_sensitive_arrived']}"
        lines.append((words, "0", found, refused == 0))
        status = queued["contradiction_status"]
        lines.append(("status of fields that contradict each other", "400", f"{status}", status == 400))
        refused, least_s = queued["burst_refused"], queued["burst_least_retry_after_s"]
        words = f"refused of a burst of {queued['burst']}: 429 with Retry-After"
        lines.append((words, "1 at least", f"{refused}, {least_s} s or more", refused > 0 and (least_s or 0) >= 1))
    return lines
