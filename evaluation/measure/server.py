"""A server under measurement: one that runs somewhere, or one that is started here and stopped with all its processes.

Both are OpenAI-compatible, and ready when they answer. A server started here runs in its own session, bound to the
given cores (Linux). The session's processor time and memory are read from /proc, also those of idle servers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from evaluation.measure.processes import describe_status, end_session, session_stats, start_session
from swiftllm.ports import reserved_port

PROBE_TIMEOUT_S = 5.0
POLL_EVERY_S = 0.25
SHOWN_CHARS = 200
SHOWN_LOG_LINES = 15
ERROR_LINE = re.compile(r"(^|\] )[\w.]+(Error|Exception|OutOfResources): ")  # a traceback's last line, perhaps logged
SHOWN_PREFIXES = ("OMP_", "KMP_", "GOMP_", "MKL_", "VLLM_", "TORCH", "APEX_", "HF_", "LD_PRELOAD", "MALLOC_", "CUDA_")
"""Of environment variables that may change a server's behaviour or speed."""


class ServerNotReady(ConnectionError):
    """No usable server; the message says what to start."""


@dataclass(frozen=True)
class Server:
    """A running server as it describes itself; ``name`` is its name in results.

    ``max_model_len`` (tokens) and ``version`` are None if the server does not report them.
    """

    name: str
    url: str
    model: str
    max_model_len: int | None = None
    version: str | None = None


def still_running() -> str | None:
    """The default ``ended``: whether a server started elsewhere has ended is unknown."""


def connect_server(
    name: str,
    url: str,
    ready_timeout_s: float = 60.0,
    expected: Server | None = None,
    ended: Callable[[], str | None] = still_running,
) -> Server:
    """Wait until the server at ``url`` (no trailing /v1) is ready, and ask for its model.

    ``ended`` returns the reason why the server will never be ready, or None.

    Raises:
        ServerNotReady: the server is not ready in time, not OpenAI-compatible, or not the ``expected`` one; the message
            says what to do.
    """
    deadline = time.monotonic() + ready_timeout_s
    # The environment's proxies are ignored: the measurement would include them.
    with httpx.Client(base_url=url, timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        while (reason := why_not_ready(client)) is not None:
            if end := ended():
                raise ServerNotReady(f"{name}: {end} before it was ready")
            if time.monotonic() >= deadline:
                raise ServerNotReady(
                    f"{name}: no server ready at {url} within {ready_timeout_s:g} s ({reason}); start one, for example "
                    f"`vllm serve MODEL --port {port_of(url)}`, and run the same command again"
                )
            time.sleep(POLL_EVERY_S)
        try:
            model = ask(client, "/v1/models")["data"][0]
            served, max_model_len = str(model["id"]), model.get("max_model_len")
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerNotReady(
                f"{name}: {url} is no OpenAI-compatible server with a model: GET /v1/models gives {error!r}; check the "
                f"address, or start one, for example `vllm serve MODEL --port {port_of(url)}`"
            ) from error
        try:
            version = str(ask(client, "/version")["version"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            version = None
    server = Server(name, url, served, max_model_len, version)
    if expected is not None and server != expected:
        raise ServerNotReady(f"{name}: the server at {url} is another one than before: was {expected}, is {server}")
    return server


def why_not_ready(client: httpx.Client) -> str | None:
    """None if the server is ready, else the reason. A server without /health is ready when it lists models."""
    try:
        for path in ("/health", "/v1/models"):
            answer = client.get(path)
            if answer.status_code != httpx.codes.NOT_FOUND:
                break
    except httpx.TransportError as error:
        return str(error) or type(error).__name__
    return None if answer.is_success else f"GET {path}: {refusal(answer)}"


def ask(client: httpx.Client, path: str) -> Any:
    return client.get(path).raise_for_status().json()


def port_of(url: str) -> int:
    return httpx.URL(url).port or 8000


def refusal(answer: httpx.Response) -> str:
    """An error response as one line. Its body must have been read."""
    with contextlib.suppress(ValueError):
        return f"HTTP {answer.status_code}: {error_message(answer.json())}"
    return f"HTTP {answer.status_code}: {answer.text[:SHOWN_CHARS] or answer.reason_phrase}"


def error_message(body: Any) -> str:
    """The message of an OpenAI error body, or of a similar one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:SHOWN_CHARS]


# -- servers that are started here ------------------------------------------------------------------------------------


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
        return ended_with(self.process)

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


def ended_with(process: subprocess.Popen[bytes]) -> str | None:
    status = process.poll()
    return None if status is None else f"it ended with {describe_status(status)}"


@contextlib.contextmanager
def launched_server(
    command: ServerCommand,
    log: Path,
    ready_timeout_s: float = 300.0,
    console: Console | None = None,
    label: str | None = None,
) -> Iterator[LaunchedServer]:
    """Start a server and wait until it is ready. At the end stop it with SIGTERM, then SIGKILL for what is left.

    A ``console`` says that it is started; ``label`` is what it is called there, by default the command's name.

    Raises:
        ServerNotReady: the server ended or was not ready in time; the message holds the last lines of ``log``.
        FileNotFoundError: there is no such program.
    """
    start, console = time.monotonic(), console or Console(quiet=True)
    console.print(f"starting {label or command.name} ...", highlight=False, markup=False)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **command.environment}
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        arguments = (*command.arguments, "--host", "127.0.0.1", "--port", str(port))
        with log.open("wb") as output, bound_to(command.cores):
            process = start_session(arguments, env=environment, stdout=output, **streams)
            stack.callback(end_session, process)
        ended = functools.partial(ended_with, process)
        try:
            server = connect_server(command.name, f"http://127.0.0.1:{port}", ready_timeout_s, ended=ended)
        except ServerNotReady as error:
            raise ServerNotReady(f"{error}\n{end_of_log(log)}") from None
        console.print(f"  ready after {time.monotonic() - start:.0f} s", highlight=False)
        yield LaunchedServer(server, process, log)


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


def end_of_log(log: Path) -> str:
    """The last lines of a server's output, and where all of it is. An error that was printed earlier comes first."""
    lines = log.read_text(errors="replace").splitlines()
    shown = lines[-SHOWN_LOG_LINES:]
    first_error = next((line for line in lines if ERROR_LINE.search(line)), None)
    if first_error is not None and first_error not in shown:  # the end may only say that another process failed
        shown = [first_error, "...", *shown]
    return "\n".join([*(shown or ["it printed nothing"]), f"the whole log is {log}"])
