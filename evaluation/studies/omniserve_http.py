"""Two classes of service over HTTP on this machine: a server for each point, MEASURED at the client.

First come latency-sensitive requests alone, on a GPU pool that never fills. Their median gap between tokens and their
most KV blocks at once decide the targets and the pool of all other points.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from apex.cli.output import table
from apex.replay.metrics import Targets
from apex.replay.records import RequestRecord
from apex.strategy import StrategyConfig
from evaluation.drivers import HttpTask, run_on_launched
from evaluation.grid import Grid, Place
from evaluation.measure.processes import stop_on_sigterm
from evaluation.measure.server import Server
from evaluation.options import StudyOptions
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.provenance import model_identity
from evaluation.run import Point, PointResult, identity
from evaluation.studies.omniserve import (
    HTTP,
    Options,
    latency_sensitive,
    print_omniserve,
    with_best_effort,
    with_service_ratios,
)
from evaluation.study import Rows, Study, places_of
from evaluation.traces.workloads import Lengths
from swiftllm.config import EngineConfig
from swiftllm.core.request import ServiceClass

NAME = "omniserve-http"
KNOWN = (
    "panel", "baseline", "system", "best_effort", "num_cpu_blocks", "ttft_slo_s", "slo_margin", "duration_s", "seed",
)  # fmt: skip
NOTES = ("shows", "streams", "tpot_over_alone", "pool_over_alone", "ample_blocks")
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


def found_here(section: Mapping[str, Any], alone: FlatRecord) -> dict[str, Any]:
    """Target in seconds per token, and GPU pool in blocks, from the row of latency-sensitive requests alone."""
    tpot_s = section["tpot_over_alone"] * alone["latency_sensitive_gap_s_p50"]
    blocks = math.ceil(section["pool_over_alone"] * alone["latency_sensitive_blocks"])
    return {"tpot_slo_s": round(tpot_s, 4), "num_gpu_blocks": blocks}


def served_point(place: Place, streams: Mapping[str, Any], model: Path, logs: Path) -> Point:
    """The point of a place of the grid that also has a pool, a seed and ``trace_dir``."""
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
        result = run_on_launched(point, http, command, label, console)
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
    return replace(result, values=values)


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


# -- what a server must refuse ----------------------------------------------------------------------------------------

BURST = 64
TIMEOUT_S = 120.0
LONGEST_PROMPT = 512


def refusals(server: Server, pool_tokens: int) -> dict[str, Any]:
    """Fields of a row: the status of contradictory fields, and how a burst of prompts was answered.

    Each prompt takes half of the pool's ``pool_tokens`` at most, so that it can be served.
    """
    return asyncio.run(_refusals(server, min(LONGEST_PROMPT, pool_tokens // 2)))


async def _refusals(server: Server, prompt_len: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def answer(tokens: int, **fields: Any) -> httpx.Response:
            body = {"model": server.model, "prompt": [1] * tokens, "max_tokens": 1, **fields}
            return await client.post("/v1/completions", json=body)

        contradiction = await answer(1, service_tier="flex", priority=-1)
        answers = await asyncio.gather(*(answer(prompt_len) for _ in range(BURST)))
    refused = [each for each in answers if each.status_code == httpx.codes.TOO_MANY_REQUESTS]
    waits_s = [int(each.headers.get("retry-after", 0)) for each in refused]
    return {
        "contradiction_status": contradiction.status_code,
        "burst": BURST,
        "burst_served": sum(each.is_success for each in answers),
        "burst_refused": len(refused),
        "burst_least_retry_after_s": min(waits_s, default=None),
    }


# -- the study --------------------------------------------------------------------------------------------------------


def study(options: Options, settings: Mapping[str, Any]) -> Study:
    """What is served here: the points, what they print, and what decides their numbers."""
    section, model = settings[HTTP], functools.cache(lambda: model_folder(options.model))
    return Study(
        NAME,
        points=lambda options: served_points(options, settings, model()),
        derive=with_service_ratios,
        run_point=run_served_point,
        describe=lambda points: described(points, model()),
        tables=[functools.partial(print_omniserve, section["shows"]), print_contract],
    )


def described(points: Sequence[Point], model: Path) -> dict[str, Any]:
    return {"model": model_identity(model), "points": identity(points)}


def served_points(options: Options, settings: Mapping[str, Any], model: Path) -> list[Point]:
    """The points of figure http. Latency-sensitive requests alone come first: they decide the targets and the pool.

    Raises:
        ValueError: they could not be measured.
    """
    stop_on_sigterm()
    section, logs = settings[HTTP], options.results_dir / NAME / "logs"
    grid = Grid.read({**section, "seed": settings["seed"]}, KNOWN, "quick" if options.quick else None, NOTES)

    def points(names: Sequence[str], options: StudyOptions, **found: Any) -> list[Point]:
        places = places_of(grid.only("panel", names).with_(**found), options, KNOWN)
        return [served_point(place, section["streams"], model, logs) for place in places]

    unchosen = replace(options, only=())  # of latency-sensitive requests alone, whatever runs beside them
    ample = points(["alone"], unchosen, panel="ample", num_gpu_blocks=section["ample_blocks"])
    alone = Study(f"{NAME}-alone", run_point=run_served_point, describe=lambda points: described(points, model))
    measured = alone.run(ample, options.results_dir)
    if not measured.summary:
        raise ValueError(f"nothing was measured on this machine; see errors/ in {measured.folder}")
    found = found_here(section, measured.summary[0])
    return points(["alone"], unchosen, **found) + points(["both", "queued"], options, **found)


def print_contract(rows: Rows, console: Console) -> None:
    lines = [(words, bound, found, "yes" if holds else "NO") for words, bound, found, holds in contract(rows)]
    console.print(
        table(("what must hold", "bound", "found", "holds"), lines, left=("what must hold", "bound", "found"))
    )
