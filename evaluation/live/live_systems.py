"""Keeps the system of one point for the next: an engine in a process of its own, or a vLLM server.

Starting a system takes a minute on a GPU: weights are loaded and graphs captured. Points with the same ``session``
share a system. Only one lives at a time, since each takes the whole card. A process of its own gives all memory back
when it ends, and its death fails one point.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from evaluation.experiments.points import run_point
from evaluation.experiments.profile_check import ProfiledMachine
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.torch_point import EngineFactory, TorchTask, build_engine, measure, warm_up_engine
from evaluation.live.launched_point import LaunchedTask, run_launched_point, server_command
from evaluation.live.out_of_memory import explained
from evaluation.replay.child import Child, still_alive
from swiftllm.config import EngineConfig
from swiftllm.files import write_atomically

if TYPE_CHECKING:
    from evaluation.replay.launch import LaunchedServer
    from swiftllm.engine.engine import Engine

READY_TIMEOUT_S = 1200.0
"""Seconds until an engine or a vLLM server is warm: it may load weights from a slow disk and compile kernels."""
PROFILE_TIMEOUT_S = 3600.0
"""A profile of a large model on a CPU takes many minutes."""
HANG_GRACE_S = 30.0
"""An engine that makes no progress raises after ``stall_timeout_s``, with its state. One that cannot even do that, as
it hangs in native code, is killed so much later."""


class LiveSystems:
    """Runs points. A context manager, which ends the system that still lives. ``logs`` is a folder for servers' output.

    With ``in_process`` engines live in this process.
    """

    def __init__(self, logs: Path, console: Console, in_process: bool = False) -> None:
        self.logs = logs
        self.console = console
        self.engines: EngineHolder | EngineProcess = EngineHolder() if in_process else EngineProcess()
        self.profiles: dict[EngineConfig, tuple[ProfiledMachine, float]] = {}
        self.server: tuple[Hashable, LaunchedServer, contextlib.ExitStack] | None = None

    def __enter__(self) -> LiveSystems:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the system that lives now."""
        self.engines.stop()
        if self.server is not None:
            server, self.server = self.server, None
            server[2].close()

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Run a point of any backend."""
        if point.session is None:
            return run_point(point, label, console)
        try:
            if isinstance(point.task, LaunchedTask):
                self.engines.stop()
                return run_launched_point(point, self._server(point), label, console)
            self._stop_server()
            return self.engines.run_point(point, label, console)
        except BaseException:  # what is left of the system may be broken, or hold the card's memory
            self.stop()
            raise

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        """The profile of this machine for an engine configuration, and the seconds its engine took to start."""
        if config not in self.profiles:
            self._stop_server()
            self.console.print("profiling this machine ...", highlight=False, markup=False)
            self.profiles[config] = self.engines.profile(config)
        return self.profiles[config]

    def _server(self, point: Point) -> LaunchedServer:
        """The ready server of a point's session."""
        from evaluation.replay.launch import launched_server  # the HTTP client is needed only here

        if self.server is not None and self.server[0] == point.session:
            return self.server[1]
        self._stop_server()
        start = time.monotonic()
        self.console.print(f"starting {point.task.system} ...", highlight=False, markup=False)
        stack = contextlib.ExitStack()
        log = self.logs / f"{'-'.join(map(str, point.session))}.log"
        server = stack.enter_context(launched_server(server_command(point.task), log, READY_TIMEOUT_S))
        self.server = (point.session, server, stack)
        self.console.print(f"  ready after {time.monotonic() - start:.0f} s", highlight=False)
        return server

    def _stop_server(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            server[2].close()


class EngineHolder:
    """Engines in this process, one at a time."""

    def __init__(self, engine_factory: EngineFactory = build_engine) -> None:
        self.engine_factory = engine_factory
        self.session: Hashable = None
        self.engine: Engine | None = None

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Replay the point's workload on the engine of its session, which is built unless it lives."""
        task: TorchTask = point.task
        with explained(task.engine):
            if self.engine is None or self.session != point.session:
                self.stop()
                self.engine = self.engine_factory(task.system, task.engine)
                self.session = point.session
            warm_up_engine(self.engine, task)
            limit_s = task.stall_timeout_s + HANG_GRACE_S
            return measure(self.engine, task, label, console, lambda: still_alive(limit_s))

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        self.stop()
        with explained(config):
            return profile_of(config)

    def stop(self) -> None:
        engine, self.engine, self.session = self.engine, None, None
        if engine is not None:
            engine.close()


class EngineProcess:
    """Engines in a process of their own, a fresh one for each session. One that hangs is killed."""

    def __init__(self) -> None:
        self.session: Hashable = None
        self.child: Child | None = None

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """As :meth:`EngineHolder.run_point`.

        Raises:
            ChildEnded: the process died or hung.
        """
        if self.child is None or self.session != point.session:
            self._start(point.session)
        return self.child.call(_run_here, point, label, console.is_terminal, limit_s=READY_TIMEOUT_S)

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        self._start("profile")
        try:
            return self.child.call(_profile_here, config, limit_s=PROFILE_TIMEOUT_S)
        finally:
            self.stop()

    def stop(self) -> None:
        child, self.child, self.session = self.child, None, None
        if child is not None:
            child.stop()

    def _start(self, session: Hashable) -> None:
        self.stop()
        self.child, self.session = Child("the engine's process"), session


# -- in the engine's process ------------------------------------------------------------------------------------------

_holder = EngineHolder()


def _run_here(point: Point, label: str, on_terminal: bool) -> PointResult:
    return _holder.run_point(point, label, Console(force_terminal=on_terminal or None))


def _profile_here(config: EngineConfig) -> tuple[ProfiledMachine, float]:
    return _holder.profile(config)


def profile_of(config: EngineConfig) -> tuple[ProfiledMachine, float]:
    """The cached profile of this machine, else measured now, and the seconds that the backend took to start.

    These seconds are those of the first start with this profile. A plan rests on them, and so does the identity of the
    run that it describes.
    """
    from apex.perf.profile_cache import load_or_measure, profile_identity, profile_path  # loads torch
    from apex.systems import open_backend
    from swiftllm.runtime.build import closed_on_failure, scheduler_limits

    start = time.monotonic()
    backend = open_backend(config)
    with closed_on_failure(backend):
        start_s = time.monotonic() - start
        table, limits = load_or_measure(config, backend), scheduler_limits(config, backend)
        machine = ProfiledMachine(table, backend.num_layers, limits, backend.dtype_name, backend.device_name)
        profile = profile_path(profile_identity(config, backend))
    backend.close()
    first_start = profile.with_name(f"{profile.stem}-{config.load_format}.start")
    if first_start.is_file():
        return machine, float(first_start.read_text())
    write_atomically(first_start, f"{start_s:.3f}\n")
    return machine, round(start_s, 3)
