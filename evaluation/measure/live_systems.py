"""Keeps the system of one point for the next: an engine in a process of its own, or a vLLM server.

Starting a system takes a minute on a GPU: weights are loaded and graphs captured. Points with the same ``session``
share a system. Only one lives at a time, since each takes the whole card. A process of its own gives all memory back
when it ends, and its death fails one point.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from evaluation.drivers import EngineFactory, TorchTask, build_engine, measure, run_point, warm_up_engine
from evaluation.experiments.profile_check import ProfiledMachine
from evaluation.measure.child import Child, still_alive
from evaluation.measure.launched_point import LaunchedTask, run_launched_point, server_command
from evaluation.measure.out_of_memory import explained
from evaluation.run import Point, PointResult
from swiftllm.config import EngineConfig
from swiftllm.files import is_kept, keep

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

READY_TIMEOUT_S = 1200.0
"""Seconds until an engine or a vLLM server is warm: it may load weights from a slow disk and compile kernels."""
PROFILE_TIMEOUT_S = 3600.0
"""A profile of a large model on a CPU takes many minutes."""
HANG_GRACE_S = 30.0
"""An engine that makes no progress raises after ``stall_timeout_s``, with its state. One that cannot even do that, as
it hangs in native code, is killed so much later."""


class Held(Protocol):
    """A system that lives for the points of one session."""

    def run_point(self, point: Point, label: str, console: Console) -> PointResult: ...

    def stop(self) -> None: ...


class EngineHere:
    """An engine in this process, built by its first point."""

    def __init__(self, engine_factory: EngineFactory = build_engine) -> None:
        self.engine_factory = engine_factory
        self.engine: Engine | None = None

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Raises InsufficientMemory, with a pool that fits, where the GPU's memory does not suffice."""
        task: TorchTask = point.task
        with explained(task.engine):
            if self.engine is None:
                self.engine = self.engine_factory(task.system, task.engine)
            warm_up_engine(self.engine, task)
            limit_s = task.stall_timeout_s + HANG_GRACE_S
            return measure(self.engine, task, label, console, lambda: still_alive(limit_s))

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        with explained(config):
            return profile_of(config)

    def stop(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


class EngineInChild:
    """An engine in a process of its own. Both methods raise ChildEnded where it died, or hung and was killed."""

    def __init__(self) -> None:
        self.child = Child("the engine's process")

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        return self.child.call(_run_there, point, label, console.is_terminal, limit_s=READY_TIMEOUT_S)

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        return self.child.call(EngineHere().profile, config, limit_s=PROFILE_TIMEOUT_S)

    def stop(self) -> None:
        self.child.stop()


_there = EngineHere()
"""The engine of a child process."""


def _run_there(point: Point, label: str, on_terminal: bool) -> PointResult:
    return _there.run_point(point, label, Console(force_terminal=on_terminal or None))


class VllmServer:
    """A vLLM server with the model and pools of a point."""

    def __init__(self, task: LaunchedTask, log: Path, console: Console) -> None:
        from evaluation.measure.server import launched_server  # the HTTP client is needed only here

        self.stack = contextlib.ExitStack()
        self.running = self.stack.enter_context(launched_server(server_command(task), log, READY_TIMEOUT_S, console))

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        return run_launched_point(point, self.running, label, console)

    def stop(self) -> None:
        self.stack.close()


class LiveSystems:
    """Runs points. A context manager, which ends the system that still lives.

    ``logs`` is a folder for servers' output. ``make_engine`` says where engines live.
    """

    def __init__(
        self, logs: Path, console: Console, make_engine: Callable[[], EngineHere | EngineInChild] = EngineInChild
    ) -> None:
        self.logs = logs
        self.console = console
        self.make_engine = make_engine
        self.held: Held | None = None
        self.session: Hashable = None
        self.profiles: dict[EngineConfig, tuple[ProfiledMachine, float]] = {}

    def __enter__(self) -> LiveSystems:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the system that lives now."""
        held, self.held, self.session = self.held, None, None
        if held is not None:
            held.stop()

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Run a point of any backend."""
        if point.session is None:
            return run_point(point, label, console)
        try:
            if self.held is None or self.session != point.session:
                self.stop()
                self.held, self.session = self._start(point), point.session
            return self.held.run_point(point, label, console)
        except BaseException:  # what is left of the system may be broken, or hold the card's memory
            self.stop()
            raise

    def _start(self, point: Point) -> Held:
        if not isinstance(point.task, LaunchedTask):
            return self.make_engine()
        return VllmServer(point.task, self.logs / f"{'-'.join(map(str, point.session))}.log", self.console)

    def profile(self, config: EngineConfig) -> tuple[ProfiledMachine, float]:
        """The profile of this machine for an engine configuration, and the seconds its engine took to start."""
        if config not in self.profiles:
            self.stop()
            self.console.print("profiling this machine ...", highlight=False, markup=False)
            self.held = engine = self.make_engine()
            try:
                self.profiles[config] = engine.profile(config)
            finally:
                self.stop()
        return self.profiles[config]


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
    if is_kept(first_start):
        return machine, float(first_start.read_text())
    keep(first_start, f"{start_s:.3f}\n")
    return machine, round(start_s, 3)
