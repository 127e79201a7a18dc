"""Measured points of a paper's setting on this machine: the panels of the figure, unscaled, for our engine and vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.experiments.paper_settings import clip_lengths
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_sweeps import MakePoint, Panel, Sweep, point_names
from evaluation.experiments.torch_point import TorchTask
from evaluation.measure.launched_point import LaunchedTask
from evaluation.planning.local_setting import LocalSetting
from evaluation.results.provenance import cpu_kernels, model_identity
from evaluation.traces.workloads import Lengths

VLLM = "vllm"


@dataclass(frozen=True)
class Measuring:
    """How points of settings are measured on this machine. ``local`` are the settings by name.

    ``vllm`` is the program that serves the system of this name. Where it is None, that system is our engine with
    vLLM's scheduling rules. A point without progress for ``stall_timeout_s`` is abandoned.
    """

    local: Mapping[str, LocalSetting]
    vllm: Path | None
    stall_timeout_s: float


def setting_point_maker(measuring: Measuring) -> MakePoint:
    """Makes the measured points of a sweep's panels."""

    def make(sweep: Sweep, panel: Panel, lengths: Lengths, system: str) -> Point:
        local = measuring.local[panel.setting.name]
        clipped, num_clipped = clip_lengths(lengths, local.engine.max_model_len)
        values = {**local.row(), "panel": panel.panel, "baseline": sweep.baseline, "num_clipped": num_clipped}
        if system == VLLM and measuring.vllm is not None:
            task: TorchTask | LaunchedTask = LaunchedTask(
                system, measuring.vllm, local.engine, clipped, values, measuring.stall_timeout_s
            )
        else:
            task = TorchTask(system, local.engine, clipped, {**values, "server": None}, measuring.stall_timeout_s)
        parts, words = [f"here-{panel.panel}", local.name], [local.title]
        key, group, label = point_names(parts, words, lengths, system, sweep.repeats)
        return Point(key, group, label, task, session=(local.name, system))

    return make


def describe_setting_points(points: Sequence[Point], measuring: Measuring) -> dict[str, Any]:
    """Points and settings for the run's identity: everything that decides their numbers."""
    return {
        "settings": {name: describe_setting(local) for name, local in measuring.local.items()},
        "cpu_kernels": cpu_kernels(),
        "points": [
            {
                "key": point.key,
                "system": point.task.system,
                "workload": asdict(point.task.lengths.spec),
                "trace": {**asdict(point.task.lengths.origin), "lengths": point.task.lengths.digest()},
            }
            for point in points
        ],
    }


def describe_setting(local: LocalSetting) -> dict[str, Any]:
    engine = {name: value for name, value in asdict(local.engine).items() if name != "model"}
    return {
        "title": local.title,
        "pools": local.pools,
        "card": None if local.card is None else asdict(local.card),
        "weights": local.weights,
        "model": model_identity(Path(local.engine.model)),
        "engine": engine,
        "differences": list(local.differences),
    }
