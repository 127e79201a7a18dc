"""Runs stages one after the other, each part of a stage in a process of its own that ends at the stage's limit.

The parts of a stage run side by side: nothing is timed in a stage that has several. parts.txt says how each part
ended; of those that failed the log stays. The page, summary.json and the archive of it all are written anew after every
stage, so stopping early keeps what was done until then, and a later call adds to the same folder. Needs the standard
library alone.
"""

from __future__ import annotations

import signal
import subprocess
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from evaluation.gpu.report import NOT_REACHED, OK, PARTS, read_parts, write_page
from evaluation.measure.processes import describe_status, end_session, start_session
from evaluation.results.paths import REPO_ROOT

POLL_S = 0.1
GRACE_S = 5.0
MOST_LOG_BYTES = 256 << 10
SHOWN_LINES = 40


@dataclass(frozen=True)
class CheckProcess:
    """A process. In its command ``{limit_s}`` stands for the seconds it has."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """Parts that run side by side. They end within ``limit_s`` seconds.

    With fewer than ``least_s`` left of a call the stage is not begun; with fewer than its limit it has what is left.
    By default it is begun only with all of its limit.
    """

    name: str
    limit_s: float
    parts: tuple[CheckProcess, ...]
    least_s: float | None = None

    def is_done(self, folder: Path) -> bool:
        """Whether all its parts went well in this folder, perhaps in an earlier call."""
        ended = {name: result for name, result, _ in read_parts(folder)}
        return all(ended.get(part.name) == OK for part in self.parts)


def run_stages(
    stages: Sequence[Stage], folder: Path, end_s: float, archive: Path | None = None
) -> tuple[bool, list[Stage]]:
    """Run the stages that there is time for before ``end_s`` of :func:`time.monotonic`; of the others it is recorded
    that they were not reached. ``archive`` is a file that packs the folder.

    Returns whether those that ran went well, and the stages that there was no time for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    all_well, left_over, known = True, [], {name for name, *_ in read_parts(folder)}
    for part in (part for stage in stages for part in stage.parts):  # at once: a call may be cut
        if part.name not in known:
            record_result(folder, part.name, NOT_REACHED, 0.0)
    for stage in stages:
        left_s = end_s - time.monotonic()
        if left_s < min(stage.limit_s, stage.limit_s if stage.least_s is None else stage.least_s):
            print(f"== {stage.name}: not begun, since only {left_s:.0f} s are left", flush=True)
            left_over.append(stage)
            continue
        all_well &= run_stage(replace(stage, limit_s=min(stage.limit_s, left_s)), folder)
        try:
            write_page(folder, archive)
        except Exception:  # the rest is still to be measured
            traceback.print_exc()
            all_well = False
    return all_well, left_over


def run_stage(stage: Stage, folder: Path) -> bool:
    """Run the parts of a stage; whether all went well. An interrupt leaves no process behind."""
    names = ", ".join(part.name for part in stage.parts)
    print(f"== {stage.name}: {names} (at most {stage.limit_s:.0f} s)", flush=True)
    start_s, all_well = time.monotonic(), True
    running: dict[CheckProcess, subprocess.Popen[bytes]] = {}
    try:
        for part in stage.parts:
            running[part] = start_part(part, folder, stage.limit_s)
        while running:
            time.sleep(POLL_S)
            is_late = time.monotonic() - start_s >= stage.limit_s
            for part, process in list(running.items()):
                status = process.poll()
                if status is None and not is_late:
                    continue
                if status is None:
                    result = "time limit" if stop_part(process) else "time limit, and the kernel still holds it"
                else:
                    result = OK if status == 0 else f"failed ({describe_status(status).removeprefix('status ')})"
                del running[part]
                all_well &= status == 0
                record_part(folder, part.name, result, time.monotonic() - start_s)
    finally:
        for process in running.values():
            stop_part(process)
    return all_well


def start_part(part: CheckProcess, folder: Path, limit_s: float) -> subprocess.Popen[bytes]:
    command = [word.replace("{limit_s}", f"{limit_s:.0f}") for word in part.command]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log_path(folder, part.name).open("wb") as log:
        return start_session(command, cwd=REPO_ROOT, stdout=log, **streams)


def stop_part(process: subprocess.Popen[bytes]) -> bool:
    """A Python that hangs says where on SIGABRT (with PYTHONFAULTHANDLER). Whether it is gone."""
    return end_session(process, signal.SIGABRT, GRACE_S)


def record_part(folder: Path, name: str, result: str, seconds: float) -> None:
    """Show the end of a part's log, and keep it if the part failed: not more of it than can be committed."""
    log = log_path(folder, name)
    text = log.read_bytes()
    shown = text.decode(errors="replace").splitlines()[-SHOWN_LINES:]
    print("\n".join([*shown, f"-- {name}: {result}, {seconds:.0f} s"]), flush=True)
    if result == OK:
        log.unlink()
    else:
        log.write_bytes(text[-MOST_LOG_BYTES:])
    record_result(folder, name, result, seconds)


def record_result(folder: Path, name: str, result: str, seconds: float) -> None:
    parts = {part[0]: part for part in read_parts(folder)} | {name: [name, result, f"{seconds:.0f}"]}
    (folder / PARTS).write_text("".join("\t".join(part) + "\n" for part in parts.values()))


def log_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
