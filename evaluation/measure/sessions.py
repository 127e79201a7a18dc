"""Processes that lead a session of their own, and how a session ends with all that was started in it.

Needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STOP_GRACE_S = 30.0
KILL_WAIT_S = 10.0
"""A killed process that is still there then is held by the kernel: a driver waits for its device."""
LOOK_AGAIN_S = 0.01
ZOMBIE = "Z"  # ended, but its parent has not read its exit status


def start_session(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a command that leads a session of its own. ``options`` are those of ``subprocess.Popen``."""
    return subprocess.Popen(command, start_new_session=True, **options)


def end_session(
    process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM, grace_s: float = STOP_GRACE_S
) -> bool:
    """End a process and the whole session that it leads: by ``how``, and what is left after ``grace_s`` by SIGKILL.

    An interrupt (Ctrl-C) ends the wait and kills the rest at once. Returns whether all is gone; what the kernel holds
    fast is left after some seconds.
    """
    try:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        # Left may be the process itself, or children that it did not wait for, some in other process groups.
        end_s = time.monotonic() + KILL_WAIT_S
        while (left := running_in(process.pid)) and time.monotonic() < end_s:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_AGAIN_S)
        if not left:
            process.wait()
    return not left


def running_in(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    return [pid for pid, stat in session_stats(session).items() if stat[0] != ZOMBIE]


def session_stats(session: int) -> dict[int, list[str]]:
    """/proc/PID/stat of every process of a session, by PID, from its third field (the state) on."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                stats[int(path.parent.name)] = fields
    return stats


def describe_status(status: int) -> str:
    """An exit status of a process in words; a negative one is a signal."""
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def stop_on_sigterm() -> None:
    """Make SIGTERM exit this program with clean-up, as Ctrl-C does, so that what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
