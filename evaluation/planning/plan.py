"""The plan of a measurement: its points with their predicted throughput and time, before anything is measured."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from apex.cli.output import number, table
from evaluation.drivers import TorchTask
from evaluation.experiments.profile_check import ProfiledMachine
from evaluation.grid import Grid, Place, clip_lengths, lengths_of, setting_of
from evaluation.measure.launched_point import LaunchedTask
from evaluation.planning.local_setting import LocalSetting
from evaluation.planning.predictions import Prediction, predict
from evaluation.planning.request_counts import counts_within
from evaluation.results.progress import format_s, print_line
from evaluation.results.provenance import cpu_kernels
from evaluation.run import Point
from evaluation.studies.papers import point_names
from swiftllm.machine import GIB

VLLM = "vllm"
SERVER_START_S = 120.0
"""Assumed seconds until a vLLM server is ready: it compiles the model and captures graphs. No GPU was at hand."""


@dataclass(frozen=True)
class ProfiledSetting:
    """A setting whose profile has been measured. ``start_s`` are the seconds that its engine took to start."""

    local: LocalSetting
    machine: ProfiledMachine
    start_s: float


@dataclass(frozen=True)
class Plan:
    """Points whose rows hold their predictions; ``start_s`` are the seconds that each session takes to start."""

    points: tuple[Point, ...]
    predictions: tuple[Prediction, ...]
    start_s: Mapping[Hashable, float]

    @property
    def total_s(self) -> float:
        return sum(prediction.wall_s or 0.0 for prediction in self.predictions) + sum(self.start_s.values())


@dataclass(frozen=True)
class Planner:
    """Plans the measured points of a grid.

    Attributes:
        settings: the grid's settings by name.
        vllm: the program that serves the system of this name. Where it is None, that system is our engine with vLLM's
            scheduling rules.
        stall_timeout_s: a point without progress for so long is abandoned.
        row: fields of places for the rows.
        jobs: predictions to make in parallel.
    """

    grid: Grid
    settings: Mapping[str, ProfiledSetting]
    vllm: Path | None
    stall_timeout_s: float
    row: tuple[str, ...]
    jobs: int

    @property
    def most(self) -> tuple[int, ...]:
        """The full number of requests of each panel."""
        return tuple(panel["num_requests"] for panel in self.grid.panels)

    def plan_with(self, counts: Sequence[int]) -> Plan:
        """The plan with these numbers of requests, a number for each panel."""
        panels = [{**panel, "num_requests": n} for panel, n in zip(self.grid.panels, counts, strict=True)]
        points = [self._point(place) for place in Grid(tuple(panels)).places()]
        profiled = [self.settings[point.task.values["setting"]] for point in points]
        predictions = predict(points, [setting.machine for setting in profiled], self.jobs, "predicting the plan")
        start_s: dict[Hashable, float] = {}
        for point, setting in zip(points, profiled, strict=True):
            start_s[point.session] = SERVER_START_S if is_server(point) else setting.start_s
        return Plan(tuple(map(with_prediction, points, predictions)), tuple(predictions), start_s)

    def _point(self, place: Place) -> Point:
        system, lengths = place["system"], lengths_of(place)
        local = self.settings[setting_of(place).name].local
        clipped, num_clipped = clip_lengths(lengths, local.engine.max_model_len)
        parts, words = [f"here-{place['panel']}", local.name], [local.title]
        key, group, label = point_names(parts, words, lengths, place)
        row = {name: {**place, "point": key}.get(name) for name in self.row}
        values = {**local.row(), **row, "num_clipped": num_clipped}
        task: TorchTask | LaunchedTask
        if system == VLLM and self.vllm is not None:
            task = LaunchedTask(system, self.vllm, local.engine, clipped, values, self.stall_timeout_s)
        else:
            task = TorchTask(system, local.engine, clipped, {**values, "server": None}, self.stall_timeout_s)
        return Point(key, group, label, task, session=(local.name, system))

    def describe(self, points: Sequence[Point]) -> dict[str, Any]:
        """Points and settings for the run's identity: everything that decides their numbers."""
        return {
            "settings": {name: setting.local.identity for name, setting in self.settings.items()},
            "cpu_kernels": cpu_kernels(),
            "points": [{"key": p.key, "system": p.task.system, **p.task.lengths.identity} for p in points],
        }


def plan_within(planners: Sequence[Planner], limit_s: float) -> list[Plan]:
    """Plans with the same fraction of each panel's requests, the largest whose points take ``limit_s`` seconds in all.

    Raises:
        TooLittleTime: even the fewest requests take longer.
    """
    most = [full for planner in planners for full in planner.most]

    def plans_with(counts: Sequence[int]) -> list[Plan]:
        left = iter(counts)
        return [planner.plan_with([next(left) for _ in planner.most]) for planner in planners]

    counts = counts_within(most, limit_s, lambda counts: sum(plan.total_s for plan in plans_with(counts)))
    return plans_with(counts)


def is_server(point: Point) -> bool:
    return isinstance(point.task, LaunchedTask)


def with_prediction(point: Point, prediction: Prediction) -> Point:
    """The point with its prediction in its row."""
    predicted = {
        "predicted_output_tokens_per_s": prediction.output_tokens_per_s,
        "predicted_wall_s": prediction.wall_s,
    }
    return replace(point, task=replace(point.task, values={**point.task.values, **predicted}))


def print_settings(settings: Iterable[LocalSetting], console: Console) -> None:
    """What each setting needs of this machine's memory, and how it differs from the paper's."""
    for local in settings:
        fit, engine = local.fit, local.engine
        pools = [
            f"{blocks:,} KV blocks {blocks * fit.bytes_per_block / GIB:.2f} GiB"
            for blocks in (engine.num_gpu_blocks, engine.num_cpu_blocks)
        ]
        rest = f"activations {fit.activation_bytes / GIB:.2f}, reserved {fit.reserved_bytes / GIB:.2f} GiB"
        weights = f"weights {fit.weight_bytes / GIB:.2f} GiB"
        lines = [f"setting {local.name}: {local.title}, {engine.dtype}"]
        if local.card is None:
            lines.append(
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {weights}, {rest}; GPU tier {pools[0]}, "
                f"CPU tier {pools[1]}"
            )
        else:
            lines += [
                f"  {local.card.name}: {fit.device_bytes / GIB:.1f} GiB; {weights}, {rest}, {pools[0]} of at most "
                f"{fit.max_gpu_blocks:,}",
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {pools[1]}",
            ]
        lines += [f"  differs from the paper: {difference}" for difference in local.differences]
        for line in lines:
            print_line(console, line)


def print_plan(figure: str, plan: Plan, console: Console) -> None:
    """The points of a figure with their SIMULATED throughput and time, and the total."""
    titles = ("panel", "setting", "workload", "out", "req/s", "system", "requests", "SIMULATED tok/s", "time")
    lines = []
    for point, prediction in zip(plan.points, plan.predictions, strict=True):
        lengths, values, rate = point.task.lengths, point.task.values, point.task.lengths.spec.request_rate
        lines.append(
            (
                values["panel"],
                values["setting"],
                lengths.spec.name,
                f"{lengths.mean_output_tokens:.0f}",
                "" if rate is None else f"{rate:g}",
                f"{point.task.system} (server)" if is_server(point) else point.task.system,
                str(lengths.spec.num_requests),
                number(prediction.output_tokens_per_s, ".1f"),
                "-" if prediction.wall_s is None else format_s(prediction.wall_s),
            )
        )
    print_line(console, f"Plan of {figure}: points to measure")
    console.print(table(titles, lines, left=("panel", "setting", "workload", "system")))
    starts = f"{len(plan.start_s)} starts of engines and servers in {format_s(sum(plan.start_s.values()))}"
    predicted = f"predicted from this machine's own profile: {format_s(plan.total_s)} with {starts}"
    print_line(console, f"{len(plan.points)} points, {predicted}")
    for problem in sorted({prediction.problem for prediction in plan.predictions if prediction.problem}):
        print_line(console, f"not predicted: {problem}", "yellow")
