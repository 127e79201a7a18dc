"""Keeps the system of one point for the next: an engine in a process of its own, or a vLLM server.

Starting a system takes a minute on a GPU: weights are loaded and graphs captured. Points with the same ``session``
share a system. Only one lives at a time, since each takes the whole card. A process of its own gives all memory back
when it ends, and its death fails one point.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from apex.perf.model import ProfileTable
from apex.workloads.requests import load_prompt_tokens
from evaluation.drivers import (
    EngineFactory,
    HttpTask,
    SimulatedHardware,
    SimulatedTask,
    TorchTask,
    build_engine,
    measure,
    run_on_launched,
    run_point,
    warm_up_engine,
    wide_warm_up,
)
from evaluation.measure.processes import Child, still_alive
from evaluation.run import Point, PointResult
from swiftllm.config import EngineConfig
from swiftllm.files import is_kept, keep
from swiftllm.machine import InsufficientMemory, first_card
from swiftllm.scheduling.validation import SchedulerLimits

if TYPE_CHECKING:
    from evaluation.measure.server import LaunchedServer, ServerCommand
    from swiftllm.engine.engine import Engine

# -- a machine whose times are known ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfiledMachine:
    """The simulator's input: times and limits of one engine configuration on this machine."""

    table: ProfileTable
    num_layers: int
    limits: SchedulerLimits
    dtype: str
    device: str
    start_s: float = 0.0
    """Seconds that its backend took to start."""


def simulated_twin(task: TorchTask, machine: ProfiledMachine) -> SimulatedTask:
    """What a measured point runs, for the simulator, on the times of ``machine``."""
    engine = task.engine
    model = Path(engine.model).name
    return SimulatedTask(
        system=task.system,
        hardware=SimulatedHardware(machine.device, model, machine.dtype, machine.table, machine.num_layers),
        num_gpu_blocks=engine.num_gpu_blocks,
        num_cpu_blocks=engine.num_cpu_blocks,
        lengths=task.lengths,
        limits=machine.limits,
        block_size=engine.block_size,
        values=task.values,
    )


# -- which GPU pool would fit where memory ran out --------------------------------------------------------------------

SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
NEEDED = re.compile(r"[Tt]ried to allocate ([\d.]+) (KiB|MiB|GiB)")
FREE = re.compile(r"of which ([\d.]+) (KiB|MiB|GiB) is free")
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@contextlib.contextmanager
def explained(config: EngineConfig) -> Iterator[None]:
    """Turns torch's error into one that names a GPU pool that fits.

    Raises:
        InsufficientMemory: the GPU's memory did not suffice.
    """
    import torch  # only points that really run load it

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise InsufficientMemory(advice(str(error), config)) from error


def advice(message: str, config: EngineConfig) -> str:
    """What to do about torch's message, for an engine of this configuration with a pool of known size."""
    from swiftllm.model.config import ModelConfig

    first_line = message.strip().splitlines()[0] if message.strip() else "CUDA out of memory"
    blocks = config.num_gpu_blocks
    needed = _bytes(NEEDED, message)
    if blocks is None or needed is None:
        return f"the GPU's memory did not suffice: give a smaller --num-gpu-blocks. {first_line}"
    block = ModelConfig.from_folder(Path(config.model)).kv_bytes_per_token(ITEM_BYTES.get(config.dtype, 2))
    missing = needed - (_bytes(FREE, message) or 0)
    fewer = max(1, -(-missing // (block * config.block_size)))
    if fewer >= blocks:
        return (
            f"the GPU's memory did not suffice, and a smaller pool than {blocks:,} KV blocks does not help: "
            f"lower --max-num-batched-tokens, or take a smaller model. {first_line}"
        )
    return (
        f"the GPU's memory did not suffice beside {blocks:,} KV blocks; a pool of {blocks - fewer:,} would fit: "
        f"--num-gpu-blocks {blocks - fewer}. {first_line}"
    )


def _bytes(pattern: re.Pattern[str], message: str) -> int | None:
    found = pattern.search(message)
    return None if found is None else int(float(found[1]) * SIZES[found[2]])


# -- a vLLM server with the model and pool of our engine --------------------------------------------------------------

REQUEST_TIMEOUT_S = 24 * 3600.0
"""A request waits as long as the replay takes: all come at once."""


def server_command(task: TorchTask) -> ServerCommand:
    from evaluation.measure.vllm import vllm_command  # the HTTP client is needed only here

    engine = task.engine
    limits = ("dtype", "block_size", "num_gpu_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs")
    return vllm_command(
        task.program,
        Path(engine.model),
        device_type=engine.device,
        dummy_weights=engine.load_format == "dummy",
        **{name: getattr(engine, name) for name in limits},
    )


def run_launched_point(point: Point, running: LaunchedServer, label: str, console: Console) -> PointResult:
    """Replay the point's workload against its running server, timed at the client.

    Raises:
        ServerNotReady, ServerEnded, NothingServed: the server died or served nothing.
    """
    task: TorchTask = point.task
    engine, model = task.engine, Path(task.engine.model)
    http = HttpTask(
        running.server,
        model,
        task.lengths,
        task.values,
        task.stall_timeout_s,
        REQUEST_TIMEOUT_S,
        prompt_tokens=load_prompt_tokens(model),
        launched=running,
        warm_up=wide_warm_up,
    )
    result = run_on_launched(point, http, server_command(task), label, console)
    card = first_card() if engine.device == "cuda" else None
    values = {
        **result.values,
        "system": task.system,
        "backend": "server",
        "server": f"vllm {running.server.version or 'of unknown version'}",
        "gpu": None if card is None else card.name,
        "model": model.name,
        "dtype": engine.dtype,
        "num_gpu_blocks": engine.num_gpu_blocks,
        "num_cpu_blocks": 0,
    }
    return replace(result, values=values)


# -- what lives -------------------------------------------------------------------------------------------------------

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

    def profile(self, config: EngineConfig) -> ProfiledMachine:
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

    def profile(self, config: EngineConfig) -> ProfiledMachine:
        return self.child.call(EngineHere().profile, config, limit_s=PROFILE_TIMEOUT_S)

    def stop(self) -> None:
        self.child.stop()


_there = EngineHere()
"""The engine of a child process."""


def _run_there(point: Point, label: str, on_terminal: bool) -> PointResult:
    return _there.run_point(point, label, Console(force_terminal=on_terminal or None))


class VllmServer:
    """A vLLM server with the model and pools of a point."""

    def __init__(self, task: TorchTask, log: Path, console: Console) -> None:
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
        self.profiles: dict[EngineConfig, ProfiledMachine] = {}

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
        if point.task.program is None:
            return self.make_engine()
        return VllmServer(point.task, self.logs / f"{'-'.join(map(str, point.session))}.log", self.console)

    def profile(self, config: EngineConfig) -> ProfiledMachine:
        """The profile of this machine for an engine configuration."""
        if config not in self.profiles:
            self.stop()
            self.console.print("profiling this machine ...", highlight=False, markup=False)
            self.held = engine = self.make_engine()
            try:
                self.profiles[config] = engine.profile(config)
            finally:
                self.stop()
        return self.profiles[config]


def profile_of(config: EngineConfig) -> ProfiledMachine:
    """The cached profile of this machine, else measured now.

    Its seconds to start are those of the first start with this profile. A plan rests on them, and so does the identity
    of the run that it describes.
    """
    from apex.build import open_backend
    from apex.perf.machine_profile import load_or_measure, profile_identity, profile_path  # loads torch
    from swiftllm.build import closed_on_failure, scheduler_limits

    start = time.monotonic()
    backend = open_backend(config)
    with closed_on_failure(backend):
        start_s = round(time.monotonic() - start, 3)
        table, limits = load_or_measure(config, backend), scheduler_limits(config, backend)
        profile = profile_path(profile_identity(config, backend))
    backend.close()
    first_start = profile.with_name(f"{profile.stem}-{config.load_format}.start")
    if is_kept(first_start):
        start_s = float(first_start.read_text())
    else:
        keep(first_start, f"{start_s:.3f}\n")
    return ProfiledMachine(table, backend.num_layers, limits, backend.dtype_name, backend.device_name, start_s)
