"""Predicts measured points: the simulator replays their workloads on this machine's own profile table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from evaluation.drivers import SimulatedHardware, SimulatedTask, TorchTask, run_simulated_point
from evaluation.experiments.profile_check import ProfiledMachine
from evaluation.results.provenance import fingerprint, source_hash
from evaluation.run import Point, plain, processes
from swiftllm.files import cache_dir, is_kept, keep

if TYPE_CHECKING:
    from evaluation.measure.launched_point import LaunchedTask


@dataclass(frozen=True)
class Prediction:
    """SIMULATED results of a point: output tokens/s, and seconds from its first request to its last token.

    Both are None if the point could not be simulated; ``problem`` says why.
    """

    output_tokens_per_s: float | None
    wall_s: float | None
    problem: str | None = None


def simulated_twin(task: TorchTask | LaunchedTask, machine: ProfiledMachine) -> SimulatedTask:
    """The same point for the simulator, on the times of ``machine``."""
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


def predict(points: Sequence[Point], machines: Sequence[ProfiledMachine], jobs: int, what: str) -> list[Prediction]:
    """A prediction for each point on its machine, from the cache or simulated in up to ``jobs`` processes.

    ``what`` names the work on the progress bar.
    """
    tasks = [simulated_twin(point.task, machine) for point, machine in zip(points, machines, strict=True)]
    source = source_hash()
    files = [_cache_file(task, source) for task in tasks]
    found: dict[Path, Prediction] = {file: _read(file) for file in set(files) if is_kept(file)}
    left = {file: task for file, task in zip(files, tasks, strict=True) if file not in found}
    for file, prediction in _simulate(left, jobs, what).items():
        found[file] = prediction
        if prediction.problem is None:
            keep(file, json.dumps(asdict(prediction)) + "\n")
    return [found[file] for file in files]


def _simulate(tasks: Mapping[Path, SimulatedTask], jobs: int, what: str) -> dict[Path, Prediction]:
    console = Console(stderr=True)
    bar = {"description": what, "total": len(tasks), "console": console, "disable": not console.is_terminal}
    if min(jobs, len(tasks)) <= 1:
        return {file: simulate(task) for file, task in track(tasks.items(), **bar)}
    with processes(min(jobs, len(tasks))) as pool:
        return dict(zip(tasks, track(pool.map(simulate, tasks.values()), **bar), strict=True))


def simulate(task: SimulatedTask) -> Prediction:
    try:
        values = run_simulated_point(Point("", "", "", task), "", Console(quiet=True)).values
    except Exception as error:  # a point that cannot be predicted is measured all the same
        return Prediction(None, None, f"{type(error).__name__}: {error}")
    return Prediction(values["output_tokens_per_s"], values["wall_s"])


def _cache_file(task: SimulatedTask, source: str) -> Path:
    """The file of a task's prediction. Its name is a hash of all that decides it, with the ``source`` code's hash."""
    decides = [plain(replace(task, values={})), source]
    return cache_dir() / "predictions" / f"{fingerprint(decides)}.json"


def _read(file: Path) -> Prediction:
    return Prediction(**json.loads(file.read_text()))
