"""Starts OpenAI-compatible servers for a measurement, and stops them with all their processes.

A server runs in its own session, bound to the given cores (Linux). The session's processor time and memory are read
from /proc, for the measured server and for the idle ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.replay.server import Server, ServerNotReady, connect_server
from evaluation.replay.sessions import describe_status, end_session, session_stats, start_session

SHOWN_LOG_LINES = 15
ERROR_LINE = re.compile(r"(^|\] )[\w.]+(Error|Exception|OutOfResources): ")  # a traceback's last line, perhaps logged
# Prefixes of environment variables that may change a server's behaviour or speed.
SHOWN_PREFIXES = (
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "VLLM_",
    "TORCH",
    "APEX_",
    "HF_",
    "LD_PRELOAD",
    "MALLOC_",
    "CUDA_",
)


@dataclass(frozen=True)
class ServerCommand:
    """The command that starts a server.

    ``--host`` and ``--port`` are added to ``arguments``. ``environment`` extends this process' environment. ``cores``
    are the cores on which the server may run.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))

    def describe(self) -> dict[str, Any]:
        """The command for provenance files, with the inherited environment variables that may matter."""
        surrounding = {name: value for name, value in os.environ.items() if name.startswith(SHOWN_PREFIXES)}
        environment = {**surrounding, **self.environment}
        return {"arguments": list(self.arguments), "environment": environment, "cores": list(self.cores)}


class ServerEnded(RuntimeError):
    """A server that was running has ended by itself; the message says what it printed last."""


@dataclass(frozen=True)
class LaunchedServer:
    """A server that this process started; ``log`` is the file of its output."""

    server: Server
    process: subprocess.Popen[bytes]
    log: Path

    def ended(self) -> str | None:
        """How the server's process ended, or None while it runs."""
        status = self.process.poll()
        return None if status is None else f"it ended with {describe_status(status)}"

    def check_running(self, within_s: float = 0.0) -> None:
        """Raise if the server has ended, or ends within some seconds: its requests fail before its process ends.

        Raises:
            ServerEnded: it has; the message holds the last lines of ``log``.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(within_s)
            raise ServerEnded(f"{self.server.name}: {self.ended()} while it was measured\n{end_of_log(self.log)}")

    def processor_s(self) -> float:
        """Seconds of processor time used by all processes of the server, including ended and reaped children."""
        ticks = sum(sum(map(int, stat[11:15])) for stat in session_stats(self.process.pid).values())
        return ticks / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Physical memory of all its processes. Shared memory counts once per process."""
        return sum(int(stat[21]) for stat in session_stats(self.process.pid).values()) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def launched_server(command: ServerCommand, log: Path, ready_timeout_s: float = 300.0) -> Iterator[LaunchedServer]:
    """Start a server and wait until it is ready. At the end stop it with SIGTERM, then SIGKILL for what is left.

    Raises:
        ServerNotReady: the server ended or was not ready in time; the message holds the last lines of ``log``.
        FileNotFoundError: there is no such program.
    """
    port = free_port()
    arguments = (*command.arguments, "--host", "127.0.0.1", "--port", str(port))
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **command.environment}
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with contextlib.ExitStack() as stack:
        with log.open("wb") as output, bound_to(command.cores):
            process = start_session(arguments, env=environment, stdout=output, **streams)
            stack.callback(end_session, process)

        def ended() -> str | None:
            return None if process.poll() is None else f"it ended with {describe_status(process.returncode)}"

        try:
            server = connect_server(command.name, f"http://127.0.0.1:{port}", ready_timeout_s, ended=ended)
        except ServerNotReady as error:
            raise ServerNotReady(f"{error}\n{end_of_log(log)}") from None
        yield LaunchedServer(server, process, log)


def stop_on_sigterm() -> None:
    """Make SIGTERM exit this program with clean-up, as Ctrl-C does, so that the servers it started are stopped."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Processes started inside this context may run on these cores only, from their first instruction on.

    Raises:
        ValueError: this process may not use some of the cores, or there are none.
    """
    before = os.sched_getaffinity(0)
    if not before.issuperset(cores) or not cores:
        raise ValueError(f"cores {list(cores)} are not among those this process may use: {sorted(before)}")
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    """A port on which nothing listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_of_log(log: Path) -> str:
    """The last lines of a server's output, and where all of it is. An error that was printed earlier comes first."""
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-SHOWN_LOG_LINES:]
    first_error = next((line for line in lines if ERROR_LINE.search(line)), None)
    if first_error is not None and first_error not in shown:  # the end may only say that another process failed
        shown = [first_error, "...", *shown]
    return "\n".join([*(shown or ["it printed nothing"]), f"the whole log is {log}"])
