"""Processes that lead a session of their own, how a session ends, and a Python that runs functions for this one.

A GPU that hangs holds the thread that waits for it in native code, where neither signals' handlers nor exceptions
reach it. So the limit is kept by another process. Needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

# -- sessions ---------------------------------------------------------------------------------------------------------

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


# -- a child that is killed when it says nothing for too long ---------------------------------------------------------

Answer = TypeVar("Answer")
PR_SET_PDEATHSIG = 1
LOOK_S = 0.2
ABORT_GRACE_S = 1.0
BEAT_EVERY_S = 0.5


class ChildEnded(RuntimeError):
    """The process ended before it answered, by itself or since it said nothing for too long. The message says which."""


class ChildHung(ChildEnded):
    """It said nothing for too long, and was killed."""


@dataclass(frozen=True)
class Beat:
    """A sign of life, and the seconds until the next one or the answer."""

    limit_s: float


class Child:
    """A fresh Python in a session of its own. It ends with this process, and takes what it started along."""

    def __init__(self, name: str) -> None:
        """``name`` is what errors call it."""
        self.name = name
        self._connection, theirs = Pipe()
        code = f"from evaluation.measure.processes import serve; serve({theirs.fileno()}, {os.getpid()})"
        with theirs:
            self._process = start_session(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, work: Callable[..., Answer], *arguments: Any, limit_s: float) -> Answer:
        """What ``work(*arguments)`` returns there, or the exception that it raises there.

        Raises:
            ChildEnded: the process ended, or has given no sign of life (:func:`still_alive`) for ``limit_s`` seconds.
                Then it is killed, with all that it started.
        """
        self._connection.send((work, arguments))
        silent_s = 0.0
        while silent_s < limit_s:
            # Counted, and not read from a clock: this process may be stopped (Ctrl-Z) and go on later.
            if not self._connection.poll(LOOK_S):
                silent_s += LOOK_S
                continue
            try:
                message = self._connection.recv()
            except (EOFError, ConnectionError):
                end_session(self._process, signal.SIGKILL, 0.0)
                raise ChildEnded(
                    f"{self.name} died ({describe_status(self._process.wait())}), perhaps for lack of host memory"
                ) from None
            if isinstance(message, Beat):
                silent_s, limit_s = 0.0, message.limit_s
                continue
            is_answer, value = message
            if is_answer:
                return value
            raise value
        # On SIGABRT a Python prints where each of its threads is.
        is_gone = end_session(self._process, signal.SIGABRT, ABORT_GRACE_S)
        held = "" if is_gone else "; the kernel still holds it, and with it perhaps the GPU"
        raise ChildHung(f"{self.name} hung: it gave no sign of life for {limit_s:g} s and was killed{held}")

    def stop(self) -> None:
        """Kill the process and all that it started."""
        self._connection.close()
        end_session(self._process, signal.SIGKILL, 0.0)


# -- in the child -----------------------------------------------------------------------------------------------------


@dataclass
class _Parent:
    connection: Connection | None = None
    limit_s: float = 0.0
    told_s: float = 0.0


_parent = _Parent()


def still_alive(limit_s: float) -> None:
    """Tell the parent that this process goes on, and that it may be silent for ``limit_s`` seconds from now on.

    Nothing happens in a process that is no child, nor if it was told so a moment ago.
    """
    now_s = time.monotonic()
    if _parent.connection is None or (limit_s == _parent.limit_s and now_s - _parent.told_s < BEAT_EVERY_S):
        return
    _parent.limit_s, _parent.told_s = limit_s, now_s
    _parent.connection.send(Beat(limit_s))


def serve(descriptor: int, parent: int) -> None:
    """Run what the parent sends until it closes the connection."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort leaves no image of gigabytes
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was set
        os._exit(1)
    _parent.connection = connection = Connection(descriptor)
    while True:
        try:
            work, arguments = connection.recv()
        except EOFError:
            return
        try:
            message = (True, work(*arguments))
        except Exception as error:
            message = (False, _portable(error))
        connection.send(message)
        _parent.limit_s = 0.0


def _portable(error: Exception) -> Exception:
    """The error with its traceback here as a note; one that cannot cross to another process as its text."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in its own process:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    return error
